"""`Engine.watch`: what the FFN's norm reads, and the values of units where none is zero, whatever lies where."""

import jax
import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.models.decoder import normed
from dynajax.testing import load_decoder
from dynajax.testing.families import write
from tests.engine.cases import PROMPT

NEW = 2
FAMILIES = ("llama", "opt", "falcon-40b", "falcon-7b", "minicpm")  # residual layouts: biases, parallel ones, scales


def watched(folder, budget, **wanted):
    """Of every layer what was seen of a prompt and of NEW steps, as one."""
    calls = []
    with Engine.from_pretrained(str(folder), vram_budget=budget, ctx=64) as engine:
        engine.watch(calls.append, **wanted)
        engine.generate(list(PROMPT), max_new_tokens=NEW, stop=())
    layers = 1 + max(seen.layer for seen in calls)
    assert [seen.layer for seen in calls][:layers] == list(range(layers))
    return [[seen for seen in calls if seen.layer == layer] for layer in range(layers)]


def whole(parts, name):
    return np.concatenate([getattr(part, name) for part in parts])


def half(folder):
    plan = plan_for(str(folder), EngineConfig(ctx=64))
    return plan.smallest_budget_bytes + plan.host["units"] // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norm_of_the_stream_is_the_input(family, tmp_path):
    folder = write(tmp_path / family, family, num_hidden_layers=2)
    decoder = load_decoder(Checkpoint.open(folder))
    spec = decoder.spec
    for layer, parts in enumerate(watched(folder, half(folder), streams=True)):
        block, stream, hidden = decoder.attention[layer], whole(parts, "stream"), whole(parts, "hidden")
        names = ("attention_norm", "attention_norm_bias") if spec.shared_norm else ("ffn_norm", "ffn_norm_bias")
        weight, bias = (getattr(block, name) for name in names)
        assert len(stream) >= len(PROMPT) - 1 and parts[0].values is None
        np.testing.assert_allclose(normed(spec, stream, weight, bias), hidden, rtol=1e-4, atol=1e-4)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(normed(spec, stream[::-1], weight, bias), hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["half", "auto"])
def test_values_of_silu_are_those_of_the_weights(models, place):
    folder = models["silu"]
    decoder = load_decoder(Checkpoint.open(folder))
    for layer, parts in enumerate(watched(folder, half(folder) if place == "half" else place, values=True)):
        hidden, ffn = whole(parts, "hidden").astype(np.float64), decoder.ffn[layer]
        gate, up = (hidden @ np.asarray(part[...], np.float64).T for part in (ffn.gate, ffn.up))
        wanted = np.abs(gate / (1 + np.exp(-gate)) * up)
        np.testing.assert_allclose(whole(parts, "values"), wanted, rtol=1e-3, atol=1e-5)
        assert whole(parts, "live").all() and parts[0].stream is None


def test_nothing_is_remembered_on_the_device(models):
    """Looking keeps no array alive: the caches and the workspace go on being donated."""
    with Engine.from_pretrained(str(models["relu"]), ctx=64) as engine:
        engine.watch(lambda seen: None, streams=True)
        engine.generate(list(PROMPT), max_new_tokens=NEW)
        before = sum(array.nbytes for array in jax.live_arrays())
        engine.generate(list(PROMPT), max_new_tokens=NEW)
        assert sum(array.nbytes for array in jax.live_arrays()) == before
