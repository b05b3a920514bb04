"""The shipped mixture: its card is true, and its tokens do not depend on where its experts are."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, read_stats, resolve_model
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.testing import load_decoder
from dynajax.testing.oracle import family_logits
from dynajax.training.report import measure
from dynajax.training.tiny import TINY_MOE, heldout_sample

HELDOUT = Path(__file__).parents[2] / "data" / "heldout"
PROMPT = "Call me Ishmael. Some years ago, never mind how long"
FLOAT32 = {"dtype": "float32", "host_dtype": "float32", "ctx": 256}
NEW_TOKENS = 24
LEAST, WORSE = 0.02, 0.1  # of an expert's load; nats that the mixture may be above the dense model


def card_of(model: str) -> dict:
    return json.loads((resolve_model(model) / "measurements.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("tiny-moe")


def test_the_card_keeps_its_promises():
    card, dense = card_of("tiny-moe")["heldout"], card_of("tiny-relullama")["heldout"]
    assert card["loss_mean"] <= dense["loss_mean"] + WORSE
    assert all(load["least"] > LEAST for load in card["loads"]) and len(card["loads"]) == TINY_MOE.layers


def test_the_card_is_measured_again(folder):
    """On the first thousand tokens of two sources: the whole text takes a minute and is marked slow."""
    texts = {name: ids[:1025] for name, ids in heldout_sample(HELDOUT, folder / "tokenizer.json").items()}
    some = {name: texts[name] for name in ("austen", "sotu")}
    found = measure(load_decoder(Checkpoint.open(folder)), some)
    card = card_of("tiny-moe")["heldout"]["loss"]
    for name, loss in found.loss.items():
        assert loss == pytest.approx(card[name], abs=0.3)  # other places of the same text
    assert min(load.least for load in found.loads) > LEAST / 2


@pytest.mark.slow
def test_the_whole_card_is_measured_again(folder):
    found = measure(load_decoder(Checkpoint.open(folder)), heldout_sample(HELDOUT, folder / "tokenizer.json"))
    card = card_of("tiny-moe")["heldout"]
    assert found.loss == pytest.approx(card["loss"], abs=1e-3) and found.tokens == card["tokens"]
    for row, told in zip(found.loads, card["loads"], strict=True):
        assert row.least == pytest.approx(told["least"], abs=1e-3) and row.least > LEAST


def test_parameters_and_statistics_are_the_models(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.parameters == card_of("tiny-moe")["parameters"]
    frequency = read_stats(folder / "activations.npz", checkpoint.spec, checkpoint.fingerprint())
    np.testing.assert_allclose(frequency.sum(axis=1), TINY_MOE.experts.router.top_k, rtol=1e-3)


def budget(share: float, **settings) -> int:
    plan = plan_for("tiny-moe", EngineConfig(**FLOAT32, **settings, vram_budget="1GiB", host_mode="threads"))
    return plan.smallest_budget_bytes + int(plan.pool * share)


@pytest.fixture(scope="module")
def tokens() -> tuple[int, ...]:
    with Engine.from_pretrained("tiny-moe", **FLOAT32) as engine:
        return engine.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0).token_ids


@pytest.mark.parametrize(("share", "policy"), [(0.0, "static"), (0.4, "static"), (0.4, "scan"), (0.4, "lru")])
def test_every_budget_gives_the_same_tokens_and_keeps_to_its_plan(tokens, share, policy):
    wanted = budget(share, policy=policy)
    with Engine.from_pretrained("tiny-moe", vram_budget=wanted, policy=policy, **FLOAT32) as engine:
        result = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0)
    assert result.token_ids == tokens
    memory = result.to_json()["memory"]
    assert memory["peak_bytes"] <= memory["budget_bytes"] == wanted
    assert result.units.kind == "expert" and result.units.live_per_token == 24


def test_the_tokens_are_those_of_the_float64_reference(folder, tokens):
    with Engine.from_pretrained("tiny-moe", **FLOAT32) as engine:
        prompt = engine._parts.encode(PROMPT)
    logits = family_logits(folder, [*prompt, *tokens])
    assert logits[len(prompt) - 1 : -1].argmax(axis=1).tolist() == list(tokens)
