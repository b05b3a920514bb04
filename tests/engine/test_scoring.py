"""Scores of a text: what decoding would have said, token by token, with every position's own mask."""

import numpy as np
import pytest

from dynajax.engine.masked import RandomScores
from dynajax.errors import UsageError
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import decode, opened

TEXT = [*PROMPT, 5, 9, 77, 3]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def decoded_logprobs(engine, ids) -> np.ndarray:
    """log p of ids[1:], one token at a time."""
    logits = decode(engine._parts, np.array(ids[:-1])[:, None], 0)[:, 0]
    return log_softmax(logits.astype(np.float64))[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("name", ["relu", "silu", "fatrelu"])
@pytest.mark.parametrize("skip_lead", [0, 1])
def test_predicted_scores_are_those_of_decoding(models, name, skip_lead):
    knobs = {"theta": 0.4, "skip_lead": skip_lead, "lead": 1}
    with opened(models[name], sparsity="predicted", policy="static", set=knobs) as engine:
        scored = engine.score(TEXT, check=True)
        expected = decoded_logprobs(engine, TEXT)
    np.testing.assert_allclose(scored.logprobs, expected, atol=2e-4)
    assert scored.token_ids == tuple(TEXT)
    counts = scored.counts
    assert counts.tokens == len(TEXT) - 1 and (counts.computed < counts.tokens * SPECS[name].ffn).all()
    assert (counts.found <= counts.live).all() and counts.found.sum() > 0.5 * counts.live.sum()
    with opened(models[name], sparsity="dense", policy="static", set={}) as engine:
        plain = engine.score(TEXT)
    assert np.abs(plain.logprobs - expected).max() > 1e-3, "the masks change nothing: the comparison shows nothing"


@pytest.mark.parametrize("settings", [{"host_mode": "threads"}, {"host_mode": "ffi"}])
def test_plain_scores_are_those_of_decoding(models, settings):
    with opened(models["relu"], sparsity="exact", policy="static", deterministic=False, set={}, **settings) as engine:
        scored = engine.score(TEXT)
        expected = decoded_logprobs(engine, TEXT)
    np.testing.assert_allclose(scored.logprobs, expected, atol=2e-4)
    assert scored.counts is None


@pytest.mark.parametrize("batch", [3, 16])
def test_a_wide_batch_scores_the_same(models, batch):
    with opened(models["relu"], sparsity="exact", policy="static", set={}) as engine:
        expected = engine.score(TEXT[:12]).logprobs
    with opened(models["relu"], sparsity="exact", policy="static", set={}, batch=batch) as engine:
        np.testing.assert_allclose(engine.score(TEXT[:12]).logprobs, expected, atol=1e-5)


def test_other_masks(models):
    """All admitted is the plain model, nothing admitted is none at all; a random mask keeps its density."""
    spec = SPECS["relu"]
    with opened(models["relu"], sparsity="predicted", policy="static", set={}) as engine:
        full = engine.score(TEXT, source=RandomScores(np.ones(spec.layers), spec.ffn))
        none = engine.score(TEXT, source=RandomScores(np.zeros(spec.layers), spec.ffn))
        third = engine.score(TEXT, source=RandomScores(np.full(spec.layers, 1 / 3), spec.ffn))
    with opened(models["relu"], sparsity="dense", policy="static", set={}) as engine:
        plain = engine.score(TEXT)
    np.testing.assert_allclose(full.logprobs, plain.logprobs, atol=2e-4)
    assert none.counts.computed.sum() == 0
    share = third.counts.computed.sum() / (third.counts.tokens * spec.ffn * spec.layers)
    assert share == pytest.approx(1 / 3, abs=0.03)
    assert np.abs(none.logprobs - plain.logprobs).max() > 1e-2


def test_a_text_of_one_token_has_no_loss_and_a_long_one_is_refused(models):
    with opened(models["relu"], sparsity="exact", policy="static", set={}) as engine:
        assert engine.score([5]).logprobs.shape == (0,)
        with pytest.raises(UsageError, match="the text has 257 tokens, the context 256"):
            engine.score([5] * 257)


def test_sparse_prefill_skips_in_prompts_too(models):
    results = []
    for knobs in ({"theta": 0.5}, {"theta": 0.5, "sparse_prefill": True}, {"theta": 0.0, "sparse_prefill": True}):
        with opened(models["relu"], sparsity="predicted", policy="static", set=knobs) as engine:
            results.append(decode(engine._parts, np.array(TEXT)[:, None], len(PROMPT)))
    whole, sparse, all_admitted = results
    assert np.abs(whole - sparse).max() > 1e-4
    with opened(models["relu"], sparsity="exact", policy="static", set={}) as engine:
        exact = decode(engine._parts, np.array(TEXT)[:, None], len(PROMPT))
    np.testing.assert_allclose(all_admitted, exact, atol=1e-4)
