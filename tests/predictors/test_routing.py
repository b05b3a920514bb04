"""Predictors of expert routing find what was planted, and never keep what is worse than DALI's residual."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.config import RouterSpec
from predictors.fitting import Settings
from predictors.routing import Correction, corrected, corrections_of, expected_tokens
from predictors.routing_fitting import RoutingShape, chosen, ranking_loss, recall_of, scores, top1_of
from predictors.routing_training import RoutingTrainer

D, E, K, M = 24, 12, 3, 3
SHAPE = RoutingShape(layers=(1, 2, 4), hidden=D, router=RouterSpec(experts=E, top_k=K))
TOKENS = 3000
SETTINGS = Settings(tokens=TOKENS, batch=128, passes=12, span=16, rate=2e-2, warmup=10)
RNG = np.random.default_rng(5)
ROUTERS = [{"router": RNG.standard_normal((E, D), np.float32)} for _ in range(M)]
OFFSET = 1.5 * RNG.standard_normal(D, np.float32)
NARROW = RNG.standard_normal((3, D), np.float32) / D**0.5
WIDE = 3 * RNG.standard_normal((D, 3), np.float32)


def live_of(h):
    """Where tokens of h [M, T, D] go, [M, T, E]."""
    ids = [chosen(jnp.asarray(x), Correction.none(D).arrays, r, SHAPE.router) for x, r in zip(h, ROUTERS, strict=True)]
    return np.stack([np.eye(E, dtype=bool)[np.asarray(one)].any(axis=1) for one in ids])


def planted(kind, tokens=TOKENS):
    """Inputs of all layers [M, T, D]: layer 1 is layer 0 and something; layer 2 has nothing to do with them."""
    rng = np.random.default_rng(1)
    h, other = rng.standard_normal((2, tokens, D), np.float32)
    if kind == "residual":
        return np.stack([h, h + OFFSET, other])
    if kind == "residual-mean":
        return np.stack([h + OFFSET, h, other])
    return np.stack([h, h + OFFSET + np.maximum(h @ NARROW.T, 0) @ WIDE.T, other])


def trained(kind, *, leads=(1,), ranks=(2, 8), piece=200, tokens=TOKENS, stop_at=None, seed=0):
    trainer = RoutingTrainer(SHAPE, leads, ROUTERS.__getitem__, SETTINGS, seed, ranks)
    feed(trainer, planted(kind), piece, tokens, stop_at)
    return trainer


def feed(trainer, h, piece, tokens=TOKENS, stop_at=None):
    live = live_of(h)
    for at in range(trainer.tokens, min(tokens, stop_at or tokens), piece):
        trainer.feed(list(h[:, at : at + piece]), list(live[:, at : at + piece]))


@pytest.fixture(scope="module")
def low_rank():
    trainer = trained("low rank", leads=(1, 2))
    return trainer, trainer.result(fingerprint="ab" * 32, source="a test")


def metrics_of(trainer, key="001-000"):
    manifest, _ = trainer.result(fingerprint=None, source="a test")
    entry = next(entry for entry in manifest.entries if entry.key == key)
    return entry, {kind: values["recall"] for kind, values in entry.metrics.items()}


def test_a_constant_is_what_residual_adds():
    entry, recall = metrics_of(trained("residual", ranks=(2,)))
    assert recall["residual"] > 0.99 > 0.9 > recall["gate"] > recall["random"] == 0.25
    assert recall["residual-mean"] < 0.9
    assert recall[entry.kind] >= recall["residual"]


def test_a_mean_that_goes_is_what_residual_mean_takes_away():
    _, recall = metrics_of(trained("residual-mean", ranks=(2,)))
    assert recall["residual-mean"] > 0.95 and recall["residual"] > 0.95 > 0.9 > recall["gate"]


def test_a_map_of_low_rank_is_learned(low_rank):
    trainer, _ = low_rank
    entry, recall = metrics_of(trainer)
    assert (entry.kind, entry.rank) == ("corrected", 8)
    assert recall["corrected"] > 0.8 > 0.7 > recall["residual"] > recall["gate"]
    told = entry.metrics["corrected"]["top1"]
    assert told["8"] > entry.metrics["residual"]["top1"]["8"]


def test_what_cannot_be_told_is_left_as_it_was(low_rank):
    """Layer 2 is noise to those before it: whatever is kept is no worse than the residual, on the held-out tokens."""
    trainer, (manifest, tree) = low_rank
    assert [(entry.lead, entry.asked) for entry in manifest.entries] == [(1, 0), (1, 1), (2, 0)]
    for key in ("001-001", "002-000"):
        entry, recall = metrics_of(trainer, key)
        assert recall["residual"] <= recall[entry.kind] < 0.4
        assert (key in tree) == (entry.kind == "corrected")


def test_a_correction_that_spoils_everything_is_not_kept():
    trainer = trained("residual", ranks=(2,))
    trainer.finish()
    spoilt = jax.tree.map(lambda leaf: leaf + 100.0, trainer._trained)
    trainer._trained = spoilt
    trainer._early = jax.tree.map(lambda leaf: leaf + 100.0, trainer._early)
    entry, recall = metrics_of(trainer)
    assert entry.kind == "residual" and entry.rank == 0 and recall["corrected"] < 0.9


def test_an_early_state_is_kept_if_the_last_is_worse():
    trainer = trained("low rank", ranks=(8,))
    trainer.finish()
    trainer._trained = jax.tree.map(lambda leaf: leaf + 100.0, trainer._trained)
    entry, recall = metrics_of(trainer)
    assert entry.kind == "corrected" and recall["corrected"] > recall["residual"] + 0.05


def test_corrections_are_what_was_measured(low_rank):
    _, (manifest, tree) = low_rank
    h = planted("low rank", 500)[:, 300:]
    live = live_of(h)
    for kind in ("corrected", "residual", "residual-mean"):
        found = corrections_of(manifest, tree, kind, 1)
        assert list(found) == [0, 1] and found[0].kind == kind
        ids = np.asarray(chosen(jnp.asarray(h[0]), found[0].arrays, ROUTERS[1], SHAPE.router))
        told = manifest.entries[0].metrics[kind]["recall"]
        assert abs(recall_of(ids, live[1]) - told) < 0.05
        with pytest.raises(AssertionError):  # the comparison can fail
            assert abs(recall_of((ids + 1) % E, live[1]) - told) < 0.05


def test_how_tokens_are_handed_in_changes_nothing_and_seeds_do():
    whole, pieces = (trained("low rank", ranks=(2,), piece=piece, tokens=1280) for piece in (1280, 64))
    other = trained("low rank", ranks=(2,), piece=64, tokens=1280, seed=1)
    results = [trainer.result(fingerprint=None, source="") for trainer in (whole, pieces, other)]
    jax.tree.map(np.testing.assert_array_equal, results[0][1], results[1][1])
    assert results[0][0] == results[1][0]
    assert not np.array_equal(results[0][1]["001-000"]["down"], results[2][1]["001-000"]["down"])


@pytest.mark.parametrize("stop_at", [200, 1800])
def test_a_state_goes_on_bit_for_bit(stop_at):
    expected = trained("low rank", ranks=(2,)).result(fingerprint=None, source="")
    state = trained("low rank", ranks=(2,), stop_at=stop_at).state()
    trainer = RoutingTrainer(SHAPE, (1,), ROUTERS.__getitem__, SETTINGS, 0, (2,))
    trainer.restore(state)
    assert trainer.tokens == stop_at
    feed(trainer, planted("low rank"), 200)
    manifest, tree = trainer.result(fingerprint=None, source="")
    assert manifest == expected[0]
    jax.tree.map(np.testing.assert_array_equal, tree, expected[1])
    with pytest.raises(ValueError, match="other leads"):
        RoutingTrainer(SHAPE, (1, 2), ROUTERS.__getitem__, SETTINGS, 0, (2,)).restore(state)


def test_arguments():
    for leads in ((), (0,), (3,)):
        with pytest.raises(ValueError, match="leads must lie from 1 to 2"):
            RoutingTrainer(SHAPE, leads, ROUTERS.__getitem__)
    with pytest.raises(ValueError, match="buffer_bytes must hold 4/3 batch tokens"):
        RoutingTrainer(SHAPE, (1,), ROUTERS.__getitem__, Settings(buffer_bytes=2**10))
    trainer = RoutingTrainer(SHAPE, (1,), ROUTERS.__getitem__, SETTINGS, 0, (2,))
    with pytest.raises(ValueError, match="live must be 3 arrays"):
        trainer.feed([np.zeros((2, D))] * 3, [np.zeros((2, E + 1), bool)] * 3)
    with pytest.raises(ValueError, match="hidden must be 3 arrays"):
        trainer.feed([np.zeros((2, D))] * 2, [np.zeros((2, E), bool)] * 3)
    with pytest.raises(RuntimeError, match="no tokens were held out"):
        trainer.found()


def test_the_log_names_what_was_chosen(low_rank, caplog):
    with caplog.at_level(logging.INFO, "predictors"):
        low_rank[0].result(fingerprint=None, source="")
    assert caplog.messages[0].startswith("lead 1, from layer 0: corrected of residual 0.")


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_all_pairs():
    rng = np.random.default_rng(0)
    z, ids = rng.standard_normal((5, E)), np.stack([rng.choice(E, K, replace=False) for _ in range(5)])
    live = np.eye(E, dtype=bool)[ids].any(axis=1)
    pairs = [
        np.log1p(np.exp(2.5 * (z[t, b] - z[t, a]))) / 2.5
        for t in range(5)
        for a, b in itertools.product(np.flatnonzero(live[t]), np.flatnonzero(~live[t]))
    ]
    found = ranking_loss(jnp.asarray(z, jnp.float32), jnp.asarray(live), jnp.float32(2.5), K)
    np.testing.assert_allclose(found, np.mean(pairs), rtol=1e-5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found, np.mean(pairs[1:]), rtol=1e-5)


def test_scores_rank_as_the_router_does():
    """Whatever a router makes of its logits, its K best by `scores` are those that it chooses."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((50, D)), jnp.float32)
    leaves = {"router": ROUTERS[0]["router"], "router_bias": rng.standard_normal(E).astype("f4")}
    for score, biased in itertools.product(("softmax", "sigmoid"), (False, True)):
        router = RouterSpec(experts=E, top_k=K, score=score, logits_bias=True, selection_bias=biased)
        mine = leaves | ({"selection_bias": rng.standard_normal(E).astype("f4") / 4} if biased else {})
        ids = np.asarray(chosen(h, Correction.none(D).arrays, mine, router))
        best = np.argsort(-np.asarray(scores(h, mine, router)), axis=1, kind="stable")[:, :K]
        np.testing.assert_array_equal(np.sort(ids), np.sort(best))


def test_corrected_is_the_plain_formula():
    rng = np.random.default_rng(0)
    h, shift, down, up = (rng.standard_normal(s).astype("f4") for s in ((4, D), (D,), (5, D), (D, 5)))
    expected = h + shift + np.maximum(h @ down.T, 0) @ up.T
    np.testing.assert_allclose(corrected(h, shift, down, up), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(corrected(h, *Correction.shifted("residual", shift).arrays), h + shift, rtol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(corrected(h, shift, -down, up), expected, rtol=1e-4, atol=1e-4)


def test_workloads():
    ids = np.array([[0, 1, 2], [0, 3, 4]])
    np.testing.assert_allclose(expected_tokens(ids, 6), [2, 0.85, 0.7, 0.85, 0.7, 0])
    np.testing.assert_allclose(expected_tokens(np.array([[2]]), 3), [0, 0, 1])
    live = np.eye(E, dtype=bool)[np.array([[0, 1], [0, 2], [3, 4], [3, 5]])].any(axis=1)
    for told, expected in (([0, 1], 0.5), ([3, 6], 0.5), ([7, 8], 0.0)):
        found = [top1_of(np.array([told] * 4), live, 2, seed) for seed in range(20)]
        assert set(found) <= {0.0, 0.5, 1.0} and (expected == 0) == (max(found) == 0)
    assert top1_of(ids, live[:2], 4, 0) is None
    exact = np.stack([np.flatnonzero(row) for row in live])
    assert top1_of(exact, live, 2, 0) == 1.0 == recall_of(exact, live)
