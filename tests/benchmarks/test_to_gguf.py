"""GGUF files for llama.cpp: the same weights in its order and types, and its own answers where it is installed."""

import json
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import to_gguf
from benchmarks.engines import llama
from benchmarks.to_gguf import convert, paired
from dynajax.benching import session as ours
from dynajax.checkpoint import Checkpoint, resolve_model
from dynajax.config import Activation, ModelSpec, Rope
from dynajax.errors import DynajaxError, UsageError
from dynajax.testing import make_checkpoint

SPEC = ModelSpec(
    layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=160, max_positions=512,
    activation=Activation(kind="silu"), rope=Rope(theta=50_000.0), bos_id=1, eos_ids=(2,),
)  # fmt: skip
WORST = {"F16": 0.0, "Q8_0": 1 / 127, "Q4_0": 1 / 7}  # error of a value against the largest of its block


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "silu", SPEC, dtype="float16")


def parts_of(checkpoint):
    """Every tensor by name, float32."""
    spec = checkpoint.spec
    found = {"embed": checkpoint.embed("float32"), "norm": checkpoint.norm("float32")[0]}
    if not spec.tied:
        found["head"] = checkpoint.head("float32")
    for layer in range(spec.layers):
        found |= {f"{layer}.{name}": value for name, value in checkpoint.attention(layer, "float32").items()}
        units = np.empty((spec.ffn, 3, 1, spec.hidden), np.float32)
        checkpoint.fill_bundle(layer, units)
        found[f"{layer}.units"] = units
    return found


def worst_error(folder, file):
    """Of any value, as a share of the largest value of its tensor."""
    theirs, ours = parts_of(Checkpoint.open(file)), parts_of(Checkpoint.open(folder))
    assert theirs.keys() == ours.keys()
    return max(float(np.abs(theirs[name] - ours[name]).max() / np.abs(ours[name]).max()) for name in ours)


@pytest.mark.parametrize("kind", to_gguf.TYPES)
def test_the_file_holds_the_folder_s_weights(folder, tmp_path, kind):
    file = tmp_path / "model.gguf"
    assert convert(folder, file, kind) == file.stat().st_size
    assert worst_error(folder, file) <= WORST[kind]
    read = Checkpoint.open(file).spec
    assert replace(read, bos_id=1, eos_ids=(2,)) == replace(SPEC, dtype=read.dtype)


def test_rows_in_another_order_are_noticed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(to_gguf, "paired", lambda weight, heads: weight)
    convert(folder, tmp_path / "model.gguf", "F16")
    assert worst_error(folder, tmp_path / "model.gguf") > WORST["Q4_0"]


def test_a_tied_head_is_not_written(tmp_path):
    folder = make_checkpoint(tmp_path / "tied", replace(SPEC, tied=True), dtype="float16")
    convert(folder, tmp_path / "model.gguf", "F16")
    assert Checkpoint.open(tmp_path / "model.gguf").spec.tied
    assert worst_error(folder, tmp_path / "model.gguf") == 0


def test_pairs_lie_side_by_side():
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert paired(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": Activation(kind="relu")}, "silu where this model has relu"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"qk_norm": True}, "qk_norm"),
        ({"rope": Rope(kind="linear", factor=2.0)}, "rope"),
        ({"hidden": 48, "head_dim": 12}, "multiple of 32 values, got 48"),
    ],
)
def test_what_the_file_could_not_say_is_refused(change, words):
    with pytest.raises(UsageError, match=words):
        to_gguf.check(replace(SPEC, **change), "Q8_0", speed_only=False)


def test_a_relu_model_is_written_for_its_speed(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "relu", replace(SPEC, activation=Activation()), dtype="float16")
    command = [str(folder), str(tmp_path / "model.gguf"), "--type", "Q4_0"]
    with pytest.raises(SystemExit):
        to_gguf.main(command)
    assert "--speed-only" in capsys.readouterr().err and not (tmp_path / "model.gguf").exists()
    to_gguf.main([*command, "--speed-only"])
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "model.gguf").stat().st_size
    with pytest.raises(SystemExit):
        to_gguf.main([*command, "--speed-only"])
    assert "exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python: make bench-deps")
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_llama_cpp_agrees_with_the_engine(tmp_path, kind):
    """smollm2-135m, prompt and single tokens: the logits of llama.cpp against this engine's, float32."""
    try:
        folder = resolve_model("smollm2-135m", offline=True)
    except DynajaxError as error:
        pytest.skip(str(error))
    file = tmp_path / "model.gguf"
    convert(folder, file, kind)
    rng = np.random.default_rng(0)
    prompt, following = rng.integers(0, 40_000, 48).tolist(), rng.integers(0, 40_000, 12).tolist()
    settings = {"ctx": 64, "batch": 1, "threads": 2}
    theirs = llama.open_session({"model": str(file), **settings}).session
    own = ours.open_session({"model": str(folder), "dtype": "float32", "sparsity": "dense", **settings}).session
    pairs = [(theirs.prefill([prompt])[0], own.prefill([prompt])[0])]
    pairs += [(theirs.step([token])[0], own.step([token])[0]) for token in following]
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
    assert max(errors) < {"F16": 0.01, "Q8_0": 0.1}[kind], errors
    assert np.mean([a.argmax() == b.argmax() for a, b in pairs]) >= {"F16": 1.0, "Q8_0": 0.8}[kind]
    wrong = [float(np.abs(a - b).max() / np.abs(b).max()) for (a, _), (_, b) in pairwise(pairs)]
    assert min(wrong) > 0.1, "other tokens' logits would pass"
