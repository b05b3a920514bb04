"""From a router's choices to weights of units."""

import numpy as np
import pytest

from hostcompute import unit_weights

IDS = np.array([[2, 0], [1, 2], [0, 0]], np.int32)
WEIGHTS = np.array([[0.5, 0.25], [2, 1], [0.25, 0.5]], np.float32)


def test_weights_go_to_the_units_that_are_here():
    units = np.array([1, 2], np.int32)
    assert unit_weights(IDS, WEIGHTS, units, 3).tolist() == [[0, 0.5], [2, 1], [0, 0]]


def test_an_expert_chosen_twice_gets_both_weights():
    assert unit_weights(IDS, WEIGHTS, np.array([0], np.int32), 3).tolist() == [[0.25], [0], [0.75]]


def test_no_units_and_no_rows():
    none = np.empty(0, np.int32)
    assert unit_weights(IDS, WEIGHTS, none, 3).shape == (3, 0)
    assert unit_weights(IDS[:0], WEIGHTS[:0], np.array([1], np.int32), 3).shape == (0, 1)


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (r"ids must be in \[0, 2\), got 2", {"experts": 2}),
        (r"ids must be in \[0, 3\), got -1", {"ids": IDS - 1}),
        (r"units must be in \[0, 3\), got 3", {"units": np.array([0, 3], np.int32)}),
        ("ids must be int32, got int64", {"ids": IDS.astype(np.int64)}),
        (r"weights must have shape \[3, 2\], got \[3, 1\]", {"weights": WEIGHTS[:, :1].copy()}),
    ],
)
def test_what_is_wrong_is_named(message, bad):
    arguments = {"ids": IDS, "weights": WEIGHTS, "units": np.array([0, 1], np.int32), "experts": 3} | bad
    with pytest.raises(ValueError, match=message):
        unit_weights(**arguments)
