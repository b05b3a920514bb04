"""config.json: every spelling that is understood, and one line for everything that is not."""

import json
import math
import tracemalloc
from dataclasses import replace

import pytest

from dynajax.checkpoint import read_spec
from dynajax.config import Activation, Rope
from dynajax.errors import ModelError
from dynajax.testing import TINY, TINY_FATRELU, TINY_GQA, TINY_SILU, TINY_TIED, TINY_WIDE_HEADS, hf_config


def write_config(folder, changes=None, spec=TINY, rope_spelling="old"):
    config = {**hf_config(spec, rope_spelling, "float32"), **(changes or {})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(folder):
    """The one line with which the folder is refused."""
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 4000
    assert caught.value.exit_code == 3
    return text


@pytest.mark.parametrize("rope_spelling", ["old", "new", "absent"])
@pytest.mark.parametrize("spec", [TINY, TINY_SILU, TINY_FATRELU, TINY_GQA, TINY_WIDE_HEADS, TINY_TIED])
def test_what_was_written_is_read(tmp_path, spec, rope_spelling):
    assert read_spec(write_config(tmp_path, spec=spec, rope_spelling=rope_spelling)) == spec


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "swish"}, {"activation": Activation(kind="silu")}),
        (
            {"hidden_act": "fatrelu", "hidden_act_param": 0.03},
            {"activation": Activation(kind="fatrelu", threshold=0.03)},
        ),
        ({"hidden_act": "relu", "hidden_act_param": 0.0}, {}),
        ({"num_key_value_heads": None}, {}),
        ({"rope_theta": 5e5}, {"rope": Rope(theta=5e5)}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            {"rope": Rope(theta=5e5)},
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, {}),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}}, {"rope": Rope(theta=7.0)}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"mlp_bias": True}, {"ffn_bias": True}),
        ({"rope_scaling": {"type": "default"}}, {}),
        ({"tie_word_embeddings": None}, {}),
        ({"eos_token_id": [2, 3]}, {"eos_ids": (2, 3)}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_ids": (), "bos_id": None}),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "float16", "torch_dtype": "float32"}, {"dtype": "float16"}),
        ({"torch_dtype": None}, {"dtype": "float32"}),
        ({"pretraining_tp": 2, "use_cache": True, "auto_map": {"AutoConfig": "evil.Config"}}, {}),
        ({"layer_types": ["full_attention"] * 2, "scale_emb": 1.0, "partial_rotary_factor": 1.0}, {}),
        ({"architectures": None}, {}),
    ],
)
def test_spellings(tmp_path, changes, expected):
    assert read_spec(write_config(tmp_path, changes)) == replace(TINY, **expected)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, Rope(kind="linear", factor=4.0)),
        ({"rope_type": "linear", "type": "linear", "factor": 4}, Rope(kind="linear", factor=4.0)),
        (LLAMA3, Rope(kind="llama3", factor=8.0, original_positions=256)),
        (
            LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 3.0},
            Rope(kind="llama3", factor=8.0, original_positions=256, low_freq=2.0, high_freq=3.0),
        ),
        (YARN, Rope(kind="yarn", factor=8.0, original_positions=64, attention_factor=0.1 * math.log(8) + 1)),
        (
            {"type": "yarn", "factor": 0.5},  # of which the trained context is the model's, and nothing grows
            Rope(kind="yarn", factor=0.5, original_positions=512),
        ),
        (
            YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2.0, "truncate": False, "finetuned": True},
            Rope(
                kind="yarn",
                factor=8.0,
                original_positions=64,
                attention_factor=1.5,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
            ),
        ),
        (
            YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
            Rope(
                kind="yarn",
                factor=8.0,
                original_positions=64,
                attention_factor=(0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
            ),
        ),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_stretched_contexts(tmp_path, name, table, expected):
    assert read_spec(write_config(tmp_path, {name: table})) == replace(TINY, rope=expected)


def test_the_two_tables_may_say_the_same_or_one_of_them_nothing(tmp_path):
    linear = {"rope_type": "linear", "factor": 4.0}
    for scaling in (linear, {"rope_type": "default"}, None):
        changes = {"rope_theta": None, "rope_parameters": linear | {"rope_theta": 7.0}, "rope_scaling": scaling}
        assert read_spec(write_config(tmp_path, changes)).rope == Rope(theta=7.0, kind="linear", factor=4.0)


def test_the_original_context_beside_the_table(tmp_path):
    table = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    changes = {"rope_scaling": table, "original_max_position_embeddings": 128}
    assert read_spec(write_config(tmp_path, changes)).rope.original_positions == 128


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, ["model_type 'gemma'", "llama, sparsellama"]),
        ({"model_type": ["llama"]}, ["model_type ['llama']"]),
        ({"model_type": "mistral"}, ["LlamaForCausalLM", "MistralForCausalLM"]),
        ({"model_type": None}, ["model_type nothing"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "relu, fatrelu, silu, swish"]),
        ({"hidden_act": "shiftrelu", "hidden_act_param": 0.1}, ["'shiftrelu'", "shifted ReLU is not implemented"]),
        ({"hidden_act": None}, ["hidden_act nothing"]),
        ({"hidden_act": ["relu"]}, ["hidden_act ['relu']"]),
        ({"hidden_act": "fatrelu"}, ["hidden_act_param must be a number >= 0, got nothing"]),
        ({"hidden_act": "fatrelu", "hidden_act_param": -0.01}, ["hidden_act_param", "-0.01"]),
        ({"hidden_act": "relu", "hidden_act_param": 0.01}, ["hidden_act_param 0.01", "is it fatrelu?"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling of type 'dynamic'"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, ["rope_scaling of type 'longrope'"]),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, ["rope_scaling of type ['linear']"]),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, ["rope_scaling of type 'yarn'"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling must be an object or null"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor must be a number > 0, got nothing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor must be a number > 0, got 0"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, ["rope_scaling.mrope_section"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters.factor must be a number > 0, got nothing"]),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
            ["rope_scaling.original_max_position_embeddings must be an integer >= 1, got None"],
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, ["rope_scaling.low_freq_factor"]),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["high_freq_factor must be above low_freq_factor"]),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            ["rope_parameters and rope_scaling contradict each other"],
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, ["two different rotary bases", "500000.0"]),
        ({"rope_theta": float("nan")}, ["rope_theta must be a number > 0"]),
        ({"rope_theta": "10000"}, ["rope_theta", "'10000'"]),
        ({"attention_bias": 1}, ["attention_bias must be true or false, got 1"]),
        ({"mlp_bias": "yes"}, ["mlp_bias"]),
        ({"sliding_window": 4096}, ["sliding_window 4096"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"scale_emb": 12, "scale_depth": 1.4}, ["scale_emb 12", "scale_depth 1.4"]),
        ({"thresholds": [0.03, 0.04]}, ["thresholds"]),
        ({"num_local_experts": 8}, ["num_local_experts 8"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps must be a number > 0, got nothing"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "float32, float16, bfloat16"]),
        ({"eos_token_id": 96}, ["eos_token_id", "vocab_size 96"]),
        ({"bos_token_id": -1}, ["bos_token_id", "-1"]),
        ({"eos_token_id": True}, ["eos_token_id"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, named):
    text = refusal(write_config(tmp_path, changes))
    for word in named:
        assert word in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "32"}, "hidden_size must be an integer from 1 to 131072, got '32'"),
        ({"hidden_size": None}, "hidden_size must be an integer from 1 to 131072, got nothing"),
        ({"hidden_size": True}, "got True"),
        ({"num_hidden_layers": -4}, "num_hidden_layers"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"vocab_size": 1e12}, "vocab_size"),
        ({"num_attention_heads": 5}, "hidden_size 32 must be a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "even"),
        ({"max_position_embeddings": 2.5}, "max_position_embeddings"),
    ],
)
def test_sizes_that_lie(tmp_path, changes, named):
    write_config(tmp_path, changes)
    tracemalloc.start()
    text = refusal(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert named in text
    assert peak < 2**20


def test_all_problems_are_reported_at_once(tmp_path):
    changes = {"hidden_size": "32", "vocab_size": 10**12, "hidden_act": "gelu", "use_bias": True, "rope_theta": -1}
    text = refusal(write_config(tmp_path, changes))
    for name in changes:
        assert name in text
    assert "token id" not in text  # the ids are fine: only the vocabulary lies


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 150_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 6000 + b"}", "not valid JSON"),
        (b'{"a": "' + b"x" * 2**20 + b'"}', "more than the 1048576 such a file may have"),
        (b'{"model_type": "a\\nb\\u001b[31m"}', "model_type"),
        (b'{"architectures": [' + b'"evil",' * 9000 + b'"x"]}', "model_type nothing"),
        (b'{"model_type": "llama", "architectures": [' + b'"evil",' * 9000 + b'"x"]}', "architectures"),
    ],
)
def test_files_that_are_no_config(tmp_path, raw, named):
    (tmp_path / "config.json").write_bytes(raw)
    assert named in refusal(tmp_path)


@pytest.mark.parametrize("depth", [100, 900, 5000])
def test_a_deep_value_is_refused_not_printed(tmp_path, depth):
    (tmp_path / "config.json").write_text('{"quantization_config": ' + "[" * depth + "]" * depth + "}")
    refusal(tmp_path)


def test_missing_or_stray_config(tmp_path):
    assert "config.json is missing" in refusal(tmp_path)
    (tmp_path / "config.json").symlink_to("/etc/passwd")
    assert "leads outside the model folder" in refusal(tmp_path)
