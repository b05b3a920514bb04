"""The bound: by hand, against every system, and against all schedules of small cases."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dynajax.plan import Placement
from dynajax.policy.experts.synthetic import RECIPES
from dynajax.sim.experts.activity import draw_mixture
from dynajax.sim.experts.bound import bound_of, least_s
from dynajax.sim.experts.decode import simulate
from dynajax.sim.experts.shapes import MIXTURES, MixtureWeights
from dynajax.sim.experts.sides import Sides
from dynajax.sim.experts.systems import RIVALS
from dynajax.sim.hardware import load_hardware
from tests.sim.experts.cases import small_load, small_machine

SIDES = Sides.of(small_load(), small_machine())  # an expert: 1 ms here, 10 ms there, 4 ms on the way


def least_ms(steps, slots, dense_ms: float = 0.0, sides: Sides = SIDES) -> float:
    return 1e3 * least_s(np.array(steps), slots, sides, dense_ms / 1e3)


def test_by_hand():
    ones = [[[1] * 6]]
    assert least_ms(ones, (6,)) == pytest.approx(6 * 10 / 11)  # split between the sides
    assert least_ms(ones, (5,)) == pytest.approx(6 * 10 / 11, rel=0.1)  # one comes, or is the host's: 10 or 4 ms
    slow = replace(SIDES, copy_busy_s=1.0)
    assert least_ms(ones, (5,), sides=slow) == pytest.approx(10.0, rel=0.1)
    assert least_ms(ones, (0,), sides=slow) == pytest.approx(60.0, rel=0.1)
    assert least_ms(ones, (0,), dense_ms=5, sides=slow) == pytest.approx(65.0, rel=0.1)
    assert least_ms([[[0] * 6]], (0,)) == 0


def cheapest_ms(steps, slots) -> float:
    """All ways to compute every live expert on a side, copies of the whole run together, slots for nothing: a schedule
    that no real one can beat. The bound must lie below."""
    best = np.inf
    places = [
        (s, m, e) for s, step in enumerate(steps) for m, layer in enumerate(step) for e, w in enumerate(layer) if w
    ]
    for choice in itertools.product((0, 1), repeat=len(places)):
        device, host = np.zeros((2, len(steps), len(steps[0])))
        there = np.zeros((len(steps), len(steps[0])))
        for (s, m, e), on_device in zip(places, choice, strict=True):
            tokens = np.array(steps[s][m][e])
            device[s, m] += on_device * SIDES.device_s(tokens)
            host[s, m] += (1 - on_device) * SIDES.host_s(tokens)
            there[s, m] += on_device
        copies = np.maximum(there - np.array(slots), 0).sum() * (SIDES.copy_fixed_s + SIDES.copy_busy_s)
        best = min(best, max(float(np.maximum(device, host).sum()), float(copies)))
    return 1e3 * best


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_of_a_small_case_is_faster(seed):
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 6, (2, 2, 6)) * (rng.random((2, 2, 6)) < 0.4)
    slots = tuple(rng.integers(0, 3, 2).tolist())
    best = cheapest_ms(steps.tolist(), slots)
    assert 0.4 * best <= least_ms(steps, slots) <= best * (1 + 1e-9)


@pytest.mark.parametrize("model", ["tiny-moe", "deepseek-v2-lite"])
@pytest.mark.parametrize("batch", [1, 16])
def test_no_system_is_faster(model, batch):
    spec = MIXTURES[model]
    spec = replace(spec, layers=4, experts=replace(spec.experts, layers=(1, 2, 3)))
    hardware = load_hardware("dali-pc")
    load = MixtureWeights(spec=spec, dtype="bfloat16", host_dtype="bfloat16").mixture_load()
    activity = draw_mixture(spec, RECIPES["repeating"], model, batch=batch, prompt=8, steps=12)
    order = np.argsort(-activity.frequency, axis=1)[:, : spec.units // 4]
    placement = Placement(tuple(np.sort(row).astype(np.int32) for row in order), spec.units)
    bound = bound_of(load, hardware, activity, placement.slots)
    for name, ways in RIVALS.items():
        tally = simulate(load, hardware, ways, activity, placement, recall=1.0)
        assert tally.rows / tally.seconds <= bound.decode_tok_s, name
        assert tally.prompt_tokens / tally.prompt_s <= bound.prefill_tok_s, name
