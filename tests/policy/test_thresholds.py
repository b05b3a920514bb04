"""Thresholds against all pairs, and the error bound, recomputed from its definition."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.policy.costs import Costs
from dynajax.policy.thresholds import MASS_ONE, balance, sides, theta_of_density, whole_masses

COSTS = Costs(t0_s=1e-5, t_gather_s=1e-6, t_trans_s=1e-6, t_gpu_s=1e-7, t_cpu_s=1e-6, t_sync_s=1e-6)


def err(scores, on_host, mass, theta_g, theta_c):
    """The docstring's sum, one unit after the other; whole numbers in units of 1 / 255 / 256."""
    thresholds = np.where(on_host, theta_c, theta_g)
    return sum(int(s) * int(m) for s, m, t in zip(scores, mass, thresholds, strict=True) if s < t)


def draw(seed, units=40):
    rng = np.random.default_rng(seed)
    scores = (255 * rng.random(units) ** rng.choice([1, 3])).astype(np.uint8)
    on_host = rng.random(units) < rng.random()
    mass = whole_masses(rng.lognormal(0, 1, units) if seed % 2 else None, units)
    costs = replace(
        COSTS, t_gpu_s=float(rng.choice([1e-8, 1e-7, 1e-6, 5e-6])), t_sync_s=float(rng.choice([1e-8, 1e-5]))
    )
    return rng, scores, on_host, mass, costs


def best_time(device, host, theta, costs, err_scale):
    """Over all 256 x 256 pairs with theta_g <= theta (and theta_c >= theta where theta itself is allowed)."""
    bound = np.floor(err_scale * (device.skipped[theta] + host.skipped[theta]))
    theta_g, theta_c = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    error = device.skipped[theta_g] + host.skipped[theta_c]
    time = np.maximum(costs.t_gpu_s * device.reaching[theta_g], costs.t_cpu_s * host.reaching[theta_c] + costs.t_sync_s)
    allowed = (error <= bound) & (theta_g <= theta) & ((theta_c >= theta) | (err_scale < 1))
    return time[allowed].min()


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("err_scale", [0.0, 0.5, 1.0, 1.7])
def test_no_pair_is_faster(seed, err_scale):
    rng, scores, on_host, mass, costs = draw(seed)
    theta = int(rng.integers(0, 256))
    device, host = sides(scores, on_host, mass)
    found = balance(device, host, theta, costs, err_scale)
    assert costs.layer_s(found.n_gpu, found.n_cpu) == pytest.approx(best_time(device, host, theta, costs, err_scale))
    assert found.n_gpu == np.count_nonzero(scores[~on_host] >= found.theta_g)
    assert found.n_cpu == np.count_nonzero(scores[on_host] >= found.theta_c)
    assert found.theta_g <= theta and (found.theta_c >= theta or err_scale < 1)
    if err_scale >= 1:
        before = costs.layer_s(np.count_nonzero(scores[~on_host] >= theta), np.count_nonzero(scores[on_host] >= theta))
        assert costs.layer_s(found.n_gpu, found.n_cpu) <= before


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    units=st.integers(1, 300),
    theta=st.integers(0, 255),
    err_scale=st.floats(0, 3),
)
def test_the_error_bound_is_never_exceeded(seed, units, theta, err_scale):
    _, scores, on_host, mass, costs = draw(seed, units)
    found = balance(*sides(scores, on_host, mass), theta, costs, err_scale)
    allowed = err_scale * err(scores, on_host, mass, theta, theta)
    assert err(scores, on_host, mass, found.theta_g, found.theta_c) <= allowed


def test_the_bound_notices_a_pair_beyond_it():
    _, scores, on_host, mass, _ = draw(4)
    assert err(scores, on_host, mass, 128, 255) > err(scores, on_host, mass, 128, 128)


def test_a_busy_device_is_left_alone():
    _, scores, on_host, mass, _ = draw(1)
    slow_device = replace(COSTS, t_gpu_s=1e-3)
    found = balance(*sides(scores, on_host, mass), 128, slow_device, 1.0)
    assert (found.theta_g, found.theta_c) == (128, 128)


def test_masses_are_whole_and_keep_their_proportions():
    mass = np.array([1.0, 2.0, 0.0, 5.0])
    np.testing.assert_array_equal(whole_masses(mass, 4), [128, 256, 0, 640])
    np.testing.assert_array_equal(whole_masses(None, 3), [MASS_ONE] * 3)
    np.testing.assert_array_equal(whole_masses(np.zeros(2), 2), [MASS_ONE] * 2)


def test_heavy_neurons_are_not_skipped():
    """Two cold neurons of one score: without masses both thresholds treat them alike; a heavy one forbids the skip."""
    scores, on_host = np.array([200, 40, 130], np.uint8), np.array([False, False, True])
    light = balance(*sides(scores, on_host, whole_masses(np.array([1.0, 5.0, 1.0]), 3)), 128, COSTS, 1.0)
    heavy = balance(*sides(scores, on_host, whole_masses(np.array([1.0, 1.0, 5.0]), 3)), 128, COSTS, 1.0)
    assert (light.n_gpu, light.n_cpu) == (2, 0)
    assert (heavy.n_gpu, heavy.n_cpu) == (1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_density(seed):
    rng, scores, *_ = draw(seed)
    density = float(rng.random())
    theta = theta_of_density(scores, density)
    assert np.count_nonzero(scores >= theta) <= density * len(scores) or theta == 255
    assert theta == 0 or np.count_nonzero(scores >= theta - 1) > density * len(scores)
