"""The offline bounds against all that a cache can do, step by step."""

from itertools import combinations

import numpy as np
import pytest

from dynajax.policy.experts.bounds import ceiling, lru_on_demand, min_bypass, weighted_bypass


def draw(seed, steps=7, experts=5):
    """A trace, what is there at the start, and slots."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, (steps, experts)) * rng.integers(1, 6, (steps, experts))
    slots = int(rng.integers(1, 4))
    return tokens, rng.permutation(experts)[:slots].astype(np.int32), slots


def best_by_search(tokens, bucket, slots, worth):
    """The most that any cache gets which, after a step, may hold what it held and what the step used."""
    states = {frozenset(bucket.tolist()): 0}
    for row, value in zip(tokens, worth, strict=True):
        after = {}
        live = set(np.flatnonzero(row).tolist())
        for held, total in states.items():
            total += int(value[[e for e in held if e in live]].sum())
            could = held | live
            for size in range(min(slots, len(could)) + 1):
                for chosen in combinations(sorted(could), size):
                    after[frozenset(chosen)] = max(after.get(frozenset(chosen), 0), total)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(15))
def test_both_bounds_are_the_best_of_all_caches(seed):
    tokens, bucket, slots = draw(seed)
    assert min_bypass(tokens, bucket, slots).hits == best_by_search(tokens, bucket, slots, np.minimum(tokens, 1))
    assert weighted_bypass(tokens, bucket, slots).tokens == best_by_search(tokens, bucket, slots, tokens)


@pytest.mark.parametrize("seed", range(6))
def test_with_equal_weights_the_program_is_min(seed):
    rng = np.random.default_rng(seed)
    tokens = (rng.random((120, 24)) < rng.random(24)).astype(np.int64)
    bucket = np.arange(6, dtype=np.int32)
    assert weighted_bypass(tokens, bucket, 6).hits == min_bypass(tokens, bucket, 6).hits


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_all_bounds(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, (80, 16)) * rng.integers(1, 6, (80, 16))
    bucket = np.arange(5, dtype=np.int32)
    lru, most, weighted = (bound(tokens, bucket, 5) for bound in (lru_on_demand, min_bypass, weighted_bypass))
    assert lru.hits < most.hits <= ceiling(tokens, 5)[0] and weighted.hits <= most.hits
    assert lru.tokens < most.tokens < weighted.tokens <= ceiling(tokens, 5)[1]
    assert max(most.loads, weighted.loads) < lru.loads


def test_loads_are_counted():
    """0 is there; 1 is used three times with 0 in between: one load, and 0 stays out."""
    tokens = np.array([[0, 3], [0, 3], [1, 0], [0, 3]])
    found = weighted_bypass(tokens, np.array([0], np.int32), 1)
    assert (found.hits, found.tokens, found.loads) == (2, 6, 1)
    assert min_bypass(tokens, np.array([0], np.int32), 1).loads == 1
    both = weighted_bypass(tokens, np.array([0], np.int32), 2)
    assert (both.hits, both.tokens, both.loads) == (3, 7, 1)


def test_loads_of_one_expert_are_not_another_ones():
    """1 is held from its use to the next, 2 from the very step in which 1's ends."""
    tokens = np.array([[0, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 1]])
    found = weighted_bypass(tokens, np.array([0], np.int32), 2)
    assert (found.hits, found.loads) == (2, 2)


def test_nothing_is_loaded_that_is_not_used_again():
    assert min_bypass(np.array([[1, 0], [0, 1]]), np.empty(0, np.int32), 2).loads == 0


def test_nothing_to_hold_it_with():
    tokens = np.ones((3, 2), np.int64)
    none = np.empty(0, np.int32)
    for bound in (lru_on_demand, min_bypass, weighted_bypass):
        found = bound(tokens, none, 0)
        assert (found.hits, found.tokens, found.loads) == (0, 0, 0)
    assert ceiling(tokens, 0) == (0, 0)


def lru_one_by_one(tokens, bucket, slots):
    """(hits, loads) of a list with the last used at its end."""
    held, hits, loads = list(bucket), 0, 0
    for row in tokens:
        live = np.flatnonzero(row).tolist()
        found = [e for e in live if e in held]
        for expert in found + [e for e in live if e not in held]:
            if expert in held:
                held.remove(expert)
                hits += expert in found
            else:
                loads += 1
                held = held[1:] if len(held) == slots else held
            held.append(expert)
    return hits, loads


@pytest.mark.parametrize("seed", range(8))
def test_lru_on_demand_is_a_list(seed):
    tokens, bucket, slots = draw(seed, steps=12, experts=6)
    found = lru_on_demand(tokens, bucket, slots)
    assert (found.hits, found.loads) == lru_one_by_one(tokens, bucket, slots)
