"""Tiny random mixtures of experts, each spelled as the published model spells it, or as transformers 5 holds it.

make_moe(folder, "qwen3_moe", num_experts=16)  # config.json and model.safetensors
make_moe(folder, "mixtral", merged=True)       # the same weights, a layer's experts in two tensors
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.testing.families import Config, Family, Shapes, write

Tensors = dict[str, npt.NDArray[np.float32]]


def make_moe(
    folder: Path,
    family: str,
    *,
    merged: bool = False,  # experts as transformers 5 has them in memory
    dtype: str = "float32",
    seed: int = 0,
    **changes: Any,  # of config.json
) -> Path:
    """Write config.json and model.safetensors of MIXTURES[family]; -> `folder`."""
    made = MIXTURES[family]
    return write(folder, Merged.of(made) if merged else made, dtype=dtype, seed=seed, **changes)


class Merged(Family):
    """A family whose files hold all of a layer's experts in two tensors."""

    @classmethod
    def of(cls, family: Family) -> Merged:
        return cls(published=f"{family.published} as transformers 5 has it", base=family.base, shapes=family.shapes)

    def tensors(self, config: Config, seed: int = 0) -> Tensors:
        return merge_experts(super().tensors(config, seed))


_EXPERT = re.compile(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_RENAMED = {
    "block_sparse_moe.gate.weight": "mlp.gate.weight",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}


def merge_experts(tensors: Tensors) -> Tensors:
    """The same weights with a layer's experts in gate_up_proj [E, 2f, D] and down_proj [E, D, f]."""
    merged, layers = {}, {}
    for name, value in tensors.items():
        if match := _EXPERT.fullmatch(name):
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(match[3], match[3])
            layers.setdefault(match[1], {}).setdefault(part, []).append(value)
            continue
        old = next((end for end in _RENAMED if name.endswith(end)), "")
        merged[name.removesuffix(old) + _RENAMED[old] if old else name] = value
    for at, parts in layers.items():
        gate, up, down = (np.stack(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        merged[f"{at}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        merged[f"{at}mlp.experts.down_proj"] = down
    return merged


# --- tensors ------------------------------------------------------------------------------------------------------


def moe_shapes(config: Config, *, kind: str) -> Shapes:
    """Every tensor by its published name. kind: mixtral, qwen2, qwen3, olmoe, granite or deepseek."""
    hidden = config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= _latents(config, at) if kind == "deepseek" else _attention(config, at, kind)
        if has_experts(config, i):
            shapes |= _mixture(config, at, kind)
        else:
            shapes |= _ffn(f"{at}mlp.", hidden, config["intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def has_experts(config: Config, layer: int) -> bool:
    """Which layers have: Qwen's every n-th and DeepSeek's later ones."""
    if layer < config.get("first_k_dense_replace", 0) or layer in (config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _attention(config: Config, at: str, kind: str) -> Shapes:
    hidden, heads, groups = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    size = config.get("head_dim") or hidden // heads
    bias = config.get("qkv_bias", True) if kind == "qwen2" else config.get("attention_bias", False)
    shapes: Shapes = {}
    for part, rows in (("q", heads * size), ("k", groups * size), ("v", groups * size)):
        shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
        shapes |= {f"{at}self_attn.{part}_proj.bias": (rows,)} if bias else {}
        if part != "v" and kind in ("qwen3", "olmoe"):
            shapes[f"{at}self_attn.{part}_norm.weight"] = (size if kind == "qwen3" else rows,)
    shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * size)
    return shapes | ({f"{at}self_attn.o_proj.bias": (hidden,)} if bias and kind != "qwen2" else {})


def _latents(config: Config, at: str) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries, at = heads * (plain + rotary), f"{at}self_attn."
    shapes: Shapes = {f"{at}q_proj.weight": (queries, hidden)}
    if (inner := config["q_lora_rank"]) is not None:
        shapes = {f"{at}q_a_proj.weight": (inner, hidden), f"{at}q_a_layernorm.weight": (inner,)}
        shapes[f"{at}q_b_proj.weight"] = (queries, inner)
    return shapes | {
        f"{at}kv_a_proj_with_mqa.weight": (rank + rotary, hidden),
        f"{at}kv_a_layernorm.weight": (rank,),
        f"{at}kv_b_proj.weight": (heads * (plain + value), rank),
        f"{at}o_proj.weight": (hidden, heads * value),
    }


def _mixture(config: Config, at: str, kind: str) -> Shapes:
    hidden = config["hidden_size"]
    experts = next(config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    at += "block_sparse_moe." if kind in ("mixtral", "granite") else "mlp."
    if kind == "granite":
        return {
            f"{at}router.layer.weight": (experts, hidden),
            f"{at}input_linear.weight": (experts, 2 * width, hidden),
            f"{at}output_linear.weight": (experts, hidden, width),
        }
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    shapes: Shapes = {f"{at}gate.weight": (experts, hidden)}
    for e in range(experts):
        shapes |= _ffn(f"{at}experts.{e}.", hidden, width, names)
    if kind == "qwen2":
        shapes |= _ffn(f"{at}shared_expert.", hidden, config["shared_expert_intermediate_size"])
        shapes[f"{at}shared_expert_gate.weight"] = (1, hidden)
    if kind == "deepseek":
        shapes |= _ffn(f"{at}shared_experts.", hidden, width * config["n_shared_experts"])
    return shapes


def _ffn(
    at: str, hidden: int, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return {f"{at}{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


# --- configs ------------------------------------------------------------------------------------------------------

_COMMON: Config = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 40,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 96,
}
_MIXTRAL: Config = {
    **_COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 28,  # of an expert
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_QWEN2_MOE: Config = {
    **_COMMON,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "intermediate_size": 76,  # of layers without experts
    "max_window_layers": 21,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 20,
    "norm_topk_prob": False,
    "num_experts": 6,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 44,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
_QWEN3_MOE: Config = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,  # times heads is not hidden_size
    "intermediate_size": 76,
    "max_window_layers": 3,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
_OLMOE: Config = {
    **_COMMON,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "intermediate_size": 22,  # of an expert
    "norm_topk_prob": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
}
_GRANITE_MOE: Config = {
    **_COMMON,
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "attention_bias": False,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "intermediate_size": 26,  # of an expert
    "logits_scaling": 6.0,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "output_router_logits": False,
    "residual_multiplier": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
}
_DEEPSEEK_LITE: Config = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "intermediate_size": 76,  # of the layer without experts
    "kv_lora_rank": 18,
    "moe_intermediate_size": 20,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 12,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 10,
}
_DEEPSEEK_V2: Config = {
    **_DEEPSEEK_LITE,
    "n_group": 4,
    "q_lora_rank": 22,
    "rope_scaling": {**_DEEPSEEK_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 0.5},
    "routed_scaling_factor": 2.5,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
}


def _family(published: str, base: Config, kind: str, **changes: Any) -> Family:
    return Family(published=published, base={**base, **changes}, shapes=partial(moe_shapes, kind=kind))


MIXTURES: dict[str, Family] = {
    "mixtral": _family("mistralai/Mixtral-8x7B-v0.1", _MIXTRAL, "mixtral"),
    "mixtral-window": _family("mistralai/Mixtral-8x7B-v0.1 with a window", _MIXTRAL, "mixtral", sliding_window=64),
    "qwen2_moe": _family("Qwen/Qwen1.5-MoE-A2.7B", _QWEN2_MOE, "qwen2"),
    "qwen3_moe": _family("Qwen/Qwen3-30B-A3B", _QWEN3_MOE, "qwen3"),
    "qwen3_moe-sparse": _family("Qwen3-MoE, every second layer", _QWEN3_MOE, "qwen3", decoder_sparse_step=2),
    "olmoe": _family("allenai/OLMoE-1B-7B-0125", _OLMOE, "olmoe"),
    "granitemoe": _family("ibm-granite/granite-3.1-1b-a400m-base", _GRANITE_MOE, "granite"),
    "deepseek_v2-lite": _family("deepseek-ai/DeepSeek-V2-Lite", _DEEPSEEK_LITE, "deepseek"),
    "deepseek_v2": _family("deepseek-ai/DeepSeek-V2", _DEEPSEEK_V2, "deepseek"),
}
