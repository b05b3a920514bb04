"""Costs: what they say, and how the estimates follow the observations."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from dynajax.policy.costs import HIGH_S, LOW_S, CostEstimator, Costs, recent_percentile

COSTS = Costs(t0_s=2e-5, t_gather_s=7e-7, t_trans_s=1.3e-6, t_gpu_s=1e-7, t_cpu_s=9e-7, t_sync_s=1e-4)


@pytest.mark.parametrize("name", [*asdict(COSTS)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_costs_are_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} must be > 0 seconds"):
        replace(COSTS, **{name: value})


def test_what_fits_a_window():
    assert COSTS.units_in(0) == COSTS.units_in(2e-5) == 0
    assert COSTS.units_in(2e-5 + 10.5 * 2e-6) == 10


def test_a_layer_takes_as_long_as_its_slower_side():
    assert COSTS.layer_s(10, 0) == 1e-4  # the sync
    assert COSTS.layer_s(0, 100) == pytest.approx(1.9e-4)
    assert COSTS.layer_s(10_000, 100) == pytest.approx(1e-3)


def test_uses_to_pay():
    assert COSTS.uses_to_pay == pytest.approx(2e-6 / 8e-7)
    assert replace(COSTS, t_gpu_s=9e-7).uses_to_pay == math.inf


def feed(estimator, name, rates, quantity=100.0):
    """Observe one rate after the other; -> the estimates after each."""
    found = []
    for rate in rates:
        estimator.observe(name, quantity, quantity * rate)
        found.append(getattr(estimator.costs(), name))
    return np.array(found)


def test_what_was_not_observed_stays_as_it_was_given():
    estimator = CostEstimator(COSTS)
    assert estimator.costs() == COSTS
    feed(estimator, "t_cpu_s", [5e-7])
    assert estimator.costs() == replace(COSTS, t_cpu_s=5e-7)


@pytest.mark.parametrize("name", [*asdict(COSTS)])
def test_ten_times_slower_for_fifty_steps(name):
    rng = np.random.default_rng(0)
    normal, slow = 1e-6, 1e-5
    rates = np.concatenate([np.full(100, normal), np.full(50, slow), np.full(50, normal)])
    found = feed(CostEstimator(COSTS), name, rates * rng.uniform(0.9, 1.1, len(rates)))
    assert (np.abs(found[:100] / normal - 1) < 0.11).all()
    assert (np.abs(found[120:150] / slow - 1) < 0.11).all()
    assert (np.abs(found[170:] / normal - 1) < 0.11).all()


def test_wild_observations_change_nothing():
    rates = np.full(60, 1e-6)
    rates[[40, 41, 50, 59]] = [1e-2, 1e-3, 1e-9, 1e-1]
    np.testing.assert_allclose(feed(CostEstimator(COSTS), "t_trans_s", rates), 1e-6, rtol=1e-12)


def test_moving_is_estimated_with_caution_and_computing_in_the_middle():
    rates = np.tile(np.linspace(1e-6, 2e-6, 11), 4)
    estimator = CostEstimator(COSTS, safety=0.9)
    assert feed(estimator, "t_trans_s", rates)[-1] >= 1.8e-6
    assert feed(estimator, "t_cpu_s", rates)[-1] <= 1.75e-6
    careless = feed(CostEstimator(COSTS, safety=0.2), "t_trans_s", rates)[-1]
    assert careless < feed(CostEstimator(COSTS, safety=0.8), "t_trans_s", rates)[-1]


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, LOW_S), (-1.0, LOW_S), (1e9, HIGH_S)])
def test_estimates_stay_within_bounds(seconds, expected):
    estimator = CostEstimator(COSTS)
    estimator.observe("t_gpu_s", 1, seconds)
    assert estimator.costs().t_gpu_s == expected


@pytest.mark.parametrize(
    ("name", "quantity", "seconds"),
    [
        ("t_warp_s", 1, 1.0),
        ("t_gpu_s", 0, 1.0),
        ("t_gpu_s", -1, 1.0),
        ("t_gpu_s", 1, math.nan),
        ("t_gpu_s", 1, math.inf),
    ],
)
def test_refused_observations(name, quantity, seconds):
    with pytest.raises(ValueError, match="no cost is named|quantity must be"):
        CostEstimator(COSTS).observe(name, quantity, seconds)


def test_refused_safety():
    with pytest.raises(ValueError, match="safety must be between 0 and 1, got 1.5"):
        CostEstimator(COSTS, safety=1.5)


def test_estimates_depend_on_the_observations_alone():
    rates = np.random.default_rng(3).lognormal(-14, 1, 200)
    often, once = CostEstimator(COSTS), CostEstimator(COSTS)
    feed(often, "t_trans_s", rates)
    for rate in rates:
        once.observe("t_trans_s", 100.0, 100.0 * rate)
    assert often.costs() == once.costs()


def test_the_example_of_the_docstring():
    rates = np.array([1.0, 1.0, 1.0, 9.0])
    assert recent_percentile(rates, 0.7) == 1.0
    assert recent_percentile(rates, 0.8) == 9.0
