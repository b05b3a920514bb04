"""A placement's own answers and its books."""

import numpy as np
import pytest

from dynajax.plan import Placement


def placement(*buckets, units=8):
    return Placement(tuple(np.array(bucket, np.int32) for bucket in buckets), units)


def test_counts():
    mixed = placement([1, 5, 7], [], [0, 1, 2, 3, 4, 5, 6, 7])
    mixed.check()
    assert mixed.slots == (3, 0, 8)
    assert mixed.resident == 11


def test_cold_is_what_is_not_resident():
    mixed = placement([1, 5, 7], [], [0, 1, 2, 3, 4, 5, 6, 7])
    assert [mixed.cold(layer).tolist() for layer in range(3)] == [[0, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7], []]
    assert all(mixed.cold(layer).dtype == np.int32 for layer in range(3))


@pytest.mark.parametrize("seed", range(20))
def test_every_unit_is_on_exactly_one_side(seed):
    rng = np.random.default_rng(seed)
    units = int(rng.integers(1, 40))
    bucket = np.sort(rng.permutation(units)[: rng.integers(0, units + 1)]).astype(np.int32)
    drawn = Placement((bucket,), units)
    drawn.check()
    cold = drawn.cold(0)
    assert (np.diff(cold) > 0).all()
    assert sorted([*bucket.tolist(), *cold.tolist()]) == list(range(units))


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        (([0, 1], [3, 3]), "layer 1: a unit sits in two slots"),
        (([0, 8],), "layer 0: id range"),
        (([-1, 2],), "layer 0: id range"),
        (([], [], [100]), "layer 2: id range"),
    ],
)
def test_the_books_notice(buckets, message):
    with pytest.raises(AssertionError, match=message):
        placement(*buckets).check()


def test_the_books_accept_what_is_right():
    placement([], [0], [7], [0, 7]).check()
    placement(units=1).check()
