"""Frequencies of this sequence: their seed, their memory, recency."""

import numpy as np
import pytest

from dynajax.policy.frequency import FLOOR, seed_frequency, update_frequency, update_recency


def floats(*values):
    return np.array(values, np.float32)


def test_the_example_of_the_docstring():
    found = seed_frequency(floats([0.2, 0.0]), np.array([[5, 0]]), 10, 0.9)
    np.testing.assert_allclose(found, [[0.35, 0.0]], atol=1e-7)


def test_the_seed_lies_between_statistics_and_prompt():
    offline, counts = floats([0.1, 0.5, 0.9]), np.array([[30, 30, 30]])
    short = seed_frequency(offline, counts // 10, 3, 0.95)  # live for every token of the prompt
    long = seed_frequency(offline, counts * 10, 300, 0.95)
    assert (offline <= short).all() and (short <= long).all() and (long <= 1).all()
    assert long.min() > 0.9 and short[0, 0] < 0.3
    np.testing.assert_array_equal(seed_frequency(offline, None, 0, 0.95), offline)
    np.testing.assert_allclose(seed_frequency(offline, counts * 0, 0, 0.95), offline)


def test_memory():
    f, scratch = floats(0.5, 0.5), np.empty(2, np.float32)
    for _ in range(40):
        update_frequency(f, np.array([True, False]), 0.9, scratch)
    np.testing.assert_allclose(f, [1 - 0.5 * 0.9**40, 0.5 * 0.9**40], rtol=1e-5)


def test_no_value_becomes_denormal():
    f, scratch = floats(0.5), np.empty(1, np.float32)
    for _ in range(2000):
        update_frequency(f, np.array([False]), 0.9, scratch)
    assert f[0] == FLOOR > np.finfo(np.float32).tiny


@pytest.mark.parametrize("seed", range(5))
def test_recency_orders_by_last_use(seed):
    rng = np.random.default_rng(seed)
    f, last = np.full(12, FLOOR), np.full(12, -1)
    for step in range(60):
        live = rng.random(12) < 0.1
        update_recency(f, live, 0.97)
        last[live] = step
    assert (np.diff(f[np.argsort(last, kind="stable")]) >= 0).all()
    assert len(np.unique(f)) == len(np.unique(last))
