"""Activation statistics: counts and contributions against a plain computation, and a file that steers placement."""

import json

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, write_stats
from dynajax.collecting import LEADS, Collected, Counter, collect, contributions, cut, read_texts, undisturbed
from dynajax.config import Activation, EngineConfig, ModelSpec
from dynajax.errors import UsageError
from dynajax.testing import TINY_FATRELU, TINY_GQA, TINY_SILU, load_decoder, make_checkpoint

WINDOWS = [list(range(3, 30)), list(range(40, 51)), [7, 8]]


def quiet(stage, done, total):
    """Progress for nobody."""


@pytest.fixture(scope="module", params=["relu", "fatrelu"])
def model(request, tmp_path_factory):
    spec = {"relu": TINY_GQA, "fatrelu": TINY_FATRELU}[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("collect") / "model", spec)


@pytest.fixture(scope="module")
def plain(model):
    """(frequency [L,F], tokens) by the decoder, every token but the last of each window."""
    decoder = load_decoder(Checkpoint.open(model))
    spec = decoder.spec
    live, tokens = np.zeros((spec.layers, spec.ffn)), 0
    for window in WINDOWS:
        gates = decoder(np.asarray(window[:-1], np.int32)[None])[1]
        tokens += len(window) - 1
        for layer, gate in enumerate(gates):
            gate64 = np.asarray(gate[0], np.float64)
            live[layer] += (gate64 >= max(spec.activation.threshold, 1e-30)).sum(axis=0)
    return live / tokens, tokens


@pytest.mark.parametrize("policy", ["none", "static"])
def test_frequencies_are_those_of_the_decoder(model, plain, policy):
    checkpoint, found = collect(str(model), model, EngineConfig(ctx=32, policy=policy), WINDOWS, quiet)
    frequency, tokens = plain
    assert found.tokens == tokens
    assert np.abs(found.frequency - frequency).max() <= 1.01 / tokens  # a gate at its threshold may fall either way
    assert np.abs(found.frequency - frequency).mean() < 1e-3
    assert (found.mass > 0).any() and np.isfinite(found.mass).all()
    assert found.cosine.shape == (checkpoint.spec.layers, len(LEADS))


def test_the_file_steers_placement(model, tmp_path):
    checkpoint, found = collect(str(model), model, EngineConfig(ctx=32), WINDOWS, quiet)
    path = tmp_path / "stats.npz"
    write_stats(
        path,
        fingerprint=checkpoint.fingerprint(),
        frequency=found.frequency,
        tokens=found.tokens,
        mass=found.mass,
        cosine=found.cosine,
    )
    with Engine.from_pretrained(str(model), ctx=64, stats=str(path)) as engine:
        assert len(engine.generate([1, 2, 3], max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("kind", ["relu", "fatrelu", "silu", "drelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_contributions_against_float64(kind, bias):
    rng = np.random.default_rng(3)
    shape = {"layers": 1, "hidden": 24, "ffn": 1100, "heads": 2, "kv_heads": 2, "head_dim": 8, "vocab": 16}
    spec = ModelSpec(**shape, activation=Activation(kind=kind, threshold=0.2 * (kind == "fatrelu")), ffn_bias=bias)
    units = rng.standard_normal((spec.ffn, 3, spec.unit_width)).astype(np.float32)
    hidden = rng.standard_normal((9, spec.hidden)).astype(np.float32)
    wide = np.concatenate([hidden, np.ones((9, 1)), np.zeros((9, 40))], axis=1)[:, : spec.unit_width].astype(np.float64)
    gate, up = wide @ units[:, 0].T.astype(np.float64), wide @ units[:, 1].T.astype(np.float64)
    values = {
        "relu": np.maximum(gate, 0) * up,
        "fatrelu": np.where(gate >= np.float32(0.2), gate, 0) * up,
        "silu": gate / (1 + np.exp(-gate)) * up,
        "drelu": np.maximum(gate, 0) * np.maximum(up, 0),
    }[kind]
    wanted = np.abs(values).mean(axis=0) * np.linalg.norm(units[:, 2].astype(np.float64), axis=1)
    np.testing.assert_allclose(contributions(spec, hidden, units), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(contributions(spec, hidden, units[:, ::-1]), wanted, rtol=1e-4, atol=1e-4)


def test_the_sample_is_fair_and_the_same_token_in_every_layer():
    spec = ModelSpec(layers=2, hidden=2, ffn=4, heads=1, kv_heads=1, head_dim=2, vocab=8)
    kept = np.zeros(400)
    for seed in range(60):
        counter = Counter(spec, seed, sample=40)
        for first in range(0, 400, 50):
            hidden = np.stack([np.arange(first, first + 50), np.ones(50)], axis=1).astype(np.float32)
            for layer in range(2):
                counter.tell(layer, hidden + layer, np.ones((50, 4), np.bool_))
        numbers = counter.sample[0, :, 0].astype(int)
        assert len(set(numbers)) == 40
        np.testing.assert_array_equal(counter.sample[1] - 1, counter.sample[0])
        kept[numbers] += 1
    assert abs(kept[:100].mean() - 6) < 1 and abs(kept[300:].mean() - 6) < 1
    assert counter.tokens == 400 and (counter.live == 400).all()


def test_cosines_of_layers_that_are_known():
    spec = ModelSpec(layers=3, hidden=2, ffn=4, heads=1, kv_heads=1, head_dim=2, vocab=8)
    counter, none = Counter(spec), np.zeros((5, 4), np.bool_)
    east, north = np.tile([[3.0, 0.0]], (5, 1)), np.tile([[0.0, 2.0]], (5, 1))
    for _ in range(2):
        for layer, hidden in enumerate((east, east + north * 1.5, north)):
            counter.tell(layer, hidden.astype(np.float32), none)
    cosine = counter.cosine / counter.tokens
    np.testing.assert_allclose(cosine[:, 0], [np.sqrt(0.5), np.sqrt(0.5), 0], atol=1e-6)
    np.testing.assert_allclose(cosine[:, 1], [0, 0, 0], atol=1e-6)


def test_nothing_to_read():
    counter = Counter(TINY_SILU)
    with pytest.raises(UsageError, match="no text to collect from"):
        counter.result(None)
    assert cut([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert cut([1, 2, 3, 4, 5], 4) == [[1, 2, 3, 4]]


def test_the_busiest_quarter():
    frequency = np.array([[0.5, 0.0, 0.25, 0.25, 0.0], [0, 0, 0, 0, 0]], np.float32)
    assert Collected(frequency, 4).top_quarter == [0.75, 0.0]  # two of five


def test_a_model_is_observed_while_nothing_moves():
    with pytest.raises(UsageError, match="--cache is for generating"):
        undisturbed(EngineConfig(cache="lru"))


def test_texts(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("no")
    assert list(read_texts(tmp_path)) == ["first", "second"]
    assert list(read_texts(tmp_path / "c.md")) == ["no"]
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="must be UTF-8, byte 0"):
        list(read_texts(tmp_path / "d.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no \.txt file"):
        list(read_texts(tmp_path / "empty"))


@pytest.mark.parametrize("density", [0.25, 0.5])
def test_of_silu_the_neurons_that_contribute_most_are_counted(tmp_path, density):
    """No activation is zero there, so that a frequency of what is not zero would say nothing."""
    folder = make_checkpoint(tmp_path / "silu", TINY_SILU)
    checkpoint, found = collect(str(folder), folder, EngineConfig(ctx=32), WINDOWS, quiet, density)
    decoder, live, tokens = load_decoder(checkpoint), np.zeros((TINY_SILU.layers, TINY_SILU.ffn)), 0
    for window in WINDOWS:
        hidden = hidden_of(decoder, window[:-1])
        tokens += len(window) - 1
        for layer, h in enumerate(hidden):
            ffn = decoder.ffn[layer]
            gate, up = (h @ np.asarray(part[...], np.float64).T for part in (ffn.gate, ffn.up))
            mass = np.abs(gate / (1 + np.exp(-gate)) * up) * np.linalg.norm(np.asarray(ffn.down[...]), axis=1)
            least = np.sort(mass, axis=1)[:, -round(density * TINY_SILU.ffn)]
            live[layer] += (mass >= least[:, None]).sum(axis=0)
    np.testing.assert_allclose(found.frequency.mean(axis=1), density, rtol=1e-5)
    assert np.abs(found.frequency - live / tokens).max() <= 2.01 / tokens  # two of equal size may swap
    assert found.frequency.std() > 0.1


def hidden_of(decoder, tokens):
    """What each layer's FFN reads [T, D], float64."""
    x, hidden = np.asarray(decoder.embed[...])[np.asarray(tokens)][None], []
    for attend, ffn in zip(decoder.attention, decoder.ffn, strict=True):
        x, h = attend(x, np.arange(len(tokens))[None])
        hidden.append(np.asarray(h[0], np.float64))
        x = x + ffn(h)[0]
    return hidden


@pytest.mark.parametrize("settings", [{"sparsity": "predicted"}, {"policy": "dynamic"}])
def test_a_model_is_observed_without_predictions(settings):
    with pytest.raises(UsageError, match="observed without predictions"):
        undisturbed(EngineConfig(**settings))
    assert undisturbed(EngineConfig()).policy == "static"


def test_json_is_the_committed_schema(model, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    import jsonschema

    root = Path(__file__).parents[1]
    out = tmp_path / "s.npz"
    argv = ["--model", str(model), "--ids", "random:40", "--ctx", "16", "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, str(root / "scripts/collect_stats.py"), *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    jsonschema.validate(found, json.loads((root / "docs/schemas/collect-stats.json").read_text()))
    assert found["tokens"] == 15 + 15 + 7
    assert found["wanted_density"] is None and found["unit_kind"] == "neuron"
    assert found["layers"] == list(range(len(found["density"]))) and len(found["top_quarter"]) == len(found["density"])
    assert out.is_file()
