"""One forward per residual layout, and which family has which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.reference.layers import activation, attend, gated_ffn, layer_norm, linear, rms, split
from dynajax.reference.mixtures import has_experts, latent_attention, mixture
from dynajax.reference.positions import rotated, turns
from dynajax.reference.tensors import Array, Config, Tensors, model_type

Watch = Callable[[int, Array], None]  # layer, what its FFN reads [T, D]

TIED_UNLESS_SAID = ("opt", "falcon", "minicpm")  # their files do not hold `tie_word_embeddings`


def forward(
    config: Config, tensors: Mapping[str, npt.NDArray[Any]], tokens: npt.ArrayLike, watch: Watch | None = None
) -> Array:
    """tokens [T] -> logits [T, V] from what config.json and the weight files hold.

    A tensor is asked for when it is needed and let go before the next, so `tensors` may read it from a file then.
    `watch` is called with every layer's FFN input, in order.
    """
    run = FORWARDS.get(model_type(config))
    if run is None:
        raise ValueError(f"no reference for model_type {model_type(config)!r}")
    return run(config, Tensors(tensors), np.asarray(tokens), watch or _nobody)


def _nobody(layer: int, h: Array) -> None:
    """Nobody watches."""


# --- the three residual layouts -----------------------------------------------------------------------------------


def _llama_like(config: Config, tensors: Tensors, ids: npt.NDArray, watch: Watch) -> Array:
    """Norm, attention, add; norm, ffn or experts, add. Some scale the embedding, each branch and the last hidden."""
    at_embedding, at_branch, at_head = _scales(config)
    attention = latent_attention if model_type(config) == "deepseek_v2" else _llama_attention
    eps = config.get("rms_norm_eps", 1e-6)
    x = tensors.rows("model.embed_tokens.weight", ids) * at_embedding
    for layer in range(config["num_hidden_layers"]):
        w = tensors.below(f"model.layers.{layer}.")
        x = x + at_branch * attention(config, w, rms(x, w["input_layernorm.weight"], eps), layer)
        h = rms(x, w["post_attention_layernorm.weight"], eps)
        watch(layer, h)
        x = x + at_branch * (mixture if has_experts(config, layer) else gated_ffn)(config, w, h)
    x = rms(x, tensors["model.norm.weight"], eps) * at_head
    return tensors.scores(_head(config, "model.embed_tokens"), x)


def _opt(config: Config, tensors: Tensors, ids: npt.NDArray, watch: Watch) -> Array:
    """LayerNorm everywhere, learned positions, biases, no gate. Some files leave `model.` out of the names."""
    root = "model.decoder." if "model.decoder.embed_tokens.weight" in tensors else "decoder."
    if not config.get("do_layer_norm_before", True) or _is_projected(config):
        raise ValueError("OPT with norms after the branches or with projected embeddings (opt-350m) has no reference")
    positions = np.arange(len(ids)) + 2  # the first two rows belonged to padding
    x = tensors.rows(f"{root}embed_tokens.weight", ids) + tensors.rows(f"{root}embed_positions.weight", positions)
    heads = config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        w = tensors.below(f"{root}layers.{layer}.")
        h = layer_norm(x, w, "self_attn_layer_norm", 1e-5)
        q, k, v = (split(linear(h, w, f"self_attn.{part}_proj"), heads) for part in "qkv")
        x = x + linear(attend(q, k, v), w, "self_attn.out_proj")
        h = layer_norm(x, w, "final_layer_norm", 1e-5)
        watch(layer, h)
        x = x + linear(activation(config["activation_function"], 0.0)(linear(h, w, "fc1")), w, "fc2")
    x = layer_norm(x, tensors.below(root), "final_layer_norm", 1e-5)
    return tensors.scores(_head(config, f"{root}embed_tokens"), x)


def _is_projected(config: Config) -> bool:
    return config.get("word_embed_proj_dim") not in (None, config["hidden_size"])


def _falcon(config: Config, tensors: Tensors, ids: npt.NDArray, watch: Watch) -> Array:
    """Attention and ffn read the same stream side by side: after two norms (40b) or one (7b)."""
    if config.get("alibi") or not config.get("parallel_attn", True):
        raise ValueError("falcon with alibi or without parallel attention (falcon-rw) has no reference")
    eps = config["layer_norm_epsilon"]
    act = activation(config.get("activation", "gelu"), 0.0)
    x = tensors.rows("transformer.word_embeddings.weight", ids)
    for layer in range(config["num_hidden_layers"]):
        w = tensors.below(f"transformer.h.{layer}.")
        norms = ("ln_attn", "ln_mlp") if "ln_attn.weight" in w else ("input_layernorm", "input_layernorm")
        for_attention, for_ffn = (layer_norm(x, w, norm, eps) for norm in norms)
        watch(layer, for_ffn)
        ffn = linear(act(linear(for_ffn, w, "mlp.dense_h_to_4h")), w, "mlp.dense_4h_to_h")
        x = x + _falcon_attention(config, w, for_attention) + ffn
    x = layer_norm(x, tensors.below("transformer."), "ln_f", eps)
    return tensors.scores(_head(config, "transformer.word_embeddings"), x)


FORWARDS: dict[str, Callable[[Config, Tensors, npt.NDArray, Watch], Array]] = {
    "llama": _llama_like,
    "sparsellama": _llama_like,
    "llama_sparse_relu": _llama_like,
    "mistral": _llama_like,
    "bamboo": _llama_like,
    "minicpm": _llama_like,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
    "mixtral": _llama_like,
    "qwen2_moe": _llama_like,
    "qwen3_moe": _llama_like,
    "olmoe": _llama_like,
    "granitemoe": _llama_like,
    "deepseek_v2": _llama_like,
    "opt": _opt,
    "falcon": _falcon,
}


def _llama_attention(config: Config, w: Tensors, h: Array, layer: int) -> Array:
    heads, kind, eps = config["num_attention_heads"], model_type(config), config.get("rms_norm_eps", 1e-6)
    q, k, v = (linear(h, w, f"self_attn.{part}_proj") for part in "qkv")
    if kind == "olmoe":  # one weight for all heads together
        q, k = rms(q, w["self_attn.q_norm.weight"], eps), rms(k, w["self_attn.k_norm.weight"], eps)
    groups = config.get("num_key_value_heads") or heads
    q, k, v = split(q, heads), split(k, groups), split(v, groups)
    if kind in ("qwen3", "qwen3_moe"):  # one weight of a head's size, for every head
        q, k = rms(q, w["self_attn.q_norm.weight"], eps), rms(k, w["self_attn.k_norm.weight"], eps)
    turn = turns(config, len(h), q.shape[-1])
    scale = config["attention_multiplier"] if kind == "granitemoe" else None
    mixed = attend(rotated(q, turn), rotated(k, turn), v, window(config, layer), scale)
    return linear(mixed, w, "self_attn.o_proj")


def _falcon_attention(config: Config, w: Tensors, h: Array) -> Array:
    """query_key_value holds, group after group, some query heads, one key head and one value head."""
    heads = config["num_attention_heads"]
    if config.get("new_decoder_architecture"):
        groups = config.get("num_kv_heads") or heads
    else:
        groups = 1 if config.get("multi_query", True) else heads  # falcon-7b says num_kv_heads 71 and means 1
    fused = split(linear(h, w, "self_attention.query_key_value"), heads + 2 * groups)  # [N + 2K, T, H]
    grouped = fused.reshape(groups, heads // groups + 2, *fused.shape[1:])
    q = grouped[:, :-2].reshape(heads, *fused.shape[1:])
    k, v = grouped[:, -2], grouped[:, -1]
    turn = turns(config, len(h), q.shape[-1])
    return linear(attend(rotated(q, turn), rotated(k, turn), v), w, "self_attention.dense")


def window(config: Config, layer: int) -> int | None:
    """How many keys a query of this layer sees, itself included; None: all. Qwen names a window it does not use."""
    match model_type(config):
        case "mistral" | "bamboo":
            return config.get("sliding_window", 4096)  # null: all
        case "mixtral":
            return config["sliding_window"]
        case "qwen2_moe" | "qwen3_moe":
            if config.get("use_sliding_window"):
                raise ValueError("Qwen's mixtures with windows have no reference")
            return None
        case "qwen2" | "qwen3":
            used = config.get("use_sliding_window", False) and layer >= config.get("max_window_layers", 28)
            return config.get("sliding_window") if used else None
        case _:
            return None


def _scales(config: Config) -> tuple[float, float, float]:
    """What multiplies the embedding, each residual branch and the hidden state before the head."""
    match model_type(config):
        case "minicpm":
            at_branch = config["scale_depth"] / math.sqrt(config["num_hidden_layers"])
            return config["scale_emb"], at_branch, config["dim_model_base"] / config["hidden_size"]
        case "granitemoe":
            return config["embedding_multiplier"], config["residual_multiplier"], 1 / config["logits_scaling"]
        case _:
            return 1.0, 1.0, 1.0


def _head(config: Config, embedding: str) -> str:
    """The name of the head's table."""
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = model_type(config) in TIED_UNLESS_SAID
    return f"{embedding}.weight" if tied else "lm_head.weight"
