"""The tensors of each layout: their names, and their shapes in letters. Data only.

Letters: V vocabulary, D hidden, F FFN neurons, H head size, Q = heads x H, K = kv_heads x H, Z = Q + 2 K (queries,
keys and values in one matrix), S = learned positions with the two rows that nothing uses. Mixtures of experts: E
experts, W an expert's neurons, U = 2 W (gate and up in one matrix), X the shared expert's neurons, I = 1. Latents: A
their size for queries, C that for keys and values, B = C + the rotated key, G what C becomes (keys and values of all
heads), Y the values of all heads. Relative positions: R buckets, N heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynajax.config import Layout


@dataclass(frozen=True, slots=True)
class Place:
    """How a part is stored: its name below the model's prefix, and its shape in letters."""

    name: str
    letters: str
    merged: str | None = None  # the name in files that hold the experts as transformers 5 does in memory, if another


def _weight_and_bias(part: str, name: str, letters: str) -> dict[str, Place]:
    return {part: Place(f"{name}.weight", letters), f"{part}_bias": Place(f"{name}.bias", letters[0])}


_LAYER = "layers.{layer}."
_FALCON = "h.{layer}."
_HEAD = {"head": Place("lm_head.weight", "VD")}
_LLAMA = {
    "embed": Place("embed_tokens.weight", "VD"),
    "attention_norm": Place(_LAYER + "input_layernorm.weight", "D"),
    **_weight_and_bias("q", _LAYER + "self_attn.q_proj", "QD"),
    **_weight_and_bias("k", _LAYER + "self_attn.k_proj", "KD"),
    **_weight_and_bias("v", _LAYER + "self_attn.v_proj", "KD"),
    **_weight_and_bias("o", _LAYER + "self_attn.o_proj", "DQ"),
    "q_norm": Place(_LAYER + "self_attn.q_norm.weight", "H"),
    "k_norm": Place(_LAYER + "self_attn.k_norm.weight", "H"),
    "ffn_norm": Place(_LAYER + "post_attention_layernorm.weight", "D"),
    **_weight_and_bias("gate", _LAYER + "mlp.gate_proj", "FD"),
    **_weight_and_bias("up", _LAYER + "mlp.up_proj", "FD"),
    **_weight_and_bias("down", _LAYER + "mlp.down_proj", "DF"),  # its columns are the units' rows
    "norm": Place("norm.weight", "D"),
    **_HEAD,
}
_QWEN_MOE = {  # layers without experts have llama's FFN
    **_LLAMA,
    "router": Place(_LAYER + "mlp.gate.weight", "ED"),
    "expert_gate": Place(_LAYER + "mlp.experts.{expert}.gate_proj.weight", "WD"),
    "expert_up": Place(_LAYER + "mlp.experts.{expert}.up_proj.weight", "WD"),
    "expert_down": Place(_LAYER + "mlp.experts.{expert}.down_proj.weight", "DW"),
    "experts_gate_up": Place(_LAYER + "mlp.experts.gate_up_proj", "EUD"),
    "experts_down": Place(_LAYER + "mlp.experts.down_proj", "EDW"),
    "shared_gate": Place(_LAYER + "mlp.shared_expert.gate_proj.weight", "XD"),
    "shared_up": Place(_LAYER + "mlp.shared_expert.up_proj.weight", "XD"),
    "shared_down": Place(_LAYER + "mlp.shared_expert.down_proj.weight", "DX"),
    "mix": Place(_LAYER + "mlp.shared_expert_gate.weight", "ID"),
}
_MIXTRAL = {
    **_LLAMA,
    "router": Place(_LAYER + "block_sparse_moe.gate.weight", "ED", _LAYER + "mlp.gate.weight"),
    "expert_gate": Place(_LAYER + "block_sparse_moe.experts.{expert}.w1.weight", "WD"),
    "expert_up": Place(_LAYER + "block_sparse_moe.experts.{expert}.w3.weight", "WD"),
    "expert_down": Place(_LAYER + "block_sparse_moe.experts.{expert}.w2.weight", "DW"),
    "experts_gate_up": Place(_LAYER + "mlp.experts.gate_up_proj", "EUD"),
    "experts_down": Place(_LAYER + "mlp.experts.down_proj", "EDW"),
}
_GRANITE_MOE = {
    **_LLAMA,
    "router": Place(_LAYER + "block_sparse_moe.router.layer.weight", "ED", _LAYER + "block_sparse_moe.router.weight"),
    "experts_gate_up": Place(
        _LAYER + "block_sparse_moe.input_linear.weight", "EUD", _LAYER + "block_sparse_moe.experts.gate_up_proj"
    ),
    "experts_down": Place(
        _LAYER + "block_sparse_moe.output_linear.weight", "EDW", _LAYER + "block_sparse_moe.experts.down_proj"
    ),
}
_DEEPSEEK = {
    **_QWEN_MOE,
    "q_down": Place(_LAYER + "self_attn.q_a_proj.weight", "AD"),
    "q_down_norm": Place(_LAYER + "self_attn.q_a_layernorm.weight", "A"),
    "q_up": Place(_LAYER + "self_attn.q_b_proj.weight", "QA"),
    "kv_down": Place(_LAYER + "self_attn.kv_a_proj_with_mqa.weight", "BD"),
    "kv_down_norm": Place(_LAYER + "self_attn.kv_a_layernorm.weight", "C"),
    "kv_up": Place(_LAYER + "self_attn.kv_b_proj.weight", "GC"),
    "o": Place(_LAYER + "self_attn.o_proj.weight", "DY"),
    "shared_gate": Place(_LAYER + "mlp.shared_experts.gate_proj.weight", "XD"),
    "shared_up": Place(_LAYER + "mlp.shared_experts.up_proj.weight", "XD"),
    "shared_down": Place(_LAYER + "mlp.shared_experts.down_proj.weight", "DX"),
}
_SWITCH_FFN = "{stack}.block.{block}.layer.{half}."  # behind one attention in an encoder, behind two in a decoder
_SWITCH_SELF = "{stack}.block.{block}.layer.0."
_SWITCH_CROSS = "{stack}.block.{block}.layer.1."
_SWITCH = {
    "embed": Place("shared.weight", "VD"),
    "attention_norm": Place(_SWITCH_SELF + "layer_norm.weight", "D"),
    "q": Place(_SWITCH_SELF + "SelfAttention.q.weight", "QD"),
    "k": Place(_SWITCH_SELF + "SelfAttention.k.weight", "KD"),
    "v": Place(_SWITCH_SELF + "SelfAttention.v.weight", "KD"),
    "o": Place(_SWITCH_SELF + "SelfAttention.o.weight", "DQ"),
    "relative": Place(_SWITCH_SELF + "SelfAttention.relative_attention_bias.weight", "RN"),
    "cross_norm": Place(_SWITCH_CROSS + "layer_norm.weight", "D"),
    "cross_q": Place(_SWITCH_CROSS + "EncDecAttention.q.weight", "QD"),
    "cross_k": Place(_SWITCH_CROSS + "EncDecAttention.k.weight", "KD"),
    "cross_v": Place(_SWITCH_CROSS + "EncDecAttention.v.weight", "KD"),
    "cross_o": Place(_SWITCH_CROSS + "EncDecAttention.o.weight", "DQ"),
    "ffn_norm": Place(_SWITCH_FFN + "layer_norm.weight", "D"),
    "up": Place(_SWITCH_FFN + "mlp.wi.weight", "FD"),
    "down": Place(_SWITCH_FFN + "mlp.wo.weight", "DF"),
    "router": Place(_SWITCH_FFN + "mlp.router.classifier.weight", "ED"),
    "expert_up": Place(_SWITCH_FFN + "mlp.experts.expert_{expert}.wi.weight", "WD"),
    "expert_down": Place(_SWITCH_FFN + "mlp.experts.expert_{expert}.wo.weight", "DW"),
    "encoder_norm": Place("encoder.final_layer_norm.weight", "D"),
    "norm": Place("decoder.final_layer_norm.weight", "D"),
    **_HEAD,
}
PLACES: dict[Layout, dict[str, Place]] = {
    "llama": _LLAMA,
    "opt": {
        "embed": Place("embed_tokens.weight", "VD"),
        "positions": Place("embed_positions.weight", "SD"),
        **_weight_and_bias("attention_norm", _LAYER + "self_attn_layer_norm", "D"),
        **_weight_and_bias("q", _LAYER + "self_attn.q_proj", "QD"),
        **_weight_and_bias("k", _LAYER + "self_attn.k_proj", "KD"),
        **_weight_and_bias("v", _LAYER + "self_attn.v_proj", "KD"),
        **_weight_and_bias("o", _LAYER + "self_attn.out_proj", "DQ"),
        **_weight_and_bias("ffn_norm", _LAYER + "final_layer_norm", "D"),
        **_weight_and_bias("up", _LAYER + "fc1", "FD"),
        **_weight_and_bias("down", _LAYER + "fc2", "DF"),
        **_weight_and_bias("norm", "final_layer_norm", "D"),
        **_HEAD,
    },
    "falcon": {
        "embed": Place("word_embeddings.weight", "VD"),
        **_weight_and_bias("attention_norm", _FALCON + "ln_attn", "D"),
        **_weight_and_bias("shared_norm", _FALCON + "input_layernorm", "D"),  # where both halves read one norm
        "qkv": Place(_FALCON + "self_attention.query_key_value.weight", "ZD"),
        "o": Place(_FALCON + "self_attention.dense.weight", "DQ"),
        **_weight_and_bias("ffn_norm", _FALCON + "ln_mlp", "D"),
        "up": Place(_FALCON + "mlp.dense_h_to_4h.weight", "FD"),
        "down": Place(_FALCON + "mlp.dense_4h_to_h.weight", "DF"),
        **_weight_and_bias("norm", "ln_f", "D"),
        **_HEAD,
    },
    "mixtral": _MIXTRAL,
    "qwen_moe": _QWEN_MOE,
    "deepseek": _DEEPSEEK,
    "granitemoe": _GRANITE_MOE,
    "switch": _SWITCH,
}
LEARNED_OFFSET = 2  # OPT's position p is row p + 2

OUTER = r"(?:module\.|_orig_mod\.|language_model\.|model\.language_model\.)?"  # what wrappers put in front
_PREFIXES: dict[Layout, tuple[str, str]] = {
    "opt": ("model.decoder.", r"(?:model\.)?(?:decoder\.)?"),
    "falcon": ("transformer.", r"(?:transformer\.)?"),
    "switch": ("", ""),
}


def prefixes(layout: Layout) -> tuple[str, str]:
    """What stands before a name below the model: as published, and a pattern of every spelling accepted."""
    return _PREFIXES.get(layout, ("model.", r"(?:model\.)?"))
