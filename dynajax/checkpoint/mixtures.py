"""The families that are mixtures of experts, and those known by name that this version does not run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from dynajax.checkpoint.family import QWEN_READS, Family, Traits, biases, no_sliding_window
from dynajax.checkpoint.fields import Fields, found
from dynajax.checkpoint.rope import has_base, latent_scale, read_rope
from dynajax.checkpoint.wording import quoted
from dynajax.config import ExpertSpec, LatentSpec, RouterSpec

log = logging.getLogger(__name__)

MOST_EXPERTS = 2**14
MOST_TENSORS = 2**17  # experts of all layers together: a config must not cost memory
Layers = tuple[int, ...]


def _experts(fields: Fields, width_name: str, layers: Layers, shared: dict[str, Any], **router: Any) -> Traits:
    """The mixture: every number of it is in the file. shared: fields of ExpertSpec, router: of RouterSpec."""
    before = len(fields.problems)
    if not has_base(fields):
        fields.complain("rope_theta must be a number > 0, got nothing")  # its default is not the same for all of these
    # transformers 5 saves Qwen3's under Mixtral's name
    newer = fields.get("num_experts") is None and fields.get("num_local_experts") is not None
    count = fields.integer("num_local_experts" if newer else "num_experts", MOST_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", MOST_EXPERTS)
    width = fields.integer(width_name, 2**20)
    if len(fields.problems) == before:
        if top_k > count:
            fields.complain(f"num_experts_per_tok {top_k} must be at most the number of experts {count}")
        if not layers:
            fields.complain("no layer has experts")
        if len(layers) * count > MOST_TENSORS:
            fields.complain(f"{len(layers)} layers of {count} experts are more than {MOST_TENSORS} experts together")
    if fields.problems:
        return {}
    spec = RouterSpec(experts=count, top_k=top_k, **router)
    return {"experts": ExpertSpec(router=spec, width=width, layers=layers, **shared)}


def _flag(fields: Fields, name: str) -> bool:
    """true or false, which must be in the file."""
    if fields.get(name) is None:
        fields.complain(f"{name} must be true or false, got nothing")
    return fields.flag(name, False)


def _every_layer(fields: Fields) -> Layers:
    return tuple(range(fields.integer("num_hidden_layers", 2**10)))


def _sparse_layers(fields: Fields) -> Layers:
    """Qwen: every `decoder_sparse_step`-th layer, the first one not among them, but those of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 2**10)
    only = fields.get("mlp_only_layers")
    only = [] if only is None else only
    if not isinstance(only, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in only):
        fields.complain(f"mlp_only_layers must be a list of layers, got {quoted(only)}")
        only = []
    return tuple(i for i in _every_layer(fields) if i not in only and (i + 1) % step == 0)


def _mixtral(fields: Fields) -> Traits:
    """The window's default differs between versions of the class: the file must say it."""
    if "sliding_window" not in fields.config:
        fields.complain("sliding_window must be an integer or null, got nothing")
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window", 2**24)
    experts = _experts(fields, "intermediate_size", _every_layer(fields), {}, renormalise=True)
    return {"window": window, **experts}


def _qwen2_moe(fields: Fields) -> Traits:
    """Files without `qkv_bias` are of a time when there was no choice."""
    no_sliding_window(fields)
    shared = {"shared": "gated", "shared_width": fields.integer("shared_expert_intermediate_size", 2**20)}
    renormalise = _flag(fields, "norm_topk_prob")
    experts = _experts(fields, "moe_intermediate_size", _sparse_layers(fields), shared, renormalise=renormalise)
    return {"qkv_bias": fields.flag("qkv_bias", True), **experts}


def _qwen3_moe(fields: Fields) -> Traits:
    no_sliding_window(fields)
    renormalise = _flag(fields, "norm_topk_prob")
    experts = _experts(fields, "moe_intermediate_size", _sparse_layers(fields), {}, renormalise=renormalise)
    return biases(fields) | {"qk_norm": True, **experts}


def _olmoe(fields: Fields) -> Traits:
    """Queries and keys are normed before they are cut into heads."""
    renormalise = _flag(fields, "norm_topk_prob")
    experts = _experts(fields, "intermediate_size", _every_layer(fields), {}, renormalise=renormalise)
    return biases(fields) | {"qk_norm_whole": True, **experts}


def _granitemoe(fields: Fields) -> Traits:
    """Embeddings, branches, scores of attention and logits have multipliers; a softmax over the chosen logits."""

    def multiplier(name: str) -> float:
        return fields.number(name, fields.get(name), positive=True)

    return biases(fields) | {
        "embed_scale": multiplier("embedding_multiplier"),
        "residual_scale": multiplier("residual_multiplier"),
        "attention_scale": multiplier("attention_multiplier"),
        "logit_scale": 1 / multiplier("logits_scaling"),
        **_experts(fields, "intermediate_size", _every_layer(fields), {}, score="chosen"),
    }


def _deepseek_v2(fields: Fields) -> Traits:
    """DeepSeek-V2 as transformers 5 computes it: it never renormalises, whatever `norm_topk_prob` says. (The authors'
    own code does, and leaves the scale out then; the files they published all say false.)"""
    if fields.flag("norm_topk_prob", False):
        log.warning("norm_topk_prob true is ignored: transformers does not renormalise DeepSeek-V2's weights either")
    if fields.get("scoring_func") not in (None, "softmax"):
        fields.complain(f"scoring_func {quoted(fields.get('scoring_func'))} is not implemented: softmax only")
    if fields.get("moe_layer_freq") not in (None, 1):
        fields.complain(f"moe_layer_freq {quoted(fields.get('moe_layer_freq'))} is not implemented: 1 only")
    width, count = (fields.integer(name, 2**20) for name in ("moe_intermediate_size", "n_shared_experts"))
    shared = {"shared": "plain", "shared_width": width * count}
    scale = fields.number("routed_scaling_factor", fields.get("routed_scaling_factor"), positive=True)
    groups = _groups(fields)
    experts = _experts(
        fields, "moe_intermediate_size", _later_layers(fields), shared, scale=scale, float32=True, **groups
    )
    return {**_latents(fields), **experts}


def _later_layers(fields: Fields) -> Layers:
    """All from `first_k_dense_replace` on."""
    first = fields.get("first_k_dense_replace")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        fields.complain(f"first_k_dense_replace must be an integer >= 0, got {found(first)}")
        first = 0
    return _every_layer(fields)[first:]


def _groups(fields: Fields) -> dict[str, Any]:
    """group_limited_greedy: the best experts of the best groups, a group's rank being its best expert's."""
    method = fields.get("topk_method")
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        fields.complain(f"topk_method {found(method)} is not implemented: greedy and group_limited_greedy only")
        return {}
    before = len(fields.problems)
    groups, kept = fields.integer("n_group", MOST_EXPERTS), fields.integer("topk_group", MOST_EXPERTS)
    count, top_k = fields.integer("num_experts", MOST_EXPERTS), fields.integer("num_experts_per_tok", MOST_EXPERTS)
    if len(fields.problems) == before:
        if count % groups or kept > groups:
            fields.complain(f"topk_group {kept} of n_group {groups} groups cannot be had of {count} experts")
        elif kept * (count // groups) < top_k:
            fields.complain(f"topk_group {kept} groups of {count // groups} experts hold fewer than {top_k}")
    return {} if len(fields.problems) > before else {"groups": groups, "top_groups": kept}


def _latents(fields: Fields) -> Traits:
    """Multi-head latent attention. Its rotary pairs lie side by side, and yarn's mscale_all_dim scales the scores."""
    before = len(fields.problems)
    if "q_lora_rank" not in fields.config:
        fields.complain("q_lora_rank must be an integer or null, got nothing")
    heads = fields.integer("num_attention_heads", 2**12)
    if fields.integer("num_key_value_heads", 2**12, default=heads) != heads:
        fields.complain(f"num_key_value_heads {fields.get('num_key_value_heads')} must be num_attention_heads {heads}")
    rotary = fields.integer("qk_rope_head_dim", 2**12)
    if rotary % 2:
        fields.complain(f"qk_rope_head_dim must be even, got {rotary}")
    if fields.get("head_dim") not in (None, rotary):  # transformers saves it, and means the rotated part
        fields.complain(f"head_dim {quoted(fields.get('head_dim'))} must be qk_rope_head_dim {rotary}")
    latent: dict[str, Any] = {
        "kv_rank": fields.integer("kv_lora_rank", 2**17),
        "q_rank": None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank", 2**17),
        "plain": fields.integer("qk_nope_head_dim", 2**12),
        "value": fields.integer("v_head_dim", 2**12),
    }
    rope, scale = read_rope(fields), latent_scale(fields)
    if len(fields.problems) > before:
        return {}
    spec = LatentSpec(rotary=rotary, **latent)
    size = spec.plain + spec.rotary
    return {
        "latent": spec,
        "head_dim": size,
        "attention_scale": size**-0.5 * scale,
        "rope": replace(rope, interleaved=True),
    }


_EXPERTS = {"num_experts": "num_local_experts"}
_COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        architectures=("MixtralForCausalLM",),
        layout="mixtral",
        rename=_EXPERTS,
        reads=_COUNTS | {"sliding_window"},
        traits=_mixtral,
    ),
    "qwen2_moe": Family(
        architectures=("Qwen2MoeForCausalLM",),
        layout="qwen_moe",
        reads=_COUNTS | QWEN_READS | {"qkv_bias"},
        traits=_qwen2_moe,
    ),
    "qwen3_moe": Family(
        architectures=("Qwen3MoeForCausalLM",),
        layout="qwen_moe",
        reads=_COUNTS | QWEN_READS | {"attention_bias"},
        traits=_qwen3_moe,
    ),
    "olmoe": Family(
        architectures=("OlmoeForCausalLM",),
        layout="qwen_moe",
        reads=_COUNTS | {"attention_bias"},
        traits=_olmoe,
    ),
    "granitemoe": Family(
        architectures=("GraniteMoeForCausalLM",),
        layout="granitemoe",
        rename=_EXPERTS,
        reads=_COUNTS
        | {"attention_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
        traits=_granitemoe,
    ),
    "deepseek_v2": Family(
        architectures=("DeepseekV2ForCausalLM",),
        layout="deepseek",
        rename={"num_experts": "n_routed_experts"},
        reads=_COUNTS,
        traits=_deepseek_v2,
    ),
}

# model_type -> what of it this version does not compute
NOT_YET: dict[str, str] = {
    "arctic": "experts beside a dense FFN",
    "dbrx": "layer norms without biases and fused experts of its own",
    "deepseek": "the first DeepSeek's tensor names",
    "deepseek_v3": "sigmoid scores with a selection bias in groups",
    "deepseek_v32": "sparse attention",
    "dots1": "sigmoid scores with a selection bias",
    "ernie4_5_moe": "a selection bias and a floor under the sum of weights",
    "flex_olmo": "norms behind the branches",
    "glm4_moe": "sigmoid scores with a selection bias, partial rotary positions",
    "glm4_moe_lite": "sigmoid scores with a selection bias",
    "gpt_oss": "attention sinks, clamped experts with biases, MXFP4 weights",
    "granitemoehybrid": "state-space layers",
    "granitemoeshared": "a shared expert beside fused ones",
    "hunyuan_v1_moe": "norms behind rotary positions",
    "jamba": "state-space layers",
    "kimi_k2": "sigmoid scores with a selection bias in groups",
    "lfm2_moe": "convolution layers",
    "llama4": "weights applied to the experts' input, chunked attention",
    "llama4_text": "weights applied to the experts' input, chunked attention",
    "longcat_flash": "experts that compute nothing",
    "minimax": "linear attention",
    "minimax_m2": "sigmoid scores with a selection bias, partial rotary positions",
    "nllb-moe": "an encoder and a decoder",
    "phimoe": "sparsemixer routing, layer norms and biases",
    "qwen3_5_moe": "linear attention",
    "qwen3_next": "linear attention",
    "smallthinker": "a router before attention",
}
