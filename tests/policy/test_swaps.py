"""Swaps against brute force: the best set of at most M, kept units excepted, whatever the rule."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from dynajax.policy.swaps import Gain, keep_slots, plan_swaps, rung_below, swap_ladder

SEEDS = range(60)


def floats(*values):
    return np.array(values, np.float32)


def draw(seed):
    """A small case: values with ties in every third, some units and slots spoken for."""
    rng = np.random.default_rng(seed)
    units = int(rng.integers(2, 9))
    slots = int(rng.integers(1, units + 1))
    ties = seed % 3 == 0

    def values():
        return (rng.integers(0, 4, units) / 4 if ties else rng.random(units)).astype(np.float32)

    bucket = rng.permutation(units)[:slots].astype(np.int32)
    absent = rng.random(units) < 0.9
    absent[bucket] = False
    return rng, values(), values(), bucket, absent, rng.random(slots) < 0.8


def best_total(worth, price, fixed, bucket, absent, evictable, most):
    """The most that any set of swaps, whose number is a rung, is worth beyond `price` each and `fixed`; 0 for none."""
    worth = worth.astype(np.float64)
    best = 0.0
    for count in swap_ladder(min(most, len(bucket))):
        for units in combinations(np.flatnonzero(absent), count):
            for slots in combinations(np.flatnonzero(evictable), count):
                total = worth[list(units)].sum() - worth[bucket[list(slots)]].sum() - count * price - fixed
                best = max(best, total)
    return best


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("most", [0, 1, 2, 4])
@pytest.mark.parametrize("lam", [0.0, 0.7, 30.0])
def test_no_swaps_raise_the_total_more(seed, most, lam):
    _, a, f, bucket, absent, evictable = draw(seed)
    given = [array.copy() for array in (a, f, bucket, absent, evictable)]
    units, slots = plan_swaps(a, f, lam, bucket, absent, evictable, most, None)
    for before, after in zip(given, (a, f, bucket, absent, evictable), strict=True):
        np.testing.assert_array_equal(before, after)
    assert units.dtype == slots.dtype == np.int32
    assert absent[units].all() and evictable[slots].all()
    assert len(set(units.tolist())) == len(set(slots.tolist())) == len(units) == len(slots)
    assert len(units) in (0, *swap_ladder(most))
    v = f * np.float32(lam) + a
    gains = v[units].astype(np.float64) - v[bucket[slots]]
    assert (gains > 0).all()
    assert gains.sum() == pytest.approx(best_total(v, 0.0, 0.0, bucket, absent, evictable, most), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fixed", [0.0, 0.4])
def test_no_swaps_save_more_time(seed, fixed):
    """Where the ranking is by uses, lam = horizon, the gain rule is the optimum."""
    rng, a, f, bucket, absent, evictable = draw(seed)
    horizon, price, most = float(rng.uniform(0, 5)), float(rng.uniform(0, 2)), int(rng.choice([1, 2, 4]))
    units, slots = plan_swaps(
        a, f, horizon, bucket, absent, evictable, most, Gain(horizon=horizon, pays_at=price, fixed=fixed)
    )
    worth = a + horizon * f.astype(np.float64)
    found = (worth[units] - worth[bucket[slots]] - price).sum() - (fixed if len(units) else 0.0)
    assert found == pytest.approx(best_total(worth, price, fixed, bucket, absent, evictable, most), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_gain_takes_of_the_papers_swaps_those_that_pay(seed):
    rng, a, f, bucket, absent, evictable = draw(seed)
    gain = Gain(horizon=20.0, pays_at=float(rng.uniform(0, 8)), fixed=0.0)
    units, slots = plan_swaps(a, f, 1.0, bucket, absent, evictable, 4, gain)
    uses = (a + 20.0 * f.astype(np.float64))[units] - (a + 20.0 * f.astype(np.float64))[bucket[slots]]
    assert (uses > gain.pays_at - 1e-5).all()
    free = Gain(horizon=20.0, pays_at=-1e9, fixed=-1e9)
    everything = plan_swaps(a, f, 1.0, bucket, absent, evictable, 4, free)
    pairs = set(zip(*everything, strict=True))
    assert pairs == set(zip(*plan_swaps(a, f, 1.0, bucket, absent, evictable, 4, None), strict=True))
    assert set(zip(units, slots, strict=True)) <= pairs


def test_the_oracle_notices_a_worse_choice():
    a = floats(0, 0, 1, 0.5)
    bucket, absent, evictable = np.array([0, 1], np.int32), np.array([False, False, True, True]), np.ones(2, np.bool_)
    assert best_total(a, 0.0, 0.0, bucket, absent, evictable, 1) == 1.0 > a[3]
    assert best_total(a, 0.0, 0.0, bucket, absent, evictable, 2) == 1.5


def test_the_example_of_the_docstring():
    v = floats(0, 0.5, 0, 0.1, 0.9)
    absent = np.array([True, False, True, False, True])
    units, slots = plan_swaps(None, v, 1.0, np.array([1, 3], np.int32), absent, np.ones(2, np.bool_), 1, None)
    assert (units.tolist(), slots.tolist()) == ([4], [1])


def test_equal_units_by_id_and_equal_residents_by_slot():
    v = floats(0, 0, 0, 1, 1, 1)
    bucket, absent = np.array([2, 0, 1], np.int32), np.array([False] * 3 + [True] * 3)
    units, slots = plan_swaps(None, v, 1.0, bucket, absent, np.ones(3, np.bool_), 2, None)
    assert (units.tolist(), slots.tolist()) == ([3, 4], [0, 1])


@pytest.mark.parametrize("most", [1, 10, 32, 33, 100, 5530, 13824])
def test_the_ladder(most):
    rungs = swap_ladder(most)
    assert rungs[:8] == tuple(rung for rung in (1, 2, 4, 8, 12, 16, 24, 32) if rung <= most)
    assert rungs[-1] <= most < max(rungs[-1] * 1.5, rungs[-1] + 8) + 1
    above = [rung for rung in rungs if rung >= 32]
    assert all(low < high <= 1.5 * low for low, high in pairwise(above))


def test_counts_are_rounded_down():
    ladder = swap_ladder(100)
    assert [rung_below(count, ladder) for count in (0, 1, 3, 7, 8, 31, 32, 47, 48, 71, 72, 99)] == [
        0, 1, 2, 4, 8, 24, 32, 32, 48, 48, 72, 72,
    ]  # fmt: skip
    assert swap_ladder(0) == () and rung_below(5, ()) == 0
    v = np.concatenate([np.zeros(10), np.ones(7)]).astype(np.float32)
    bucket, absent = np.arange(10, dtype=np.int32), v > 0
    assert len(plan_swaps(None, v, 1.0, bucket, absent, np.ones(10, np.bool_), 8, None)[0]) == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_are_the_most_frequent(seed):
    rng, _, f, bucket, _, _ = draw(seed)
    count = int(rng.integers(0, len(bucket) + 2))
    keep = keep_slots(f, bucket, count)
    assert keep.sum() == min(count, len(bucket))
    if keep.any() and not keep.all():
        assert f[bucket[keep]].min() >= f[bucket[~keep]].max()
        border = f[bucket[keep]].min()
        tied = np.flatnonzero(f[bucket] == border)
        assert (np.diff(keep[tied].astype(int)) <= 0).all()  # of equal ones the lower slots
