"""The shipped model: the same tokens as transformers at every budget and host mode, and a card that is true."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, resolve_model
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.errors import FitError
from dynajax.testing import load_decoder
from dynajax.testing.oracle import family_logits
from dynajax.training.report import measure
from dynajax.training.tiny import heldout_sample
from tests.references.transformers_reference import FILE, NEW_TOKENS, POSITIONS, PROMPT, compute

HELDOUT = Path(__file__).parents[1] / "data" / "heldout"
FLOAT32 = {"dtype": "float32", "host_dtype": "float32", "ctx": 256}


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return dict(np.load(FILE, allow_pickle=False))


@pytest.fixture(scope="module")
def card() -> dict:
    return json.loads((resolve_model("tiny-relullama") / "measurements.json").read_text(encoding="utf-8"))


def budgets(**config) -> list[int]:
    plan = plan_for("tiny-relullama", EngineConfig(**FLOAT32, **config))
    return [plan.smallest_budget_bytes + plan.pool * share // 100 for share in (0, 15, 40, 75, 100)]


@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_every_budget_gives_the_tokens_of_transformers(reference, sparsity):
    for budget in budgets():
        with Engine.from_pretrained("tiny-relullama", vram_budget=budget, sparsity=sparsity, **FLOAT32) as engine:
            result = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS)
            assert result.token_ids == tuple(reference["token_ids"]), budget
            memory = result.to_json()["memory"]
            assert memory["peak_bytes"] <= memory["budget_bytes"]
            assert abs(memory["plan_bytes"] - memory["peak_bytes"]) <= 0.02 * memory["peak_bytes"]


@pytest.mark.parametrize("sparsity", [pytest.param("dense", marks=pytest.mark.slow), "exact"])
def test_callback_mode_gives_the_tokens_of_transformers(reference, sparsity):
    budget = budgets(host_mode="callback")[2]
    settings = {"vram_budget": budget, "sparsity": sparsity, "host_mode": "callback", **FLOAT32}
    with Engine.from_pretrained("tiny-relullama", **settings) as engine:
        result = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS)
        assert result.token_ids == tuple(reference["token_ids"])
        memory = result.to_json()["memory"]
        assert memory["peak_bytes"] <= memory["budget_bytes"]


def test_the_default_budget_holds_everything_and_text_streams(reference):
    with Engine.from_pretrained("tiny-relullama", **FLOAT32) as engine:
        events = list(engine.stream(PROMPT, max_new_tokens=NEW_TOKENS))
        result = engine.last_result
    assert result.units.hot_share == 1.0
    assert "".join(event.text for event in events) == result.text
    assert tuple(event.token_id for event in events) == tuple(reference["token_ids"])


def test_the_float64_reference_agrees_with_transformers(reference):
    ids = np.concatenate([reference["prompt_ids"], reference["token_ids"]])
    logits = family_logits(resolve_model("tiny-relullama"), ids)[list(POSITIONS)]
    np.testing.assert_allclose(reference["logits"], logits, rtol=0, atol=1e-4 * np.abs(logits).max())


@pytest.mark.slow
def test_transformers_still_computes_the_reference(reference):
    pytest.importorskip("torch")
    fresh = compute()
    assert fresh["prompt_ids"].tolist() == reference["prompt_ids"].tolist()
    assert fresh["token_ids"].tolist() == reference["token_ids"].tolist()
    np.testing.assert_allclose(fresh["logits"], reference["logits"], rtol=0, atol=1e-3)


def test_the_card_is_measured_again(card):
    """On the first thousand tokens of two sources: the whole text takes a minute and is marked slow."""
    folder = resolve_model("tiny-relullama")
    texts = heldout_sample(HELDOUT, folder / "tokenizer.json")
    measured = measure(load_decoder(Checkpoint.open(folder)), {name: texts[name][:1025] for name in ("austen", "sotu")})
    for source, loss in measured.loss.items():
        assert abs(loss - card["heldout"]["loss"][source]) <= 0.3, source  # other places of the same text
    assert measured.loss_without_ffn - measured.loss_mean >= 0.5
    for layer in measured.layers[1:]:
        assert 0.04 <= layer.active <= 0.30


@pytest.mark.slow
def test_the_card_is_true_and_the_model_is_what_the_project_needs(card):
    folder = resolve_model("tiny-relullama")
    measured = measure(load_decoder(Checkpoint.open(folder)), heldout_sample(HELDOUT, folder / "tokenizer.json"))
    said = card["heldout"]
    for source, loss in measured.loss.items():
        assert abs(loss - said["loss"][source]) <= 0.02, source
    assert measured.loss_mean <= 4.2
    assert measured.loss_without_ffn - measured.loss_mean >= 0.5
    for layer in measured.layers:
        assert layer.dead < 0.25
    for layer in measured.layers[1:]:
        assert 0.04 <= layer.active <= 0.30
        assert layer.top40_covers >= 0.65
        assert 0.65 <= layer.jaccard_distance <= 0.95


def test_statistics_put_more_live_units_on_the_device_than_chance():
    """activations.npz ships with the model; placement by it beats an equal share by far."""
    budget = budgets()[2]
    with Engine.from_pretrained("tiny-relullama", vram_budget=budget, **FLOAT32) as engine:
        informed = engine.generate(PROMPT, max_new_tokens=32).units
    with Engine.from_pretrained("tiny-relullama", vram_budget=budget, stats="none", **FLOAT32) as engine:
        blind = engine.generate(PROMPT, max_new_tokens=32).units
    assert informed.hot_share > blind.hot_share + 0.1


def test_the_smallest_budget_is_that_of_the_engine_that_skips():
    """The model has predictors, so an engine that does not hold all of it uses them: their bytes are in it."""
    least = plan_for("tiny-relullama", EngineConfig(ctx=256)).smallest_budget_bytes
    plan = plan_for("tiny-relullama", EngineConfig(ctx=256, vram_budget=least))
    assert plan.units_resident == 0 and plan.predictors > 0 and plan.smallest_budget_bytes == least
    with pytest.raises(FitError, match=f"{least}B"):
        plan_for("tiny-relullama", EngineConfig(ctx=256, vram_budget=least - 1))
