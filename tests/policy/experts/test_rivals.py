"""Other systems' assignments: each keeps its own rule, to the letter of its source, and to the room."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.experts import rivals
from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.records import makespan
from tests.policy.experts.cases import COSTS, all_choices, draw_costs, draw_work, optimum, work_of

PLAIN = replace(COSTS, t0_s=1e-9, t_trans_s=3.0, gpu_s=1.0, gpu_token_s=1e-9, cpu_s=2.0, cpu_token_s=1.0, t_sync_s=1e-9)


@pytest.mark.parametrize("name", ASSIGN)
def test_all_keep_to_room_and_none_beats_the_optimum(name):
    rng = np.random.default_rng(0)
    for case in range(60):
        work, costs = draw_work(rng, case % 10), draw_costs(rng)
        found = ASSIGN[name](work, costs)
        assert found.on_gpu.shape == work.tokens.shape and found.on_gpu.dtype == np.bool_
        assert sorted(found.fetch.tolist()) == np.flatnonzero(found.on_gpu & ~work.resident).tolist()
        assert len(found.fetch) <= work.room
        assert (np.diff(work.tokens[found.fetch]) <= 0).all()
        if len(work.tokens):
            assert makespan(work, found.on_gpu, costs) >= optimum(work, costs) * (1 - 1e-9)


def test_resident():
    work = work_of([1, 9, 3], [True, False, True])
    assert rivals.resident(work, COSTS).on_gpu.tolist() == [True, False, True]


def test_fetch_all_takes_the_heaviest_if_room_is_short():
    work = work_of([1, 9, 3, 4], [True, False, False, False], room=2)
    assert rivals.fetch_all(work, COSTS).on_gpu.tolist() == [True, True, False, True]
    assert rivals.fetch_all(replace(work, room=9), COSTS).on_gpu.all()


@pytest.mark.parametrize("seed", range(12))
def test_per_expert_has_the_least_sum_of_times(seed):
    """What Fiddler's code does: of all splits the smallest sum, residents on the device."""
    rng = np.random.default_rng(seed)
    work, costs = draw_work(rng, int(rng.integers(1, 9))), draw_costs(rng)
    choices = all_choices(work)
    choices = choices[choices[:, work.resident].all(axis=1)]
    gpu = costs.gpu(work.tokens) + costs.copy_s * ~work.resident
    total = choices @ gpu + ~choices @ costs.cpu(work.tokens)
    found = rivals.per_expert(work, costs).on_gpu
    assert found @ gpu + ~found @ costs.cpu(work.tokens) == pytest.approx(total.min(), rel=1e-9)


def test_dali_by_hand():
    """Device 1 s, with a transfer 3.5 s; host 2 s and 1 s a token. Host less device, tokens 1, 5, 2, 4: residents 2 and
    6, absent 0.5 and 2.5. So place 1 (device 1), 3 (device 4.5, host would be 6), 0 (host 3, device would be 5.5),
    2 (host 7, device would be 8)."""
    costs = replace(PLAIN, t_trans_s=2.5)
    work = work_of([1, 5, 2, 4], [True, True, False, False])
    assert rivals.dali(work, costs).on_gpu.tolist() == [False, True, False, True]
    assert rivals.dali(replace(work, room=0), costs).on_gpu.tolist() == [True, True, False, False]


def test_dali_is_not_the_optimum():
    rng = np.random.default_rng(0)
    quality = []
    for _ in range(200):
        work, costs = draw_work(rng, int(rng.integers(6, 10))), draw_costs(rng)
        quality.append(optimum(work, costs) / makespan(work, rivals.dali(work, costs).on_gpu, costs))
    assert 0.75 < np.mean(quality) < 0.97


def test_two_ended_by_hand():
    """Queue: residents 5, 1 then absent 4, 2. Host 2 s + tokens; device 1 s, a transfer 3 s, both from the start.
    Device takes 5 (1 s), 1 (2 s), then 4 (there at 3, done at 4, when the host would be done with 2: a tie)."""
    work = work_of([1, 5, 2, 4], [True, True, False, False])
    assert rivals.two_ended(work, replace(PLAIN, t_sync_s=1e-3)).on_gpu.tolist() == [True, True, False, True]
    busy = replace(work, copy_busy_s=10.0)
    assert rivals.two_ended(busy, PLAIN).on_gpu.tolist() == [True, True, False, False]
    assert rivals.two_ended(replace(work, room=0), PLAIN).on_gpu.tolist() == [True, True, False, False]


def test_two_ended_gives_residents_to_an_idle_host():
    slow = replace(PLAIN, gpu_s=10.0)
    assert rivals.two_ended(work_of([1, 5], [True, True]), slow).on_gpu.tolist() == [False, False]


def test_as_shipped_schedules_steps_of_one_token_only():
    one, more = (work_of(tokens, [True, False, False, False]) for tokens in ([1, 1, 1, 1], [1, 1, 1, 2]))
    assert rivals.two_ended_as_shipped(one, PLAIN).on_gpu.tolist() == rivals.two_ended(one, PLAIN).on_gpu.tolist()
    assert not rivals.two_ended_as_shipped(one, PLAIN).on_gpu.all()
    assert rivals.two_ended_as_shipped(more, PLAIN).on_gpu.all() and not rivals.two_ended(more, PLAIN).on_gpu.all()


def split_costs(fraction):
    """Costs for which pcie / (pcie + cpu) is the fraction."""
    return replace(COSTS, t0_s=1e-12, t_trans_s=1 - fraction, cpu_s=fraction - 1e-12, cpu_token_s=1e-12)


@pytest.mark.parametrize(
    ("fraction", "misses", "fetched"), [(0.415, 3, 1), (0.415, 4, 2), (0.1, 64, 6), (0.7, 10, 7), (0.5, 1, 0)]
)
def test_bandwidth_split_rounds_as_freetoken_does(fraction, misses, fetched):
    work = work_of([1] * misses, [False] * misses)
    assert len(rivals.bandwidth_split(work, split_costs(fraction)).fetch) == fetched


def test_bandwidth_split_fetches_the_most_recently_used():
    work = work_of([9, 1, 1, 1, 1], [True, False, False, False, False], last_used=np.array([9, 2, 7, 0, 5]))
    assert rivals.bandwidth_split(work, split_costs(0.5)).on_gpu.tolist() == [True, False, True, False, True]
    work = replace(work, room=1)
    assert rivals.bandwidth_split(work, split_costs(0.5)).on_gpu.tolist() == [True, False, True, False, False]
    work = replace(work, last_used=None, room=9)
    assert rivals.bandwidth_split(work, split_costs(0.5)).on_gpu.tolist() == [True, True, True, False, False]
