"""The sorted greedy of `layer_slots` beside HiGHS, which solves the same knapsack exactly."""

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from dynajax.policy.placement import block_units, layer_slots


def block_gains(frequency):
    """(mass, size) of every layer's blocks [L, blocks], most frequent units first."""
    units = frequency.shape[1]
    starts = np.arange(0, units, block_units(units))
    descending = -np.sort(-frequency.astype(np.float64), axis=1)
    return np.add.reduceat(descending, starts, axis=1), np.minimum(block_units(units), units - starts)


def highs(mass, sizes, capacity):
    """The most that whole blocks of at most `capacity` units collect, a layer's first blocks first."""
    layers, blocks = mass.shape
    order = np.zeros((layers * (blocks - 1), layers * blocks))  # block b + 1 only with block b
    for row, (layer, block) in enumerate(np.ndindex(layers, blocks - 1)):
        at = layer * blocks + block
        order[row, at], order[row, at + 1] = -1, 1
    constraints = [LinearConstraint(np.tile(sizes, layers)[None, :], ub=capacity)]
    if len(order):
        constraints.append(LinearConstraint(order, ub=0))
    found = milp(
        -mass.ravel(), integrality=np.ones(mass.size), bounds=Bounds(0, 1), constraints=constraints,
        options={"mip_rel_gap": 0},
    )  # fmt: skip
    assert found.success, found.message
    return -found.fun


def greedy(frequency, mass, sizes, capacity):
    slots = layer_slots(frequency, 1, capacity)
    assert sum(slots) <= capacity
    taken = np.cumsum(sizes)[None, :] <= np.array(slots)[:, None]
    return float((mass * taken).sum())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("units", [64, 768, 11008])
def test_they_tie_where_blocks_are_equal(seed, units):
    """Every real width is a multiple of 16; gains of a layer never rise, since its units are sorted."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 7))
    skew = rng.choice([1, 4, 12], (layers, 1))  # flat layers and concave ones
    frequency = (rng.random((layers, units)) ** skew * rng.random((layers, 1))).astype(np.float32)
    mass, sizes = block_gains(frequency)
    for share in rng.random(3):
        capacity = int(share * layers * units)
        assert greedy(frequency, mass, sizes, capacity) == pytest.approx(highs(mass, sizes, capacity), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_a_short_last_block_costs_at_most_one_block(seed):
    rng = np.random.default_rng(seed)
    layers, units = int(rng.integers(2, 6)), int(rng.choice([21, 45, 100, 771]))
    assert units % block_units(units)
    frequency = rng.random((layers, units)).astype(np.float32)
    mass, sizes = block_gains(frequency)
    for share in rng.random(3):
        capacity = int(share * layers * units)
        best, found = highs(mass, sizes, capacity), greedy(frequency, mass, sizes, capacity)
        assert best - mass.max() <= found <= best * (1 + 1e-9)


def test_the_oracle_finds_what_a_greedy_would_miss():
    """Gains that rise, which sorted units never have: the second block is worth more than any first."""
    mass, sizes = np.array([[1.0, 9.0], [3.0, 2.0]]), np.array([4, 4])
    assert highs(mass, sizes, 8) == pytest.approx(10.0)
