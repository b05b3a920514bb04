"""Decoding in simulated time: two layers by hand, and what slows a run down."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.config import PolicyConfig
from dynajax.policy.costs import Costs
from dynajax.sim.decode import decode
from tests.sim.cases import LAYERS, NEURONS, activity, load, machine, placement, system

NOTHING = np.zeros((1, LAYERS, NEURONS), np.bool_)
ATTEND_S, HEAD_S = 0.2, 0.5  # 20 and 50 bytes at 100 a second
HALF = placement([0, 1, 2, 3], [4, 5, 6, 7])


def seconds(*args, **settings) -> float:
    tally = decode(*args, **settings)
    return tally.seconds / tally.tokens


def test_both_halves_at_once():
    """The host's 4 neurons take 1.2 s and hide the device's 0.12 s."""
    found = decode(load(), machine(), system(), activity(NOTHING), HALF)
    assert found.seconds == pytest.approx(2 * (ATTEND_S + 1.2) + HEAD_S)
    assert (found.hot_s, found.cold_s) == (pytest.approx(0.24), pytest.approx(2.4))
    assert (found.on_device, found.on_host, found.migrated, found.late) == (8, 8, 0, 0)
    assert found.figures()["cold_share"] == pytest.approx(10 / 11)


def test_a_slow_device_hides_the_host():
    """The next attention starts behind the device's half: 0.4 s + 0.24 s a layer at 50 bytes a second."""
    found = seconds(load(), machine(device_bps=50.0, cpu_bps={"float32": 1e4}), system(), activity(NOTHING), HALF)
    assert found == pytest.approx(2 * (0.4 + 0.24) + 1.0, abs=3e-3)


def test_one_side_alone():
    everything = placement(list(range(NEURONS)), list(range(NEURONS)))
    assert seconds(load(), machine(), system(), activity(NOTHING), everything) == pytest.approx(2 * 0.44 + 0.5)
    nothing = placement([], [])
    assert seconds(load(), machine(), system(), activity(NOTHING), nothing) == pytest.approx(2 * 2.6 + 0.5)


def test_the_cache_grows_with_the_context():
    """3 tokens at 10 bytes each: 1 + 2 + 3 of them are read in each layer."""
    live = np.zeros((3, LAYERS, NEURONS), np.bool_)
    plain = decode(load(), machine(), system(bucketed=False), activity(live), HALF).seconds
    found = decode(load(kv_token=10.0), machine(), system(bucketed=False), activity(live), HALF).seconds
    assert found - plain == pytest.approx(2 * (1 + 2 + 3) * 0.1)
    bucketed = decode(load(kv_token=10.0), machine(), system(), activity(live), HALF).seconds
    assert bucketed - plain == pytest.approx(2 * 3 * 25.6)


def test_gate_first_reads_the_rest_only_where_it_is_live():
    live = NOTHING.copy()
    live[0, 0, 4:6] = True  # 2 of the 4 on the host; of layer 1 none
    found = decode(load(), machine(), system(gate_first=True), activity(live), HALF)
    assert found.cold_s == pytest.approx((4 + 2 * 2) / 10 + 4 / 10)


def test_what_scores_low_is_left_out_and_what_is_lost_is_counted():
    skip = np.zeros((1, LAYERS, NEURONS), np.uint8)
    skip[0, :, [0, 1, 4, 5]] = 200
    live = skip > 0
    live[0, 0, 7] = True  # the host's, and not predicted
    found = decode(load(), machine(), system(skips=True, device_reads="rows"), activity(live, skip=skip), HALF)
    assert (found.on_device, found.on_host, found.live, found.hot_live, found.missed) == (4, 4, 9, 4, 1)
    assert (found.hot_s, found.cold_s) == (pytest.approx(0.12), pytest.approx(1.2))
    assert found.figures()["recall"] == pytest.approx(8 / 9)


def test_who_shares_memory_waits_for_each_other():
    """With 12 bytes a second for all, a transfer of 5 slows the host's 10: together 15 are asked."""
    scores = np.full((1, LAYERS, NEURONS), 100, np.uint8)
    scores[0, 1, 0] = 255
    moving = system(policy="macro+micro", config=PolicyConfig(swap_rule="paper", window_units=1, decay=0.5))
    case = (activity(NOTHING, place=scores), HALF)
    alone = decode(load(), machine(), moving, *case)
    shared = decode(load(), machine(host_bps=12.0), moving, *case)
    assert alone.migrated == shared.migrated > 0
    assert shared.cold_s > alone.cold_s + 0.05


def late(limit: bool) -> tuple:
    """A transfer that takes 100 times as long as a layer."""
    scores = np.full((2, LAYERS, NEURONS), 100, np.uint8)
    scores[:, 1, :4], scores[:, 0, 4:] = 255, 255
    knobs = PolicyConfig(swap_rule="paper", window_units=4, decay=0.5)
    live = np.zeros((2, LAYERS, NEURONS), np.bool_)
    moving = system(policy="macro+micro", config=knobs, waits=not limit)
    return load(), machine(link_bps=0.03), moving, activity(live, place=scores), HALF


def test_a_late_plan_is_counted_and_not_waited_for():
    hurried, patient = decode(*late(limit=True)), decode(*late(limit=False))
    assert hurried.late > 0 == patient.late
    assert hurried.seconds < 0.2 * patient.seconds


def test_costs_are_learned_unless_they_are_given():
    told = Costs(t0_s=1e-3, t_gather_s=1e-3, t_trans_s=1e-3, t_gpu_s=1e-3, t_cpu_s=1e-3, t_sync_s=1e-3)
    scores = np.random.default_rng(0).integers(0, 256, (6, LAYERS, NEURONS)).astype(np.uint8)
    moving = system(policy="dynamic", skips=True, config=PolicyConfig(decay=0.5))
    case = load(), machine(link_bps=200.0), moving, activity(scores > 127, place=scores, skip=scores), HALF
    plans = {}
    for name, costs in (("told", told), ("told again", told), ("learned", None)):
        made = plans[name] = []
        decode(*case, costs=costs, on_plan=lambda layer, plan, made=made: made.append((layer, plan.units.tolist())))
    assert plans["told"] == plans["told again"] and len(plans["told"]) == 6 * LAYERS
    moved = {name: sum(len(units) for _, units in made) for name, made in plans.items()}
    assert moved["told"] == 0 < moved["learned"]  # the host is not slower, it was told


def test_a_stride_scales_neurons():
    case = machine(), system(), activity(NOTHING), HALF
    fine = decode(load(), *case)
    coarse = decode(load(unit=1.5, host_unit=1.5, neurons=16), *case[:2], replace(case[2], stride=2), HALF)
    assert coarse.seconds == pytest.approx(fine.seconds)
