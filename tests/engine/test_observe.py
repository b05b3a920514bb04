"""`Engine.observe`: every layer's FFN input and live units, whatever lies where, and nothing changed by looking."""

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.testing import load_decoder
from tests.engine.cases import PROMPT

NEW = 5


def seen_by(engine, prompt, new_tokens):
    """(layers in order, hidden by layer [T, D], live by layer [T, F], token ids)."""
    calls = []
    engine.observe(lambda layer, hidden, live: calls.append((layer, hidden, live)))
    ids = engine.generate(list(prompt), max_new_tokens=new_tokens).token_ids
    engine.observe(None)
    layers = [layer for layer, _, _ in calls]
    hidden = [np.concatenate([h for i, h, _ in calls if i == layer]) for layer in range(max(layers) + 1)]
    live = [np.concatenate([mask for i, _, mask in calls if i == layer]) for layer in range(max(layers) + 1)]
    return layers, hidden, live, ids


def half(folder, **settings):
    plan = plan_for(str(folder), EngineConfig(ctx=64, **settings))
    return plan.smallest_budget_bytes + plan.host["units"] // 2


@pytest.mark.parametrize("mode", ["threads", "ffi", "resident"])
@pytest.mark.parametrize("name", ["relu", "fatrelu"])
def test_it_sees_what_the_decoder_computes(models, name, mode):
    settings = {"ctx": 64} if mode == "resident" else {"ctx": 64, "host_mode": mode}
    if mode != "resident":
        settings["vram_budget"] = half(models[name], host_mode=mode)
    with Engine.from_pretrained(str(models[name]), **settings) as engine:
        layers, hidden, live, ids = seen_by(engine, PROMPT, NEW)
        assert engine.generate(list(PROMPT), max_new_tokens=NEW).token_ids == ids
    tokens = [*PROMPT, *ids[:-1]]
    count = engine_layers = max(layers) + 1
    assert layers == list(range(count)) * (1 + NEW)
    decoder = load_decoder(Checkpoint.open(models[name]))
    gates = decoder(np.asarray(tokens, np.int32)[None])[1]
    threshold = decoder.spec.activation.threshold
    for layer in range(engine_layers):
        gate = np.asarray(gates[layer][0])
        assert hidden[layer].shape == (len(tokens), decoder.spec.hidden)
        wanted = gate >= threshold if name == "fatrelu" else gate > 0
        unsure = np.abs(gate - threshold) < 1e-5
        assert (live[layer] == wanted)[~unsure].all()
        assert 0.1 < live[layer].mean() < 0.9
        again = hidden[layer] @ np.asarray(decoder.ffn[layer].gate[...]).T
        np.testing.assert_allclose(again, gate, rtol=1e-4, atol=1e-4)


def test_copies_are_the_observers_own(models):
    def spoil(layer, hidden, live):
        hidden[:] = np.nan
        live[:] = True

    with Engine.from_pretrained(str(models["relu"]), ctx=64) as engine:
        plain = engine.generate(list(PROMPT), max_new_tokens=NEW).token_ids
        engine.observe(spoil)
        assert engine.generate(list(PROMPT), max_new_tokens=NEW).token_ids == plain


def test_an_error_of_the_observer_is_the_callers(models):
    def fail(layer, hidden, live):
        raise ZeroDivisionError("mine")

    with Engine.from_pretrained(str(models["relu"]), ctx=64) as engine:
        plain = engine.generate(list(PROMPT), max_new_tokens=NEW).token_ids
        engine.observe(fail)
        with pytest.raises(ZeroDivisionError, match="mine"):
            engine.generate(list(PROMPT), max_new_tokens=NEW)
        engine.observe(None)
        assert engine.generate(list(PROMPT), max_new_tokens=NEW).token_ids == plain
