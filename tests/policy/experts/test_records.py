"""Costs and makespans: a flow shop simulated job by job, and the order of transfers against all orders."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from dynajax.policy.experts.records import Assignment, assigned, makespan
from tests.policy.experts.cases import COSTS, all_choices, draw_costs, draw_work, work_of


def simulated(work, on_gpu, costs, order):
    """Seconds, one job after the other; `order`: the places of the fetched ones, as their transfers follow."""
    host = sum((costs.cpu(w) for w, there in zip(work.tokens, on_gpu, strict=True) if not there), work.host_busy_s)
    host += costs.t_sync_s if not on_gpu.all() or work.host_busy_s else 0.0
    gpu, link = 0.0, work.copy_busy_s
    for place in np.flatnonzero(on_gpu & work.resident):
        gpu += costs.gpu(work.tokens[place])
    for place in order:
        link += costs.t0_s + costs.t_trans_s
        gpu = max(gpu, link) + costs.gpu(work.tokens[place])
    return max(host, gpu)


@pytest.mark.parametrize("seed", range(25))
def test_makespan_is_that_of_the_simulated_flow_shop_in_its_best_order(seed):
    rng = np.random.default_rng(seed)
    costs, work = draw_costs(rng), draw_work(rng, int(rng.integers(1, 7)))
    on_gpu = rng.random(len(work.tokens)) < 0.6
    work = replace(work, room=99)
    orders = [simulated(work, on_gpu, costs, order) for order in permutations(np.flatnonzero(on_gpu & ~work.resident))]
    assert makespan(work, on_gpu, costs) == pytest.approx(min(orders), rel=1e-12)
    assert simulated(work, on_gpu, costs, assigned(work, on_gpu).fetch) == pytest.approx(min(orders), rel=1e-12)


def test_the_order_of_transfers_matters():
    work = work_of([1, 1000], [False, False])
    on_gpu = np.ones(2, np.bool_)
    costs = replace(COSTS, gpu_token_s=1e-6)
    assert simulated(work, on_gpu, costs, [0, 1]) > 1.2 * makespan(work, on_gpu, costs)


def test_many_assignments_at_once_are_each_by_itself():
    rng = np.random.default_rng(0)
    costs, work = draw_costs(rng), draw_work(rng, 6)
    choices = all_choices(work)
    together = makespan(work, choices, costs)
    assert together.shape == (len(choices),)
    np.testing.assert_allclose(together, [makespan(work, one, costs) for one in choices], rtol=1e-12)
    np.testing.assert_allclose(makespan(work, choices[None], costs), together[None], rtol=1e-12)


def test_a_host_with_nothing_to_do_is_not_waited_for():
    work = work_of([3], [True])
    assert makespan(work, np.array([True]), COSTS) == COSTS.gpu(3)
    assert makespan(work, np.array([False]), COSTS) == COSTS.cpu(3) + COSTS.t_sync_s
    busy = work_of([3], [True], host_busy_s=1.0)
    assert makespan(busy, np.array([True]), COSTS) == 1.0 + COSTS.t_sync_s


def test_no_live_experts_take_no_time():
    assert makespan(work_of([], []), np.zeros(0, np.bool_), COSTS) == 0


def test_fetches_are_ordered_by_tokens_and_then_by_place():
    work = work_of([2, 9, 2, 5], [False, False, False, True])
    found = assigned(work, np.ones(4, np.bool_))
    assert isinstance(found, Assignment) and found.fetch.tolist() == [1, 0, 2]


def test_more_fetches_than_room_are_refused():
    with pytest.raises(AssertionError, match="2 fetches for 1 places"):
        assigned(work_of([1, 1], [False, False], room=1), np.ones(2, np.bool_))


@pytest.mark.parametrize("name", ["t0_s", "t_trans_s", "gpu_s", "gpu_token_s", "cpu_s", "cpu_token_s", "t_sync_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_costs_are_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} must be > 0 seconds, got"):
        replace(COSTS, **{name: value})


def test_transfers_in_a_window():
    assert [COSTS.transfers_in(n * COSTS.copy_s) for n in (0.5, 1.01, 3.5)] == [0, 1, 3]
    assert COSTS.transfers_in(-1.0) == 0
