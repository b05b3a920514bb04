"""What a mixture's config.json is taken for, what of it is refused by name, and which mixtures are not run yet."""

import json
import math
from dataclasses import replace

import pytest

from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.checkpoint.mixtures import MIXTURES as KNOWN
from dynajax.checkpoint.mixtures import NOT_YET
from dynajax.config import Activation, ExpertSpec, LatentSpec, ModelSpec, Rope, RouterSpec
from dynajax.errors import ModelError
from dynajax.testing.mixtures import MIXTURES, make_moe

COMMON = {"layers": 3, "hidden": 40, "heads": 4, "kv_heads": 4, "head_dim": 10, "vocab": 96, "max_positions": 512}
COMMON |= {"bos_id": 1, "eos_ids": (2,), "activation": Activation(kind="silu"), "norm_eps": 1e-6}
ALL, QWEN, MIXTRAL = (0, 1, 2), {"layout": "qwen_moe", "ffn": 76}, {"layout": "mixtral", "ffn": 28, "kv_heads": 2}
MIXTRAL |= {"norm_eps": 1e-5, "rope": Rope(theta=1e6)}
MIXTRAL |= {"experts": ExpertSpec(router=RouterSpec(experts=8, top_k=2, renormalise=True), width=28, layers=ALL)}
QWEN3 = {**QWEN, "kv_heads": 2, "head_dim": 16, "qk_norm": True, "rope": Rope(theta=1e6)}
QWEN3_ROUTER = RouterSpec(experts=8, top_k=3, renormalise=True)
GRANITE = {"embed_scale": 12.0, "residual_scale": 0.5, "attention_scale": 0.25, "logit_scale": 1 / 6, "tied": True}
YARN = {"kind": "yarn", "factor": 8.0, "original_positions": 64, "interleaved": True}
DEEPSEEK = {"layout": "deepseek", "ffn": 76, "head_dim": 26}
LITE_ROUTER = RouterSpec(experts=8, top_k=3, float32=True)
GROUPED = RouterSpec(experts=8, top_k=3, float32=True, groups=4, top_groups=2, scale=2.5)
SHARED = {"width": 20, "layers": (1, 2), "shared": "plain", "shared_width": 40}

EXPECTED = {
    "mixtral": MIXTRAL,
    "mixtral-window": {**MIXTRAL, "window": 64},
    "qwen2_moe": {**QWEN, "qkv_bias": True, "rope": Rope(theta=1e6)}
    | {
        "experts": ExpertSpec(
            router=RouterSpec(experts=6, top_k=4), width=20, layers=(0, 2), shared="gated", shared_width=44
        )
    },
    "qwen3_moe": {**QWEN3, "experts": ExpertSpec(router=QWEN3_ROUTER, width=24, layers=ALL)},
    "qwen3_moe-sparse": {**QWEN3, "experts": ExpertSpec(router=QWEN3_ROUTER, width=24, layers=(1,))},
    "olmoe": {"layout": "qwen_moe", "ffn": 22, "qk_norm_whole": True, "norm_eps": 1e-5}
    | {"experts": ExpertSpec(router=RouterSpec(experts=8, top_k=3), width=22, layers=ALL)},
    "granitemoe": {**GRANITE, "layout": "granitemoe", "ffn": 26, "kv_heads": 2}
    | {"experts": ExpertSpec(router=RouterSpec(experts=6, top_k=2, score="chosen"), width=26, layers=ALL)},
    "deepseek_v2-lite": {
        **DEEPSEEK,
        "experts": ExpertSpec(router=LITE_ROUTER, **SHARED),
        "latent": LatentSpec(kv_rank=18, q_rank=None, plain=14, rotary=12, value=10),
        "rope": Rope(**YARN),
        "attention_scale": 26**-0.5 * (0.1 * 0.707 * math.log(8) + 1) ** 2,
    },
    "deepseek_v2": {
        **DEEPSEEK,
        "experts": ExpertSpec(router=GROUPED, **SHARED),
        "latent": LatentSpec(kv_rank=18, q_rank=22, plain=14, rotary=12, value=10),
        "rope": Rope(**YARN, attention_factor=(0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        "attention_scale": 26**-0.5 * (0.05 * math.log(8) + 1) ** 2,
    },
}


def config_of(folder, family, **changes):
    """The folder with nothing but a config.json; `...` drops a key."""
    kept = {key: value for key, value in MIXTURES[family].config(**changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 1000
    return text


@pytest.mark.parametrize("family", MIXTURES)
def test_every_mixture_is_read_as_what_it_is(tmp_path, family):
    found, expected = read_spec(config_of(tmp_path, family)), ModelSpec(**{**COMMON, **EXPECTED[family]})
    assert (found.attention_scale or 1) == pytest.approx(expected.attention_scale or 1, rel=1e-12)
    assert replace(found, attention_scale=expected.attention_scale) == expected


def test_every_model_type_has_an_example():
    assert {family.config()["model_type"] for family in MIXTURES.values()} == KNOWN.keys()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_every_mixture_opens(tmp_path, family, merged):
    checkpoint = Checkpoint.open(make_moe(tmp_path, family, dtype="bfloat16", merged=merged))
    spec = checkpoint.spec
    assert spec.dtype == "bfloat16" and spec.experts == EXPECTED[family]["experts"]
    assert sum(stored.nbytes for stored in checkpoint.tensors.values()) == 2 * checkpoint.parameters


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": 8}, {"units": 8}),  # as transformers 5 saves it
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, {"unit_layers": (1,)}),
        ("qwen3_moe", {"mlp_only_layers": ...}, {"unit_layers": (0, 1, 2)}),
        ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 3}, {"unit_layers": (2,)}),
        ("qwen3_moe", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ("qwen2_moe", {"qkv_bias": False}, {"qkv_bias": False, "o_bias": False}),
        ("qwen2_moe", {"sliding_window": 0, "layer_types": ["full_attention"] * 3}, {"window": None}),
        ("olmoe", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ("granitemoe", {"tie_word_embeddings": ...}, {"tied": False}),
        ("deepseek_v2-lite", {"first_k_dense_replace": 0}, {"unit_layers": (0, 1, 2)}),
        ("deepseek_v2-lite", {"head_dim": 12, "qk_head_dim": 26}, {"head_dim": 26}),  # as transformers 5 saves it
        ("deepseek_v2-lite", {"rope_scaling": None}, {"attention_scale": 26**-0.5, "rope": Rope(interleaved=True)}),
        ("deepseek_v2-lite", {"norm_topk_prob": ..., "moe_layer_freq": ..., "scoring_func": ...}, {}),
        ("deepseek_v2-lite", {"qk_nope_head_dim": 13}, {"head_dim": 25}),  # only the rotated part is of pairs
        ("mixtral", {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {}),
    ],
)
def test_variants(tmp_path, family, changes, expected):
    spec = read_spec(config_of(tmp_path, family, **changes))
    assert {name: getattr(spec, name) for name in expected} == expected


def test_deepseek_does_not_renormalise_and_says_so(tmp_path, caplog):
    spec = read_spec(config_of(tmp_path, "deepseek_v2-lite", norm_topk_prob=True))
    assert spec.experts.router == LITE_ROUTER
    assert "norm_topk_prob true is ignored" in caplog.text


@pytest.mark.parametrize("family", [name for name in MIXTURES if "-" not in name])
def test_numbers_of_the_mixture_must_be_in_the_file(tmp_path, family):
    """Class defaults are those of no published model: OLMoE's experts are half as wide as its class says."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    needed = ["num_experts_per_tok", "rope_theta", *(name for name in counts if name in MIXTURES[family].base)]
    needed += {
        "mixtral": ["intermediate_size", "sliding_window"],
        "qwen2_moe": ["moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"],
        "qwen3_moe": ["moe_intermediate_size", "decoder_sparse_step"],
        "olmoe": ["intermediate_size"],
        "granitemoe": ["attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"],
        "deepseek_v2": [
            *("moe_intermediate_size", "n_shared_experts", "routed_scaling_factor", "first_k_dense_replace"),
            *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("topk_method", "n_group", "topk_group"),
        ],
    }[family]
    needed += ["norm_topk_prob"] if family in ("qwen2_moe", "qwen3_moe", "olmoe") else []
    for name in needed:
        text = refusal(config_of(tmp_path, family, **{name: ...}))
        assert name in text and "nothing" in text, name


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 must be at most the number of experts 8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be an integer from 1"),
        ("mixtral", {"num_local_experts": True}, "num_local_experts must be an integer from 1"),
        ("mixtral", {"sliding_window": "64"}, "sliding_window must be an integer"),
        ("mixtral", {"attention_bias": True}, "attention_bias True is not implemented"),
        ("mixtral", {"num_local_experts": 2**14, "num_hidden_layers": 9}, "more than 131072 experts together"),
        ("mixtral", {"architectures": ["MistralForCausalLM"]}, "architectures ['MistralForCausalLM']"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "no layer has experts"),
        ("qwen3_moe", {"decoder_sparse_step": 4}, "no layer has experts"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers, got 1"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window true is not implemented"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window true is not implemented"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "full_attention only"),
        ("qwen2_moe", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not implemented"),
        ("granitemoe", {"attention_multiplier": 0}, "attention_multiplier must be a number > 0, got 0"),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act 'gelu': not supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not implemented: softmax only"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not implemented: greedy and"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not implemented: 1 only"),
        ("deepseek_v2", {"n_group": 3}, "topk_group 2 of n_group 3 groups cannot be had of 8 experts"),
        ("deepseek_v2", {"topk_group": 5}, "topk_group 5 of n_group 4 groups cannot be had"),
        ("deepseek_v2", {"topk_group": 1}, "topk_group 1 groups of 2 experts hold fewer than 3"),
        ("deepseek_v2", {"qk_rope_head_dim": 11}, "qk_rope_head_dim must be even, got 11"),
        ("deepseek_v2", {"head_dim": 64}, "head_dim 64 must be qk_rope_head_dim 12"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads 2 must be num_attention_heads 4"),
        ("deepseek_v2", {"first_k_dense_replace": 3}, "no layer has experts"),
        ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer >= 0, got -1"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias True is not implemented"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not implemented"),
    ],
)
def test_what_a_mixture_may_not_ask_for(tmp_path, family, changes, named):
    assert named in refusal(config_of(tmp_path, family, **changes))


@pytest.mark.parametrize("kind", NOT_YET)
def test_mixtures_that_are_known_and_not_run(tmp_path, kind):
    text = refusal(config_of(tmp_path, "mixtral", model_type=kind, architectures=["Any"]))
    assert f"model_type '{kind}' is a mixture of experts that this version does not run yet ({NOT_YET[kind]})" in text
    assert text.endswith("it runs mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, deepseek_v2, switch_transformers")
    assert kind not in KNOWN


def test_a_dense_family_has_no_experts(tmp_path):
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert "num_local_experts 8 is not implemented" in refusal(config_of(tmp_path, "mixtral", **changes))


def test_a_fingerprint_covers_the_routing(tmp_path):
    def fingerprint(name, **changes):
        return Checkpoint.open(make_moe(tmp_path / name, "qwen3_moe", **changes)).fingerprint()

    found = {fingerprint("plain"), fingerprint("k", num_experts_per_tok=2), fingerprint("norm", norm_topk_prob=False)}
    assert len(found) == 3
    assert fingerprint("same", max_position_embeddings=256) in found
