"""Calibration on synthetic scores, thresholds, and the figures that are told."""

import numpy as np
import pytest

from predictors.calibration import (
    entropy,
    fit_platt,
    histogram,
    judge,
    recall_at,
    reliability,
    sigmoid,
    threshold_for,
    top_mask,
)


def drawn(slope, intercept, count=200_000, centre=0.0, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(centre, spread, count).astype(np.float32)
    return z, rng.random(count) < sigmoid(slope * z + intercept)


@pytest.mark.parametrize(
    ("slope", "intercept", "centre", "spread"),
    [(1.0, 0.0, 0, 1), (2.5, -3.0, 0, 1), (0.01, -2.0, 100, 300), (40.0, -1.0, -0.02, 0.05), (-1.0, 0.5, 0, 1)],
)
def test_platt_recovers_slope_and_intercept(slope, intercept, centre, spread):
    z, live = drawn(slope, intercept, centre=centre, spread=spread)
    found = fit_platt(z, live)
    error = np.abs((found[0] - slope) * spread), np.abs(found[0] * centre + found[1] - slope * centre - intercept)
    assert max(error) < 0.06  # three standard errors at the rarest
    table = reliability(sigmoid(found[0] * z + found[1]), live)
    assert table.count.sum() == len(z) and table.error < 0.005
    assert reliability(sigmoid(found[0] * z + found[1] + 1), live).error > 0.05


def test_platt_gradient_is_zero_in_float64():
    z, live = drawn(1.5, -2, count=5000)
    a, b = fit_platt(z, live)
    missing = sigmoid(a * z.astype(np.float64) + b) - live
    assert abs(missing.mean()) < 1e-6 and abs((missing * z).mean()) < 1e-6


@pytest.mark.parametrize(
    ("z", "live"),
    [
        (np.arange(100.0), np.arange(100) >= 50),  # separable
        (np.arange(100.0), np.zeros(100, bool)),
        (np.arange(100.0), np.ones(100, bool)),
        (np.full(100, 3.0), np.arange(100) < 30),  # says nothing
    ],
)
def test_platt_where_the_data_leave_it_open(z, live):
    a, b = fit_platt(z, live)
    assert np.isfinite([a, b]).all()
    p = sigmoid(a * z + b)
    assert abs(p.mean() - live.mean()) < 0.02
    with pytest.raises(ValueError, match="same size"):
        fit_platt(z, live[:-1])


def test_reliability_by_hand():
    p, live = np.array([0.05, 0.05, 0.95, 1.0]), np.array([False, True, True, True])
    table = reliability(p, live)
    assert table.count.tolist() == [2, *[0] * 8, 2]
    np.testing.assert_allclose(table.error, (0.45 * 2 + 0.025 * 2) / 4)
    np.testing.assert_allclose(entropy(p[:2], live[:2]), -(np.log(0.95) + np.log(0.05)) / 2)


def test_thresholds_keep_at_least_what_is_wanted():
    rng = np.random.default_rng(0)
    p = rng.random((100, 50)) ** 4
    shares, codes = histogram(p), np.rint(255 * p.astype(np.float32))
    np.testing.assert_allclose(shares.sum(), 1, rtol=1e-6)
    for density in (0.0, 0.01, 0.1, 0.33, 0.9, 1.0):
        t = threshold_for(shares, density)
        assert (codes >= t).mean() >= density - 1e-6
        assert t == 255 or (codes >= t + 1).mean() < density
    assert threshold_for(histogram(np.array([0.0] * 9 + [1.0])), 0.1) == 255
    with pytest.raises(ValueError, match="density must be"):
        threshold_for(shares, 1.1)


def test_top_mask():
    values = np.random.default_rng(0).random((20, 30))
    mask = top_mask(values, 0.2)
    assert (mask.sum(axis=1) == 6).all()
    assert (values[mask].reshape(20, 6).min(axis=1) > np.where(mask, -1, values).max(axis=1)).all()
    assert (top_mask(values, 0.0).sum(axis=1) == 1).all()


def test_recall_against_a_plain_sort():
    rng = np.random.default_rng(0)
    live = rng.random((40, 50)) < 0.1
    z = live + rng.normal(0, 0.7, live.shape)
    for factor in (0.5, 1.0, 1.6, 20.0):
        order = np.argsort(-z.ravel())[: round(factor * live.sum())]
        hits = live.ravel()[order].sum()
        assert recall_at(z, live, factor) == (hits / live.sum(), hits / len(order))
    assert recall_at(z, np.zeros_like(live), 1.0) == (1.0, 0.0)


def test_judge_tells_prior_and_gain():
    z, live = drawn(3.0, -2.0, count=40_000)
    told = judge(z.reshape(400, 100), live.reshape(400, 100), 3.0, -2.0)
    assert told["entropy"] < told["prior_entropy"]
    assert told["recall"]["1.0"] == told["precision"]["1.0"] < told["recall"]["2.0"]
    assert told["tokens"] == 400 and len(told["reliability"]) == 10
