"""Tokens sorted by expert: every pair once, in the shapes that were asked for."""

import numpy as np
import pytest

from dynajax.engine.mixture.groups import Routed, expert_sizes, token_sizes


def random_routing(rng, tokens, chosen, experts):
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
    return ids, (rng.random((tokens, chosen)) + 0.1).astype(np.float32)


def gathered(groups, tokens, experts):
    table = np.zeros((tokens, experts), np.float64)
    for group in groups:
        for expert, rows, weights in zip(group.experts, group.rows, group.weights, strict=True):
            np.add.at(table, (rows, expert), weights)
    return table


@pytest.mark.parametrize("seed", range(20))
def test_every_wanted_pair_comes_once(seed):
    rng = np.random.default_rng(seed)
    tokens, chosen, experts = rng.integers(1, 300), rng.integers(1, 5), rng.integers(5, 12)
    ids, weights = random_routing(rng, tokens, chosen, experts)
    wanted = np.flatnonzero(rng.random(experts) < 0.6).astype(np.int32)
    sizes = expert_sizes(max(1, len(wanted)), 2), token_sizes(min(int(tokens), 128))
    groups = list(Routed(ids, weights).groups(wanted, *sizes))
    assert all(len(g.experts) in sizes[0] and g.rows.shape[1] in sizes[1] for g in groups)
    expected = np.zeros((tokens, experts))
    np.add.at(expected, (np.repeat(np.arange(tokens), chosen), ids.ravel()), weights.ravel())
    expected[:, ~np.isin(np.arange(experts), wanted)] = 0
    np.testing.assert_allclose(gathered(groups, tokens, experts), expected, rtol=1e-6)


def test_all_tokens_to_one_expert_come_in_pieces():
    ids, weights = np.zeros((300, 1), np.int32), np.ones((300, 1), np.float32)
    groups = list(Routed(ids, weights).groups(np.zeros(1, np.int32), (1,), (8, 32, 128)))
    assert [g.rows.shape[1] for g in groups] == [128, 128, 128]
    np.testing.assert_array_equal(gathered(groups, 300, 1)[:, 0], 1)


def test_rows_of_the_batch_keep_their_numbers():
    routed = Routed(np.array([[1], [0]], np.int32), np.ones((2, 1), np.float32), np.array([3, 5]))
    (group,) = routed.groups(np.array([0], np.int32), (1,), (2,))
    assert group.rows[0, 0] == 5 and group.weights.tolist() == [[1.0, 0.0]]


def test_spread_names_the_tokens_that_have_any():
    routed = Routed(np.array([[1, 2], [0, 3]], np.int32), np.array([[0.5, 0.25], [1, 2]], np.float32))
    some, weights = routed.spread(np.array([2, 1], np.int32))
    assert some.tolist() == [True, False] and weights.tolist() == [[0.25, 0.5]]


def test_counts_and_nobody():
    routed = Routed(np.array([[1, 2], [1, 3]], np.int32), np.ones((2, 2), np.float32))
    assert routed.counts(5).tolist() == [0, 2, 1, 1, 0]
    assert list(routed.groups(np.empty(0, np.int32), (1,), (1,))) == []


def test_sizes():
    assert token_sizes(1) == (1,) and token_sizes(40) == (8, 32, 40) and token_sizes(500) == (8, 32, 128)
    assert expert_sizes(6, 2) == (1, 2, 4, 6) and expert_sizes(1, 8) == (1,)
