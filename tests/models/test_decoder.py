"""The flax decoder, filled from a checkpoint, against the float64 forward that reads the files by itself."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint
from dynajax.config import Rope
from dynajax.testing import (
    TINY,
    TINY_FATRELU,
    TINY_GQA,
    TINY_SILU,
    TINY_TIED,
    TINY_WIDE_HEADS,
    load_decoder,
    make_checkpoint,
)
from dynajax.testing.families import FAMILIES, write
from dynajax.testing.oracle import family_logits

POSITIONS = (0, 1, 20, 200)
TOKENS = np.random.default_rng(7).integers(0, TINY.vocab, 201)

CASES = {
    "relu": (TINY, {"rope_spelling": "absent"}),
    "silu": (TINY_SILU, {"rope_spelling": "old"}),
    "fatrelu": (TINY_FATRELU, {"rope_spelling": "new"}),
    "gqa": (TINY_GQA, {"rope_spelling": "new", "shards": 3}),
    "multi-query": (replace(TINY, kv_heads=1), {"rope_spelling": "old"}),
    "wide-heads": (TINY_WIDE_HEADS, {"rope_spelling": "old"}),
    "tied": (TINY_TIED, {"rope_spelling": "absent"}),
    "rope-base-old": (replace(TINY, rope=Rope(theta=500.0)), {"rope_spelling": "old"}),
    "rope-base-new": (replace(TINY_GQA, rope=Rope(theta=1e6)), {"rope_spelling": "new"}),
}


def decoder_logits(folder):
    decoder = load_decoder(Checkpoint.open(folder))
    logits, gates = nnx.jit(lambda model, tokens: model(tokens))(decoder, jax.numpy.asarray(TOKENS[None, :]))
    return np.asarray(logits[0]), np.asarray(gates)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_decoder_equals_the_float64_forward(tmp_path, case):
    spec, how = CASES[case]
    folder = make_checkpoint(tmp_path, spec, seed=3, **how)
    found, gates = decoder_logits(folder)
    expected = family_logits(folder, TOKENS)
    for position in POSITIONS:
        assert_close(found[position], expected[position])
    assert 0.35 < (gates > 0).mean() < 0.65
    if spec.activation.kind == "fatrelu":
        between = (gates > 0) & (gates < spec.activation.threshold)
        assert 0.1 < between.mean() < 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    folder = write(tmp_path, family, seed=3)
    found, gates = decoder_logits(folder)
    expected = family_logits(folder, TOKENS)
    for position in POSITIONS:
        assert_close(found[position], expected[position])
        with pytest.raises(AssertionError):
            assert_close(found[position], family_logits(folder, TOKENS[::-1])[position])
    assert 0.35 < (gates > 0).mean() < 0.65


def test_without_their_ffn_the_layers_still_attend(tmp_path):
    """`keep` takes a layer's FFN away, its output bias not: that belongs to the residual stream."""
    folder = write(tmp_path, "opt", seed=3)
    whole = load_decoder(Checkpoint.open(folder))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 0 * t if "fc2.weight" in name else t for name, t in tensors.items()}, folder / "model.safetensors")
    logits, _ = nnx.jit(lambda model, tokens, keep: model(tokens, keep))(
        whole, jax.numpy.asarray(TOKENS[None, :]), jax.numpy.zeros(3)
    )
    assert_close(np.asarray(logits[0])[20], family_logits(folder, TOKENS)[20])


@pytest.mark.parametrize("name", ["q", "k"])
def test_permuted_rotary_rows_are_noticed(tmp_path, name):
    """The interleaved order of rotary rows (as in the original llama files) must not pass as the half order."""
    folder = make_checkpoint(tmp_path, TINY, seed=3)
    expected = family_logits(folder, TOKENS)
    tensors = load_file(folder / "model.safetensors")
    key = f"model.layers.0.self_attn.{name}_proj.weight"
    rows = np.arange(TINY.heads * TINY.head_dim).reshape(TINY.heads, TINY.head_dim // 2, 2)
    tensors[key] = tensors[key][rows.swapaxes(1, 2).reshape(-1)]
    save_file(tensors, folder / "model.safetensors")
    found, _ = decoder_logits(folder)
    for position in POSITIONS[1:]:  # at position 0 there is only one key to attend to
        with pytest.raises(AssertionError):
            assert_close(found[position], expected[position])


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_theta": 20_000.0, "rope_type": "default"}},
        {"rms_norm_eps": 1e-2},
        {"hidden_act": "silu"},
        {"tie_word_embeddings": True},
    ],
)
def test_every_setting_of_the_config_matters(tmp_path, change):
    folder = make_checkpoint(tmp_path, TINY, seed=3)
    expected = family_logits(folder, TOKENS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    found, _ = decoder_logits(folder)
    assert_close(found[20], family_logits(folder, TOKENS)[20])
    with pytest.raises(AssertionError):
        assert_close(found[20], expected[20])


def test_half_precision_weights_stay_near(tmp_path):
    folder = make_checkpoint(tmp_path, TINY_GQA, seed=3, dtype="bfloat16")
    found, _ = decoder_logits(folder)  # bfloat16 in the file, float32 in the module: nothing is lost
    assert_close(found[200], family_logits(folder, TOKENS)[200])


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name != "fatrelu"])  # transformers has no fatrelu
def test_transformers_agrees_with_the_reference(tmp_path, case):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    spec, how = CASES[case]
    folder = make_checkpoint(tmp_path, spec, seed=3, **how)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor(TOKENS[None, :])).logits[0].numpy()
    expected = family_logits(folder, TOKENS)
    for position in POSITIONS:
        assert_close(found[position], expected[position])
