"""Every statistic on cases that can be counted by hand, and the normal distribution's against other ways to it."""

import math
from itertools import combinations

import numpy as np
import pytest

from dynajax.sim import statistics


def bools(*rows):
    return np.array(rows, np.bool_)


# --- counted ------------------------------------------------------------------------------------------


def test_the_largest_of_every_token_are_counted():
    np.testing.assert_array_equal(statistics.top_counts(np.array([[3, 1, 2], [0, 5, 4]]), 1 / 3), [1, 1, 0])
    np.testing.assert_array_equal(statistics.top_counts(np.array([[3, 1, 2], [0, 5, 4]]), 2 / 3), [1, 1, 2])


def test_a_number_of_neurons_is_counted_in_every_token_whether_live_or_not():
    value = np.random.default_rng(0).standard_normal((50, 40)) - 9
    assert statistics.top_counts(value, 0.1).sum() == 50 * 4


@pytest.mark.parametrize(("share", "needed"), [(0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 3)])
def test_coverage_of_a_hand_made_case(share, needed):
    assert statistics.coverage(np.array([2, 5, 3, 0]), share) == needed / 4


@pytest.mark.parametrize("seed", range(20))
def test_no_smaller_set_covers_as_much(seed):
    rng = np.random.default_rng(seed)
    counts, share = rng.integers(0, 9, 8) + (np.arange(8) == 0), float(rng.choice([0.4, 0.8, 0.9]))
    needed = min(
        size
        for size in range(1, 9)
        if any(counts[list(some)].sum() >= share * counts.sum() - 1e-9 for some in combinations(range(8), size))
    )
    assert statistics.coverage(counts, share) == needed / 8


def test_coverage_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no neuron was counted"):
        statistics.coverage(np.zeros(4), 0.8)


# --- distances ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [([1, 1, 0], [0, 1, 1], 2 / 3), ([1, 0, 0], [0, 1, 1], 1), ([1, 0, 1], [1, 0, 1], 0), ([0, 0, 0], [0, 0, 0], 0)],
)
def test_jaccard_distance(a, b, distance):
    assert statistics.jaccard_distance(bools(a)[0], bools(b)[0]) == pytest.approx(distance)


def test_adjacent_distance_is_the_mean_over_neighbours():
    assert statistics.adjacent_distance(bools([1, 1, 0], [0, 1, 1], [0, 1, 1])) == pytest.approx(1 / 3)
    assert statistics.adjacent_distance(bools([0, 0], [0, 0], [1, 0])) == 0.5
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        statistics.adjacent_distance(bools([1, 0]))


@pytest.mark.parametrize("seed", range(5))
def test_adjacent_distance_is_that_of_the_sets(seed):
    live = np.random.default_rng(seed).random((9, 12)) < 0.2
    expected = np.mean([statistics.jaccard_distance(live[t], live[t + 1]) for t in range(8)])
    assert statistics.adjacent_distance(live) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("counts", "share", "hot"),
    [
        ([1, 7, 0, 7, 3], 0.4, [0, 1, 0, 1, 0]),
        ([1, 7, 7, 7, 3], 0.4, [0, 1, 1, 0, 0]),  # of equals the first
        ([0, 7, 0, 0, 0], 0.4, [0, 1, 0, 0, 0]),  # never live is not hot
        ([1, 2, 3, 4, 5], 0.39, [0, 0, 0, 0, 1]),
    ],
)
def test_hot_set(counts, share, hot):
    np.testing.assert_array_equal(statistics.hot_set(np.array(counts), share), np.array(hot, np.bool_))


def test_sentence_distance_is_the_mean_over_pairs():
    a, b, c = np.array([9, 8, 1, 0, 0]), np.array([0, 9, 8, 1, 0]), np.array([9, 8, 0, 0, 1])
    assert statistics.sentence_distance([a, b, c]) == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert statistics.sentence_distance([a, a]) == 0
    with pytest.raises(ValueError, match="at least 2 sentences, got 1"):
        statistics.sentence_distance([a])


def test_cosine_of_neighbouring_layers():
    hidden = np.array([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 3.0]]])
    assert statistics.cosine_of_neighbours(hidden) == pytest.approx((math.sqrt(0.5) + 1) / 2)
    with pytest.raises(ValueError, match="at least 2 layers, got 1"):
        statistics.cosine_of_neighbours(hidden[:1])


# --- predictions --------------------------------------------------------------------------------------


def test_predicted_ratio_and_recall():
    predicted, live = bools([1, 1, 1, 0], [0, 1, 0, 0]), bools([1, 0, 0, 0], [0, 1, 0, 1])
    assert statistics.predicted_ratio(predicted, live) == pytest.approx(4 / 3)
    assert statistics.recall(predicted, live) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no neuron is live"):
        statistics.recall(predicted, ~(live | True))


# --- the normal distribution ----------------------------------------------------------------------------


def test_normal_cdf_is_off_by_less_than_a_millionth():
    x = np.linspace(-9, 9, 100_001, dtype=np.float32)
    found = statistics.normal_cdf(x)
    assert found.dtype == np.float32
    error = np.abs(found - statistics.normal_cdf_exact(x))
    assert error.max() < 1e-6
    assert np.abs(statistics.normal_cdf(x + np.float32(1e-5)) - statistics.normal_cdf_exact(x)).max() > 1e-6


def test_quantile_and_cdf_undo_each_other():
    share = np.array([[1e-9, 0.1, 0.5], [0.9, 0.99, 0.3]])
    np.testing.assert_allclose(statistics.normal_cdf_exact(statistics.normal_quantile(share)), share, rtol=1e-9)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5, 0.9, 0.99])
def test_both_above_zero_is_known_in_closed_form(correlation):
    expected = 0.25 + math.asin(correlation) / (2 * math.pi)
    assert statistics.normal_both(0.0, 0.0, correlation) == pytest.approx(expected, abs=2e-6)


def test_both_of_independent_ones_is_the_product():
    x, y = np.array([-1.0, 0.3, 2.0, -20.0]), np.array([0.5, -2.0, 1.0, 0.0])
    above = statistics.normal_cdf_exact(-x) * statistics.normal_cdf_exact(-y)
    np.testing.assert_allclose(statistics.normal_both(x, y, 0.0), above, atol=1e-6)


def test_both_against_a_sample():
    first, noise = np.random.default_rng(0).standard_normal((2, 1_000_000))
    second = 0.7 * first + math.sqrt(1 - 0.7**2) * noise
    assert statistics.normal_both(0.4, -0.2, 0.7) == pytest.approx(np.mean((first > 0.4) & (second > -0.2)), abs=2e-3)


def test_coverage_without_spread_is_the_share():
    np.testing.assert_allclose(statistics.normal_coverage(np.zeros(2), 0.1, 0.8), 0.8, atol=1e-9)


@pytest.mark.parametrize("counted", [0.08, 0.3])
def test_normal_coverage_against_a_sample(counted):
    rng = np.random.default_rng(1)
    spreads = np.array([0.2, 0.6, 1.0])
    for spread, expected in zip(spreads, statistics.normal_coverage(spreads, counted, 0.8), strict=True):
        value = spread * rng.standard_normal(1500) + rng.standard_normal((1500, 1500))
        found = statistics.coverage(statistics.top_counts(value, counted), 0.8)
        assert found == pytest.approx(expected, abs=0.02)
