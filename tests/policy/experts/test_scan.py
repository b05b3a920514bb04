"""The scan against the optimum: all choices up to 12 live experts, an integer program beyond; and its structure."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.experts.records import makespan
from dynajax.policy.experts.scan import CORE, FEW, scan, scan_with_core
from tests.policy.experts.cases import COSTS, all_choices, draw_costs, draw_work, milp_bound, optimum, work_of

NAMES = ("t0_s", "t_trans_s", "gpu_s", "gpu_token_s", "cpu_s", "cpu_token_s", "t_sync_s")


def quality(cases, core):
    """Optimum over what was found, each case's."""
    return np.array(
        [best / makespan(work, scan_with_core(work, costs, core).on_gpu, costs) for work, costs, best in cases]
    )


@pytest.fixture(scope="module")
def small_cases():
    """1,000 cases of up to 12 live experts with their optima."""
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(1000):
        work, costs = draw_work(rng, int(rng.integers(1, 13))), draw_costs(rng)
        cases.append((work, costs, optimum(work, costs)))
    return cases


def test_up_to_twelve_experts_the_scan_is_the_optimum_but_for_a_trace(small_cases):
    found = quality(small_cases, CORE)
    assert found.max() < 1 + 1e-9, "better than the optimum: one of the two is wrong"
    assert found.mean() >= 0.9999 and found.min() >= 0.99
    exact = [value for value, case in zip(found, small_cases, strict=True) if len(case[0].tokens) <= CORE]
    assert min(exact) > 1 - 1e-6


@pytest.mark.parametrize(("core", "mean", "worst"), [(8, 0.9995, 0.97), (6, 0.999, 0.95)])
def test_a_core_smaller_than_the_case_is_no_brute_force_and_still_good(small_cases, core, mean, worst):
    found = quality([case for case in small_cases if len(case[0].tokens) > core], core)
    assert found.mean() >= mean and found.min() >= worst


def test_the_cuts_alone_fall_short_and_the_test_can_tell(small_cases):
    found = quality(small_cases, 0)
    assert found.mean() >= 0.995
    assert found.min() < 0.97, "the core would be superfluous"


def test_a_little_beyond_the_core_a_second_one_helps():
    rng, cases = np.random.default_rng(2), []
    for _ in range(250):
        work, costs = draw_work(rng, int(rng.integers(CORE + 1, CORE + 4))), draw_costs(rng)
        cases.append((work, costs, optimum(work, costs)))
    found = quality(cases, CORE)
    assert found.mean() >= 0.9999 and found.min() >= 0.985


def test_beyond_twelve_experts_against_the_integer_program():
    rng = np.random.default_rng(4)
    cases = []
    for _ in range(40):
        work, costs = draw_work(rng, int(rng.integers(20, 129))), draw_costs(rng)
        cases.append((work, costs, milp_bound(work, costs)))
    found = quality(cases, CORE)
    assert found.mean() >= 0.995 and found.min() >= 0.97
    assert found.max() < 1 + 1e-6


def test_the_integer_program_knows_the_optimum():
    rng = np.random.default_rng(1)
    for _ in range(40):
        work, costs = draw_work(rng, int(rng.integers(1, 10))), draw_costs(rng)
        assert milp_bound(work, costs, gap=1e-7) == pytest.approx(optimum(work, costs), rel=1e-5)


def cut_choices(work, heavy_residents, heavy_absent):
    """Every assignment that cuts each class at one place, heavy or light ones on the device."""
    classes = []
    for is_resident, heavy in ((True, heavy_residents), (False, heavy_absent)):
        places = np.flatnonzero(work.resident == is_resident)
        classes.append(places[np.argsort(work.tokens[places] * (-1 if heavy else 1), kind="stable")])
    for kept in range(len(classes[0]) + 1):
        for fetched in range(min(work.room, len(classes[1])) + 1):
            on_gpu = np.zeros(len(work.tokens), np.bool_)
            on_gpu[classes[0][:kept]] = on_gpu[classes[1][:fetched]] = True
            yield on_gpu


@pytest.mark.parametrize("seed", range(40))
def test_the_cuts_are_the_best_pair_in_either_direction(seed):
    rng = np.random.default_rng(seed)
    work, costs = draw_work(rng, int(rng.integers(1, 12))), draw_costs(rng)
    found = makespan(work, scan_with_core(work, costs, 0).on_gpu, costs)
    directions = [(True, True)]
    if costs.cpu_token_s * costs.gpu_s < costs.gpu_token_s * costs.cpu_s:
        directions = [(False, True), (False, False)]
    best = min(makespan(work, on_gpu, costs) for way in directions for on_gpu in cut_choices(work, *way))
    assert found == pytest.approx(best, rel=1e-6)


def test_light_residents_go_to_the_device_where_tokens_cost_more_there():
    costs = replace(COSTS, gpu_s=1e-6, gpu_token_s=1e-4, cpu_s=1e-3, cpu_token_s=1e-6, t_sync_s=1e-9)
    work = work_of([1, 2, 40, 50, 60], [True] * 5, room=0)
    assert scan(work, costs).on_gpu.tolist() == [True, True, False, False, False]
    assert scan_with_core(work, costs, 0).on_gpu.tolist() == [True, True, False, False, False]


def test_the_example_of_the_docstring():
    costs = replace(COSTS, t0_s=1e-12, t_trans_s=1.0, gpu_s=0.1, gpu_token_s=1e-12, cpu_s=1.0, cpu_token_s=1e-12)
    found = scan(work_of([1, 1, 1], [True, False, False]), costs)
    assert (found.on_gpu.tolist(), found.fetch.tolist()) == ([True, True, False], [1])


@pytest.mark.parametrize("live", [0, 1, CORE, CORE + 1, FEW, FEW + 1, 40])
@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("room", [0, 2, 99])
def test_room_is_kept_and_arguments_are_not_changed(live, resident, room):
    rng = np.random.default_rng(live)
    work = work_of(rng.integers(1, 9, live), rng.random(live) < resident, room=room)
    before = [array.copy() for array in (work.experts, work.tokens, work.resident)]
    found = scan(work, COSTS)
    assert np.count_nonzero(found.on_gpu & ~work.resident) == len(found.fetch) <= room
    for array, old in zip((work.experts, work.tokens, work.resident), before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_nothing_is_fetched_for_nothing():
    """The link is busy for so long that a fetch changes the makespan by nothing but rounding."""
    work = work_of([1] * 6, [True] * 3 + [False] * 3, host_busy_s=1.0)
    slow = replace(COSTS, cpu_s=1e-12, cpu_token_s=1e-12)
    assert len(scan(work, slow).fetch) == 0
    assert len(scan_with_core(work, slow, 0).fetch) == 0


def test_all_choices_are_all_that_keep_to_the_room():
    work = work_of([1, 1, 1], [True, False, False], room=1)
    assert len(all_choices(work)) == 6


def test_costs_are_drawn_wide_enough_for_both_directions():
    rng = np.random.default_rng(0)
    drawn = [draw_costs(rng) for _ in range(200)]
    light = sum(costs.cpu_token_s * costs.gpu_s < costs.gpu_token_s * costs.cpu_s for costs in drawn)
    assert 20 < light < 180
    assert all(max(getattr(c, name) for c in drawn) > 10 * min(getattr(c, name) for c in drawn) for name in NAMES)
