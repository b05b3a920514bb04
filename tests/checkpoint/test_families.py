"""What each family's config.json is taken for, and what of it is refused by name."""

import json

import pytest

from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.checkpoint.families import FAMILIES as KNOWN
from dynajax.checkpoint.mixtures import MIXTURES
from dynajax.checkpoint.switch import SWITCH
from dynajax.config import Activation, ModelSpec, Rope
from dynajax.errors import ModelError
from dynajax.testing.families import FAMILIES, write

SIZES = {"layers": 3, "hidden": 32, "ffn": 80, "heads": 4, "kv_heads": 4, "head_dim": 8, "vocab": 96}
COMMON = {**SIZES, "max_positions": 512, "bos_id": 1, "eos_ids": (2,)}
FATRELU = Activation(kind="fatrelu", threshold=0.03)
DRELU, SILU = Activation(kind="drelu"), Activation(kind="silu")
LAYER_NORM = {"gated": False, "norm": "layer", "tied": True}
OPT = {**LAYER_NORM, "layout": "opt", "rope": None, "qkv_bias": True, "o_bias": True, "ffn_bias": True}
FALCON = {**LAYER_NORM, "layout": "falcon", "parallel": True, "ffn": 128, "max_positions": 2048}
MINICPM = {"activation": FATRELU, "kv_heads": 2, "tied": True, "embed_scale": 12.0, "logit_scale": 0.25}
MINICPM |= {"residual_scale": 1.4 / 3**0.5}
MISTRAL = {"kv_heads": 2, "window": 64}
LLAMA3 = Rope(theta=500_000.0, kind="llama3", factor=8.0, original_positions=256)

EXPECTED = {
    "llama": {},
    "llama-biases": {"activation": SILU, "kv_heads": 2, "rope": Rope(theta=500_000.0)}
    | {"qkv_bias": True, "o_bias": True, "ffn_bias": True},
    "llama-linear": {"rope": Rope(kind="linear", factor=4.0)},
    "llama-llama3": {"activation": SILU, "kv_heads": 2, "rope": LLAMA3},
    "llama-yarn": {
        "hidden": 48,
        "head_dim": 12,
        "rope": Rope(kind="yarn", factor=8.0, original_positions=64, attention_factor=1.2079441541679836),
    },
    "sparsellama": {"activation": Activation(kind="fatrelu", threshold=0.01)},
    "sparselm": {"rope": Rope(theta=100_000.0), "tied": True},
    "mistral": {**MISTRAL, "activation": SILU},
    "bamboo": {**MISTRAL, "activation": DRELU},
    "turbosparse": {**MISTRAL, "activation": DRELU},
    "minicpm": MINICPM,
    "minicpm-untyped": MINICPM,
    "minicpm-llama": {"activation": FATRELU, "kv_heads": 2},
    "qwen2": {"activation": SILU, "kv_heads": 2, "norm_eps": 1e-6, "rope": Rope(theta=1e6), "qkv_bias": True},
    "qwen3": {"activation": SILU, "kv_heads": 2, "norm_eps": 1e-6, "rope": Rope(theta=1e6)}
    | {"head_dim": 16, "qk_norm": True},
    "opt": {**OPT, "bos_id": 2},
    "opt-bare": {**OPT, "bos_id": 2},
    "falcon-40b": {**FALCON, "kv_heads": 2, "bos_id": 11, "eos_ids": (11,)},
    "falcon-7b": {**FALCON, "kv_heads": 1, "shared_norm": True, "bos_id": 11, "eos_ids": (11,)},
}


def config_of(folder, family, **changes):
    """The folder with nothing but a config.json; `...` drops a key."""
    config = FAMILIES[family].config(**changes)
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 4000
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_what_it_is(tmp_path, family):
    assert read_spec(config_of(tmp_path, family)) == ModelSpec(**{**COMMON, **EXPECTED[family]})


def test_every_model_type_has_a_published_example():
    examples = {family.config().get("model_type", "minicpm") for family in FAMILIES.values()}
    assert examples == KNOWN.keys() - MIXTURES.keys() - SWITCH.keys()


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mistral", {"sliding_window": None}, {"window": None}),
        ("mistral", {"sliding_window": ...}, {"window": 4096}),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, {"window": 4096}),
        ("minicpm", {"tie_word_embeddings": False}, {"tied": False}),
        ("minicpm", {"hidden_act": "silu", "hidden_act_param": ...}, {"activation": SILU}),
        ("sparselm", {"hidden_act": "relu"}, {"activation": Activation()}),
        ("qwen2", {"use_sliding_window": ..., "sliding_window": ...}, {"window": None}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ("opt", {"ffn_dim": 64}, {"ffn": 64}),
        ("opt", {"tie_word_embeddings": True, "enable_bias": True}, {"tied": True}),
        ("opt", {"word_embed_proj_dim": ...}, {}),
        ("falcon-40b", {"ffn_hidden_size": 64}, {"ffn": 64}),
        ("falcon-40b", {"max_position_embeddings": 4096}, {"max_positions": 4096}),
        ("falcon-40b", {"num_kv_heads": ...}, {"kv_heads": 4}),
        ("falcon-40b", {"num_ln_in_parallel_attn": 2}, {"shared_norm": False}),
        ("falcon-40b", {"num_ln_in_parallel_attn": 1}, {"shared_norm": True}),
        ("falcon-7b", {"num_kv_heads": 71}, {"kv_heads": 1}),
        ("falcon-7b", {"rope_theta": 500.0}, {"rope": Rope(theta=500.0)}),
    ],
)
def test_variants(tmp_path, family, changes, expected):
    spec = read_spec(config_of(tmp_path, family, **changes))
    assert {name: getattr(spec, name) for name in expected} == expected


LLAMA_CLASS = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not implemented"),
        ("opt", {"enable_bias": False}, "enable_bias False is not implemented"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False is not implemented"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not implemented"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16 is not implemented"),
        ("opt", {"activation_function": "gelu"}, "activation_function 'gelu': not supported"),
        ("opt", {"ffn_dim": None}, "ffn_dim must be an integer"),
        ("falcon-40b", {"alibi": True}, "alibi true is not implemented"),
        ("falcon-7b", {"bias": True}, "bias true is not implemented"),
        ("falcon-7b", {"multi_query": False}, "only parallel_attn and multi_query true"),
        ("falcon-7b", {"parallel_attn": False}, "only parallel_attn and multi_query true"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 is not implemented"),
        ("falcon-40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3 is not implemented"),
        ("falcon-40b", {"activation": "gelu"}, "activation 'gelu': not supported"),
        ("falcon-40b", {"layer_norm_epsilon": None}, "layer_norm_epsilon must be a number > 0, got nothing"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window true is not implemented"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window true is not implemented"),
        ("qwen2", {"attention_bias": True}, "attention_bias True is not implemented"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic'"),
        ("qwen3", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope'"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not implemented"),
        ("falcon-40b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic'"),
        ("minicpm", {"scale_depth": ...}, "scale_depth must be a number > 0, got nothing"),
        ("minicpm", {"scale_emb": ...}, "scale_emb must be a number > 0, got nothing"),
        ("minicpm", {"dim_model_base": ...}, "dim_model_base must be a number > 0, got nothing"),
        ("minicpm", {"scale_depth": float("inf")}, "scale_depth must be a number > 0"),
        ("minicpm", {"num_experts": 8}, "num_experts 8 is not implemented"),
        ("bamboo", {"hidden_act": "silu"}, "hidden_act 'silu': not supported; this version runs relu"),
        ("sparselm", {"hidden_act": "gelu"}, "hidden_act 'gelu': not supported; this version runs silu, relu"),
        ("sparsellama", {"hidden_act": "shiftrelu"}, "shifted ReLU is not implemented"),
        ("llama", {"sliding_window": 64}, "sliding_window 64 is not implemented"),
        ("llama", {"scale_emb": 12}, "scale_emb 12 is not implemented"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer"),
        ("mistral", {"attention_bias": True}, "attention_bias True is not implemented"),
        ("opt", LLAMA_CLASS, "architectures ['LlamaForCausalLM'] is not supported"),
        ("falcon-40b", LLAMA_CLASS, "architectures ['LlamaForCausalLM'] is not supported"),
        ("minicpm", {"architectures": ["MiniCPMForCausalLM", "LlamaForCausalLM"]}, "is not supported"),
    ],
)
def test_what_a_family_may_not_ask_for(tmp_path, family, changes, named):
    assert named in refusal(config_of(tmp_path, family, **changes))


@pytest.mark.parametrize(
    ("architectures", "kind"),
    [
        (["MiniCPMForCausalLM"], True),
        (["SparseLlamaForCausalLM"], False),  # of two families
        (["MiniCPMForCausalLM", "LlamaForCausalLM"], False),
        (["MiniCPM3ForCausalLM"], False),
        ("MiniCPMForCausalLM", False),
        ([], False),
        (None, False),
    ],
)
def test_a_config_without_a_type_is_known_by_its_class_alone(tmp_path, architectures, kind):
    config_of(tmp_path, "minicpm-untyped", architectures=architectures)
    if kind:
        assert read_spec(tmp_path).embed_scale == 12.0
    else:
        assert "model_type nothing is not supported: this version runs llama, " in refusal(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens(tmp_path, family):
    folder = write(tmp_path, family, dtype="bfloat16")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.spec == ModelSpec(**{**COMMON, **EXPECTED[family]}, dtype="bfloat16")
    assert sum(stored.nbytes for stored in checkpoint.tensors.values()) == 2 * checkpoint.parameters


def test_a_fingerprint_covers_what_is_computed(tmp_path):
    """The same weights under another config are another model; the context and the type are no part of it."""

    def fingerprint(name, family, **changes):
        return Checkpoint.open(write(tmp_path / name, family, **changes)).fingerprint()

    plain = fingerprint("plain", "llama")
    same = [{"max_position_embeddings": 256}, {"eos_token_id": 3}, {"rope_theta": 10000.0}, {"use_cache": False}]
    assert {fingerprint(f"same{i}", "llama", **changes) for i, changes in enumerate(same)} == {plain}
    others = [
        {"rope_theta": 9000.0},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "silu"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ]
    windows = [{}, {"sliding_window": 63}, {"sliding_window": None}]
    found = [fingerprint(f"other{i}", "llama", **changes) for i, changes in enumerate(others)]
    found += [fingerprint(f"window{i}", "mistral", **changes) for i, changes in enumerate(windows)]
    assert len({plain, *found}) == 1 + len(found)
