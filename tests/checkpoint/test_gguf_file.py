"""GGUF files: translated as a Hugging Face folder would be, value for value, and refused in one line when wrong."""

import contextlib
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from dynajax.checkpoint.gguf_file import llama3_factors, read_gguf
from dynajax.checkpoint.gguf_header import is_gguf, read_header
from dynajax.checkpoint.reading import QUANTISED, read_blocks, read_into, read_transposed_into
from dynajax.checkpoint.shards import Stamp, Stored
from dynajax.checkpoint.spec import spec_of
from dynajax.errors import ModelError, NumericalError
from dynajax.testing import random_tensors
from tests.gguf_maker import KINDS, SPEC, gguf_name, make_gguf, metadata_of, paired, write_gguf

TENSORS = random_tensors(SPEC, seed=3)
Q, K = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # what the gguf package can quantise


@pytest.fixture(scope="module")
def plain_gguf(tmp_path_factory):
    return make_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", TENSORS)


def read(stored, dtype=np.float32):
    out = np.full(stored.shape, np.nan, dtype)
    read_into(stored, out)
    return out


def refusal(path):
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()
    return str(caught.value)


# --- translation --------------------------------------------------------------------------------------


def test_the_config_is_the_one_of_the_model(plain_gguf):
    model = read_gguf(plain_gguf)
    assert spec_of(model.config, plain_gguf) == SPEC
    assert model.config["architectures"] == ["LlamaForCausalLM"]
    assert model.config["rms_norm_eps"] == SPEC.norm_eps  # not 9.99999997e-07
    assert (model.token_id("bos"), model.token_id("eos"), model.token_id("padding")) == (1, 2, None)
    assert model.chat_template is None


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_value_of_every_tensor(tmp_path, kind):
    """Quantised rows are those that the package gives for the whole tensor, back in the order of the checkpoint."""
    model = read_gguf(make_gguf(tmp_path / "m.gguf", TENSORS, kind=kind))
    assert model.shard.tensors.keys() == TENSORS.keys()
    for name, stored in model.shard.tensors.items():
        value = TENSORS[name]
        if value.ndim == 2 and kind != "F32":
            value = dequantize(gguf.quants.quantize(value, KINDS[kind]), KINDS[kind])
        np.testing.assert_array_equal(read(stored), value, err_msg=name)
        np.testing.assert_array_equal(read(stored, np.float16), value.astype(np.float16))
        blocks = list(read_blocks(stored, "float32"))
        np.testing.assert_array_equal(np.concatenate([block.ravel() for block in blocks]), value.ravel())
        if name.endswith("down_proj.weight"):
            out = np.full(value.shape[::-1], np.nan, np.float32)
            read_transposed_into(stored, out)
            np.testing.assert_array_equal(out.T, value)


def test_rows_left_in_the_order_of_the_file_are_noticed(plain_gguf):
    tensors = read_gguf(plain_gguf).shard.tensors
    assert (tensors[Q].rotary_heads, tensors[K].rotary_heads) == (SPEC.heads, SPEC.kv_heads)
    for name in (Q, K):
        with pytest.raises(AssertionError):
            np.testing.assert_array_equal(read(replace(tensors[name], rotary_heads=None)), TENSORS[name])
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(read(replace(tensors[K], rotary_heads=SPEC.heads)), TENSORS[K])
    others = [stored for name, stored in tensors.items() if "q_proj" not in name and "k_proj" not in name]
    assert {stored.rotary_heads for stored in others} == {None}


def test_pairs_side_by_side_small_enough_to_read():
    assert paired(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_types_block_by_block(tmp_path, kind):
    """Random bytes with sane scales, more rows than one block: equal to the package's own answer for the whole."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    rng = np.random.default_rng(0)
    width = gguf.GGML_QUANT_SIZES[KINDS[kind]][0] * 2
    rows = 1 + 2**21 // (4 * width)
    raw = rng.integers(0, 60, (rows, 2 * size), dtype=np.uint8)  # as float16 bytes: small and finite
    path = tmp_path / "data"
    path.write_bytes(b"xyz" + raw.tobytes())
    stored = Stored("t", path, Stamp.of(path.stat()), kind, (rows, width), 3, raw.nbytes)
    expected = dequantize(raw, KINDS[kind])
    assert np.isfinite(expected).all() and expected.std() > 0
    np.testing.assert_array_equal(read(stored), expected)
    out = np.empty((width, rows), np.float32)
    read_transposed_into(stored, out)
    np.testing.assert_array_equal(out.T, expected)


def test_a_tied_model_has_no_head(tmp_path):
    tensors = {name: value for name, value in TENSORS.items() if name != "lm_head.weight"}
    model = read_gguf(make_gguf(tmp_path / "m.gguf", tensors))
    assert model.config["tie_word_embeddings"] is True
    assert spec_of(model.config, tmp_path) == replace(SPEC, tied=True)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_the_type_the_weights_were_meant_for(tmp_path, kind, dtype):
    assert read_gguf(make_gguf(tmp_path / "m.gguf", TENSORS, kind=kind)).config["dtype"] == dtype


def test_quantised_weights_are_meant_for_float16(tmp_path):
    assert read_gguf(make_gguf(tmp_path / "m.gguf", TENSORS, kind="Q4_1")).config["dtype"] == "float16"


def test_ends_head_size_and_lists_of_one_number(tmp_path):
    extra = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "tokenizer.ggml.padding_token_id": 96,  # beyond the embedding: not a token
        "llama.attention.key_length": 8,
        "llama.attention.head_count_kv": [2, 2],
    }
    config = read_gguf(make_gguf(tmp_path / "m.gguf", TENSORS, metadata=extra)).config
    assert config["eos_token_id"] == [2, 5]
    assert "pad_token_id" not in config
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 2)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.freq_base": 1e6}, (1e6, None)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, (1e4, None)),
        ({"llama.rope.scale_linear": 2.0}, (1e4, {"rope_type": "linear", "factor": 2.0})),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            (1e4, {"rope_type": "linear", "factor": 4.0}),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
            (1e4, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
        ),
    ],
)
def test_rotary_positions(tmp_path, extra, expected):
    config = read_gguf(make_gguf(tmp_path / "m.gguf", TENSORS, metadata=extra)).config
    assert (config["rope_theta"], config.get("rope_scaling")) == expected
    spec_of(config, tmp_path)


def with_factors(path, factors, extra=None):
    stored = {gguf_name(name): value for name, value in TENSORS.items()}
    stored["rope_freqs.weight"] = np.asarray(factors, np.float32)
    return write_gguf(path, stored, metadata_of(SPEC) | {"llama.rope.freq_base": 5e5} | (extra or {}))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_of_llama3_are_recognised(tmp_path, factor):
    """Against the configuration written out, in transformers' own words."""
    model = read_gguf(with_factors(tmp_path / "m.gguf", llama3_factors(5e5, 8, factor)))
    assert model.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in model.shard.tensors
    assert spec_of(model.config, tmp_path).rope.factor == factor


def test_factors_of_llama3_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = transformers.LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / scaled.numpy(), llama3_factors(5e5, 128, 8.0), rtol=1e-4)


def test_rotary_factors_of_one_change_nothing_and_others_are_refused(tmp_path):
    assert "rope_scaling" not in read_gguf(with_factors(tmp_path / "a.gguf", np.ones(4))).config
    assert "rope_freqs.weight holds factors" in refusal(with_factors(tmp_path / "b.gguf", [1, 2, 3, 4]))
    assert "rope_freqs.weight holds factors" in refusal(with_factors(tmp_path / "c.gguf", np.ones(5)))


def test_biases_and_the_names_of_qwen(tmp_path):
    """qwen2 stores q and k in the order of the checkpoint."""
    stored = {gguf_name(name): value for name, value in TENSORS.items()}
    for layer in range(SPEC.layers):
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            stored[f"blk.{layer}.attn_{part}.bias"] = np.arange(rows, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", stored, metadata_of(SPEC, "qwen2"), architecture="qwen2")
    model = read_gguf(path)
    np.testing.assert_array_equal(read(model.shard.tensors[Q]), TENSORS[Q])
    assert model.shard.tensors["model.layers.0.self_attn.q_proj.bias"].rotary_heads is None
    assert model.config["model_type"] == "qwen2"
    assert spec_of(model.config, path).qkv_bias


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.block_count": None}, "llama.block_count must be one integer > 0, got nothing"),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv must be one integer"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon must be a number, got 'small'"),
        ({"llama.context_length": -5.5}, "llama.context_length must be one integer > 0, got -5.5"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length 16 differs from the head size 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count 4 differs from the head size 8"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"split.count": 3}, "it is one of 3 parts: merge them"),
        ({"powerinfer.sparse_threshold": 0.1}, "PowerInfer GGUF"),
        ({"tokenizer.ggml.tokens": ["a"] * 97}, "the tokenizer has 97 tokens, the embedding 96 rows"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, extra, words):
    assert words in refusal(make_gguf(tmp_path / "m.gguf", TENSORS, metadata=extra))


def test_other_architectures_types_and_powerinfer_are_named(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"x": np.ones(3)}, {}, architecture="gemma3")
    assert "general.architecture 'gemma3' is not supported: GGUF of llama, qwen2, qwen3 only" in refusal(path)
    stored = {gguf_name(name): value for name, value in TENSORS.items()}
    stored["blk.0.ffn_down_t.weight"] = stored.pop("blk.0.ffn_down.weight").T.copy()
    assert "PowerInfer GGUF" in refusal(write_gguf(tmp_path / "b.gguf", stored, metadata_of(SPEC)))
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "llama")
    for key, value in metadata_of(SPEC).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((96, 18), np.uint8), raw_dtype=KINDS["IQ4_NL"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "1 tensors have a type that is not read" in (line := refusal(tmp_path / "c.gguf"))
    assert "model.embed_tokens.weight IQ4_NL" in line


def test_what_is_no_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    assert "is missing or not a plain file" in refusal(path)
    path.mkdir()
    assert "is missing or not a plain file" in refusal(path)
    assert not is_gguf(path)
    for raw in (b"", b"GG", b"GGUF", b"hello world, this is text"):
        (file := tmp_path / "x.gguf").write_bytes(raw)
        assert is_gguf(file)
        assert "GGUF" in refusal(file)
    for version, words in ((1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")):
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        assert words in refusal(file)


# --- damage -------------------------------------------------------------------------------------------


def test_cut_short_anywhere(tmp_path, plain_gguf):
    raw = plain_gguf.read_bytes()
    header = len(read_header(plain_gguf).raw)
    path = tmp_path / "m.gguf"
    for length in [*range(0, header, 7), header - 1]:
        path.write_bytes(raw[:length])
        assert "m.gguf" in refusal(path)
    end = max(stored.offset + stored.nbytes for stored in read_header(plain_gguf).tensors.values())
    path.write_bytes(raw[: end - 1])
    assert f"expected {end} bytes, found {end - 1}" in refusal(path)


def test_a_file_cut_short_later_is_an_error_and_no_signal(tmp_path, plain_gguf):
    (path := tmp_path / "m.gguf").write_bytes(plain_gguf.read_bytes())
    stored = read_gguf(path).shard.tensors[Q]
    with path.open("r+b") as file:
        file.truncate(stored.offset + 10)
    with pytest.raises(ModelError, match="changed while the model was being read"):
        read(stored)


HUGE = 2**63
COUNTS = struct.Struct("<4sIQQ")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (COUNTS.pack(b"GGUF", 3, HUGE, 0), f"{HUGE} tensors are announced"),
        (COUNTS.pack(b"GGUF", 3, 0, HUGE), f"{HUGE} keys are announced"),
        (COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q", HUGE) + bytes(20), f"a string of {HUGE} bytes"),
        (
            COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sIQ", 1, b"a", 8, 2**40) + bytes(9),
            f"a string of {2**40} bytes",
        ),
        (COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 10, 2**61), "numbers are announced"),
        (COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**50), "strings are announced"),
        (COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 1), "unknown type 9"),
        (COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 77) + bytes(9), "unknown type 77"),
        (COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q1sIB", 1, b"\xff", 0, 1), "is not UTF-8"),
        (COUNTS.pack(b"GGUF", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"a", 0, 1), "the key 'a' appears twice"),
        (
            COUNTS.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q17sII", 17, b"general.alignment", 4, 0),
            "general.alignment must be a multiple of 8, got 0",
        ),
    ],
    ids=range(11),
)
def test_numbers_that_cannot_be_true(tmp_path, raw, words):
    (path := tmp_path / "m.gguf").write_bytes(raw)
    assert words in refusal(path)


def entry(name, shape, kind=0, offset=0):
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry(b"a", ())], "a has 0 dimensions"),
        ([entry(b"a", (1,) * 5)], "a has 5 dimensions"),
        ([entry(b"a", (0, 4))], "a has the shape (4, 0)"),
        ([entry(b"a", (2**62, 2**62))], "a has the shape"),
        ([entry(b"a", (2**39, 2**39))], "bytes, found"),
        ([entry(b"a", (4,), kind=99)], "a has the unknown type 99"),
        ([entry(b"a", (48,), kind=2)], "rows of 48, not a multiple of the type's block of 32"),
        ([entry(b"a", (4,), offset=4)], "a lies at 4, no multiple of 32"),
        ([entry(b"a", (4,)), entry(b"a", (4,), offset=32)], "the tensor 'a' appears twice"),
        ([entry(b"a", (16,)), entry(b"b", (16,), offset=32)], "b overlaps another tensor"),
        ([entry(b"a", (16,), offset=2**63)], "1 tensors lie outside: a"),
    ],
    ids=range(11),
)
def test_tensors_that_cannot_be_there(tmp_path, entries, words):
    (path := tmp_path / "m.gguf").write_bytes(COUNTS.pack(b"GGUF", 3, len(entries), 0) + b"".join(entries) + bytes(128))
    assert words in refusal(path)


def test_flipped_bytes_never_crash(tmp_path, plain_gguf):
    """Any change of a header gives a model or a ModelError."""
    raw, size = bytearray(plain_gguf.read_bytes()), len(read_header(plain_gguf).raw)
    rng, path = np.random.default_rng(1), tmp_path / "m.gguf"
    for _ in range(600):
        changed = raw.copy()
        for at in rng.integers(4, size, 3):
            changed[at] = rng.integers(256)
        path.write_bytes(changed)
        with contextlib.suppress(ModelError):
            read_gguf(path)


def test_infinite_scales_and_values_beyond_float16_are_refused(tmp_path):
    raw = np.zeros((2, 18), np.uint8)
    raw[1, :2] = (0x00, 0x7C)  # the scale of the second block: infinity
    path = tmp_path / "data"
    path.write_bytes(raw.tobytes())
    with pytest.raises(NumericalError, match="t holds NaN or infinity"):
        read(Stored("t", path, Stamp.of(path.stat()), "Q4_0", (2, 32), 0, 36))
    raw[1, :2] = (0xFF, 0x7B)  # 65504
    path.write_bytes(raw.tobytes())
    stored = Stored("t", path, Stamp.of(path.stat()), "Q4_0", (2, 32), 0, 36)
    assert read(stored).min() == -8 * 65504
    with pytest.raises(NumericalError, match="beyond float16's 65504"):
        read(stored, np.float16)


def test_a_link_or_another_suffix_is_a_gguf_too(tmp_path, plain_gguf):
    (path := tmp_path / "model.bin").symlink_to(plain_gguf)
    assert is_gguf(path)
    assert not is_gguf(tmp_path)
    assert not is_gguf(Path(__file__))
