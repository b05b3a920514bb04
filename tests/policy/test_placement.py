"""The initial placement against brute force on small cases."""

from itertools import combinations, product

import numpy as np
import pytest

from dynajax.policy.placement import (
    LEVELS,
    block_units,
    equal_slots,
    layer_slots,
    place_equal,
    place_static,
    staged_units,
)

MANY_UNITS = (*range(1, 300), 768, 1000, 2816, 5632, 11008, 13824, 28672)


def frequencies(rng, layers, units, ties=False):
    drawn = rng.integers(0, 4, (layers, units)) / 4 if ties else rng.random((layers, units))
    return (drawn * rng.random((layers, 1))).astype(np.float32)  # some layers are sparser than others


def held(placement, frequency):
    """What the placement collects, in float64."""
    return sum(row[bucket].astype(np.float64).sum() for row, bucket in zip(frequency, placement.buckets, strict=True))


def best_of_blocks(frequency, capacity):
    """The most that any choice of whole blocks per layer collects within `capacity` units."""
    units = frequency.shape[1]
    block = block_units(units)
    prefix = np.cumsum(-np.sort(-frequency.astype(np.float64), axis=1), axis=1)
    prefix = np.concatenate([np.zeros((len(frequency), 1)), prefix], axis=1)
    sizes = range(0, units + 1, block)
    choices = (choice for choice in product(sizes, repeat=len(frequency)) if sum(choice) <= capacity)
    return max(sum(row[count] for row, count in zip(prefix, choice, strict=True)) for choice in choices)


@pytest.mark.parametrize("seed", range(40))
def test_equal_blocks_give_the_optimum(seed):
    rng = np.random.default_rng(seed)
    layers, units = int(rng.integers(1, 4)), int(rng.choice([8, 16, 32]))
    assert units % block_units(units) == 0
    frequency = frequencies(rng, layers, units, ties=seed % 3 == 0)
    unit_bytes = int(rng.integers(1, 100))
    for capacity in rng.integers(0, layers * units + 1, 6):
        placement = place_static(frequency, unit_bytes, int(capacity) * unit_bytes + int(rng.integers(unit_bytes)))
        assert placement.resident <= capacity
        assert held(placement, frequency) == pytest.approx(best_of_blocks(frequency, capacity), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_no_set_of_units_collects_more(seed):
    """Over all subsets whose sizes are whole blocks, not only over the most frequent units."""
    rng = np.random.default_rng(seed)
    units, layers = 6, 2  # blocks of 2
    frequency = frequencies(rng, layers, units)
    sets = [chosen for size in (0, 2, 4, 6) for chosen in combinations(range(units), size)]
    for capacity in range(13):
        fitting = [(a, b) for a, b in product(sets, repeat=2) if len(a) + len(b) <= capacity]
        best = max(frequency[0, list(a)].sum(dtype=float) + frequency[1, list(b)].sum(dtype=float) for a, b in fitting)
        assert held(place_static(frequency, 3, 3 * capacity), frequency) == pytest.approx(best, rel=1e-12)


def test_the_oracle_notices_a_worse_choice():
    frequency = frequencies(np.random.default_rng(0), 2, 16)
    placement = place_static(frequency, 1, 16)
    upside_down = place_static(-frequency, 1, 16)
    best = best_of_blocks(frequency, 16)
    assert held(upside_down, frequency) < best == pytest.approx(held(placement, frequency))


@pytest.mark.parametrize("seed", range(20))
def test_more_bytes_never_hold_less(seed):
    rng = np.random.default_rng(seed)
    layers, units = int(rng.integers(1, 5)), int(rng.integers(1, 70))
    frequency = frequencies(rng, layers, units, ties=seed % 2 == 0)
    unit_bytes = int(rng.integers(1, 9))
    before = (0,) * layers
    for pool_bytes in range((layers * units + 2) * unit_bytes):
        slots = layer_slots(frequency, unit_bytes, pool_bytes)
        assert all(old <= new for old, new in zip(before, slots, strict=True))
        assert sum(slots) * unit_bytes <= pool_bytes
        left = pool_bytes - sum(slots) * unit_bytes
        assert left < block_units(units) * unit_bytes or sum(slots) == layers * units  # nothing that fits is left out
        before = slots
    assert before == (units,) * layers


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_ties_go_round_the_layers(share):
    frequency = np.full((3, 32), share, np.float32)
    grown = [layer_slots(frequency, 10, 10 * 4 * blocks) for blocks in range(8)]
    assert grown == [(0, 0, 0), (4, 0, 0), (4, 4, 0), (4, 4, 4), (8, 4, 4), (8, 8, 4), (8, 8, 8), (12, 8, 8)]


def test_a_block_is_granted_to_the_byte():
    frequency = np.ones((1, 32), np.float32)
    assert [layer_slots(frequency, 7, count) for count in (27, 28, 55, 56)] == [(0,), (4,), (4,), (8,)]


def test_at_most_eight_pool_sizes():
    assert LEVELS == 8
    for units in MANY_UNITS:
        block, step = block_units(units), -(-units // 16)
        assert block % step == 0 and 1 <= block <= units
        rooms = (*range(0, units, max(1, step // 3)), units)
        sizes = {layer_slots(np.ones((1, units), np.float32), 1, room)[0] for room in rooms}
        assert sizes == {*range(0, units, block), units}
        assert len(sizes - {0}) <= 8, units


def test_the_example_of_the_docstring():
    assert block_units(768) == 96
    assert {layer_slots(np.ones((1, 768), np.float32), 1, room)[0] for room in range(769)} == {*range(0, 769, 96)}


@pytest.mark.parametrize("seed", range(20))
def test_the_most_frequent_units_are_placed(seed):
    rng = np.random.default_rng(seed)
    frequency = frequencies(rng, 3, 45, ties=seed % 2 == 0)
    untouched = frequency.copy()
    placement = place_static(frequency, 4, int(rng.integers(0, 4 * 3 * 45)))
    placement.check()
    np.testing.assert_array_equal(frequency, untouched)
    assert placement.units == 45
    for layer, bucket in enumerate(placement.buckets):
        assert bucket.dtype == np.int32 and (np.diff(bucket) > 0).all()
        inside, outside = frequency[layer, bucket], placement.cold(layer)
        if not len(bucket) or not len(outside):
            continue
        assert inside.min() >= frequency[layer, outside].max()
        border = inside.min()
        tied_in = bucket[inside == border]
        tied_out = outside[frequency[layer, outside] == border]
        assert not len(tied_out) or tied_in.max() < tied_out.min()  # equal frequencies by id


def test_a_busier_layer_gets_more():
    frequency = np.stack([np.full(32, 0.9), np.full(32, 0.1)]).astype(np.float32)
    assert place_static(frequency, 1, 40).slots == (32, 8)
    assert place_static(frequency[::-1], 1, 40).slots == (8, 32)


def test_nothing_and_everything():
    frequency = frequencies(np.random.default_rng(0), 2, 20)
    assert place_static(frequency, 5, 0).slots == (0, 0)
    everything = place_static(frequency, 5, 2**60)
    assert [bucket.tolist() for bucket in everything.buckets] == [list(range(20))] * 2


@pytest.mark.parametrize(("unit_bytes", "pool_bytes"), [(0, 10), (-1, 10), (1, -1)])
def test_impossible_sizes(unit_bytes, pool_bytes):
    with pytest.raises(ValueError, match=f"got {pool_bytes} and {unit_bytes}"):
        layer_slots(np.ones((1, 4), np.float32), unit_bytes, pool_bytes)


@pytest.mark.parametrize("seed", range(40))
def test_equal_slots_differ_by_a_block_that_goes_where_most_use_is(seed):
    rng = np.random.default_rng(seed)
    layers, units, unit_bytes = int(rng.integers(1, 5)), int(rng.choice([8, 16, 32, 45])), int(rng.integers(1, 100))
    frequency = frequencies(rng, layers, units, ties=seed % 3 == 0)
    block = -(-units // 16)
    pool_bytes = int(rng.integers(0, layers * units * unit_bytes + 1))
    placement = place_equal(frequency, unit_bytes, pool_bytes)
    placement.check()
    blocks = pool_bytes // (block * unit_bytes)
    base = blocks // layers * block
    assert set(placement.slots) <= {min(units, base), min(units, base + block)}
    choices = [
        [min(units, base + block * (layer in chosen)) for layer in range(layers)]
        for chosen in combinations(range(layers), blocks % layers)
    ]
    descending = -np.sort(-frequency.astype(np.float64), axis=1)
    best = max(sum(row[:count].sum() for row, count in zip(descending, slots, strict=True)) for slots in choices)
    assert held(placement, frequency) == pytest.approx(best)


def test_the_block_that_remains():
    frequency = np.full((2, 16), 0.25, np.float32)
    assert equal_slots(frequency, 3, 15) == (3, 2)
    frequency[1] *= 2
    assert equal_slots(frequency, 3, 15) == (2, 3)
    assert equal_slots(frequency, 3, 10**6) == (16, 16)


@pytest.mark.parametrize(("units", "expected"), [(1, 1), (192, 1), (768, 4), (1536, 8), (11008, 64), (28672, 64)])
def test_units_sent_at_a_time_are_a_twentieth_of_a_block(units, expected):
    assert staged_units(units) == expected
    assert expected == 1 or expected * 20 <= block_units(units)
