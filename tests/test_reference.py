"""The float64 reference: what it asks for and when, under which names, and what it reads of a config."""

import json
import math
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.checkpoint.spec import read_config
from dynajax.convert.gguf import convert_gguf
from dynajax.ops.rotary import frequencies
from dynajax.reference import families, forward, layers, positions
from dynajax.reference import tensors as by_name
from dynajax.testing import random_tensors
from dynajax.testing.families import FAMILIES, write
from dynajax.testing.mixtures import MIXTURES, make_moe, merge_experts
from dynajax.verify.files import FromFile
from tests.gguf_maker import SPEC as GGUF_SPEC
from tests.gguf_maker import make_gguf

TOKENS = np.random.default_rng(3).integers(0, 96, 30)
FILE = "model.safetensors"


def made(family, **overrides):
    maker = (FAMILIES | MIXTURES)[family]
    config = maker.config(**overrides)
    return config, maker.tensors(config, seed=3)


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


# --- one tensor at a time -----------------------------------------------------------------------------------------


class Watched(Mapping):
    """Gives out fresh copies, and counts how many of the earlier ones are alive whenever one is asked for."""

    def __init__(self, tensors):
        self._tensors, self._given = tensors, []
        self.asked, self.most_alive = [], 0

    def __getitem__(self, name):
        self.most_alive = max(self.most_alive, sum(given() is not None for given in self._given))
        copy = self._tensors[name].copy()
        self._given.append(weakref.ref(copy))
        self.asked.append(name)
        return copy

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)

    def __contains__(self, name):
        return name in self._tensors


EVERY = [*FAMILIES, *MIXTURES]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("family", EVERY)
def test_a_tensor_is_let_go_before_the_next_is_asked_for(family, dtype):
    config, tensors = made(family)
    check_that_tensors_are_let_go(config, tensors, dtype)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "granitemoe"])
def test_merged_experts_are_let_go_too(family):
    config, tensors = made(family)
    check_that_tensors_are_let_go(config, merge_experts(tensors), np.float32)


def check_that_tensors_are_let_go(config, tensors, dtype):
    watched = Watched({name: value.astype(dtype) for name, value in tensors.items()})
    assert_same(forward(config, watched, TOKENS), forward(config, tensors, TOKENS))
    assert watched.most_alive == 0
    assert {*watched.asked} == {name for name in tensors if "predictor" not in name}
    layers = [int(name.split("layers.")[-1].split(".")[0]) for name in watched.asked if "layers." in name]
    assert layers == sorted(layers)


def test_the_head_is_made_float64_piece_by_piece(monkeypatch):
    config, tensors = made("llama")
    whole = forward(config, tensors, TOKENS)
    monkeypatch.setattr(by_name, "HEAD_ROWS", 7)
    assert_same(forward(config, tensors, TOKENS), whole)


@pytest.mark.parametrize("family", ["llama", "opt", "falcon-7b"])
def test_a_watcher_sees_what_each_ffn_reads(family):
    config, tensors = made(family)
    seen = []
    forward(config, tensors, TOKENS, lambda layer, h: seen.append((layer, h)))
    assert [layer for layer, _ in seen] == [0, 1, 2] and {h.shape for _, h in seen} == {(30, 32)}
    up = {"llama": "layers.2.mlp.up_proj", "opt": "layers.2.fc1", "falcon-7b": "h.2.mlp.dense_h_to_4h"}[family]
    names = [name for name in tensors if f"{up}." in name]
    again = []
    forward(
        config,
        {**tensors, **{name: 2 * tensors[name] for name in names}},
        TOKENS,
        lambda layer, h: again.append((layer, h)),
    )
    for (_, one), (_, other) in zip(seen, again, strict=True):
        np.testing.assert_array_equal(one, other)  # the last FFN is behind all of them


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("llama", "model.", ""),
        ("llama", "", "module."),
        ("sparselm", "model.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("opt", "model.decoder.", ""),
        ("falcon-40b", "transformer.", ""),
    ],
)
def test_a_file_may_call_its_tensors_otherwise(tmp_path, family, old, new):
    folder = write(tmp_path, family)
    wanted = forward(read_config(folder), load_file(folder / FILE), TOKENS)
    tensors = load_file(folder / FILE)
    renamed = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / FILE)
    assert_same(forward(read_config(folder), FromFile(Checkpoint.open(folder)), TOKENS), wanted)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_found_in_files_of_both_kinds(tmp_path, family, merged):
    folder = make_moe(tmp_path, family, merged=merged)
    wanted = forward(read_config(folder), load_file(folder / FILE), TOKENS)
    assert_same(forward(read_config(folder), FromFile(Checkpoint.open(folder)), TOKENS), wanted)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {}])
def test_a_tied_head_is_the_embedding(family, said):
    config, tensors = made(family)
    config = {name: value for name, value in config.items() if name != "tie_word_embeddings"} | said
    as_head = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    found = forward(config, tensors, TOKENS)
    expected = forward({**config, "tie_word_embeddings": False}, as_head, TOKENS)
    assert np.allclose(found, expected) == said.get("tie_word_embeddings", False)


@pytest.mark.parametrize("family", ["opt", "falcon-40b", "minicpm", "minicpm-untyped"])
@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": None}])
def test_families_that_tie_without_saying_so(family, said):
    config, tensors = made(family)
    assert "lm_head.weight" not in tensors
    assert forward({**config, **said}, tensors, TOKENS).shape == (30, 96)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_has_its_rotary_rows_put_in_order(tmp_path, kind):
    tensors = random_tensors(GGUF_SPEC, seed=7)
    path = make_gguf(tmp_path / "m.gguf", tensors, kind=kind)
    found = forward(read_config(path), FromFile(Checkpoint.open(path)), TOKENS)
    folder = convert_gguf(path, tmp_path / "out", dtype="float32")
    assert_same(found, forward(read_config(folder), load_file(folder / FILE), TOKENS))
    if kind == "F32":
        assert_same(found, forward(read_config(folder), tensors, TOKENS))


# --- configs ------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    {},
    {"rope_theta": 500.0},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    {"rope_scaling": {"rope_type": None, "type": None}},
    {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 256}},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128},
    {"rope_scaling": YARN},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
    {"rope_scaling": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0}},
    {"rope_scaling": {**YARN, "truncate": False}},
    {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
    {"rope_scaling": {**YARN, "factor": 0.5}},
]


@pytest.mark.parametrize("spelled", ROPES)
def test_rotary_positions_are_those_of_the_engine(tmp_path, spelled):
    """Written twice, here and in dynajax.ops.rotary: both must read the same config the same way."""
    base = {name: value for name, value in FAMILIES["llama"].config().items() if not name.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps(base | spelled))
    rope = read_spec(tmp_path).rope
    assert rope is not None
    turns = positions.turns(base | spelled, 40, 32)
    expected = rope.attention_factor * np.exp(1j * np.outer(np.arange(40), frequencies(rope, 32).astype(np.float64)))
    np.testing.assert_allclose(turns, expected, rtol=0, atol=1e-5)


def test_a_window_that_is_not_mentioned_is_4096_and_null_is_none():
    config, _ = made("mistral")
    del config["sliding_window"]
    assert families.window(config, 0) == 4096
    assert families.window({**config, "sliding_window": None}, 0) is None
    assert families.window({**config, "model_type": "llama"}, 0) is None


def test_silu_of_large_numbers_is_their_limit():
    x = np.array([-1e4, -800.0, -1.0, 0.0, 1.0, 800.0])
    for name in ("silu", "swish"):
        found = layers.activation(name, 0.0)(x)
        np.testing.assert_allclose(found, [0, 0, -1 / (1 + math.e), 0, 1 / (1 + math.exp(-1)), 800], atol=1e-12)


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("llama", {"model_type": "mamba"}, "no reference for model_type 'mamba'"),
        ("llama", {"hidden_act": "gelu"}, "no reference for activation 'gelu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "no reference for rope type 'dynamic'"),
        ("opt", {"do_layer_norm_before": False}, "opt-350m"),
        ("opt", {"word_embed_proj_dim": 16}, "opt-350m"),
        ("falcon-7b", {"alibi": True}, "falcon-rw"),
    ],
)
def test_what_it_does_not_compute_is_refused(family, changes, match):
    config, tensors = made(family)
    with pytest.raises(ValueError, match=match):
        forward({**config, **changes}, tensors, TOKENS)


def test_opt_need_not_say_that_nothing_is_projected():
    config, tensors = made("opt")
    assert_same(forward({**config, "word_embed_proj_dim": None}, tensors, TOKENS), forward(config, tensors, TOKENS))


@pytest.mark.parametrize("family", EVERY)
def test_it_computes_what_the_tests_oracle_does(family):
    oracle = pytest.importorskip("dynajax.testing.oracle")
    config, tensors = made(family)
    assert_same(forward(config, tensors, TOKENS), oracle.forward(config, tensors, TOKENS))
