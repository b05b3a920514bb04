"""Mixtures of experts: which layers have them, who goes where, what the experts add; and attention with latents."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dynajax.reference.layers import attend, gate_activation, gated_ffn, linear, rms, split
from dynajax.reference.positions import deepseek_sharpening, rotated_neighbours, turns
from dynajax.reference.tensors import Array, Config, Tensors, model_type

LATENT_EPS = 1e-6  # of the norms of DeepSeek's latents, whatever rms_norm_eps says
MERGED = (  # gate over up [E, 2 f, D], and down [E, D, f]
    ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")
ROUTERS += ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight")


def has_experts(config: Config, layer: int) -> bool:
    """Dense models: no layer. Qwen: every n-th, but for a list of exceptions. DeepSeek: from some layer on."""
    match model_type(config):
        case "mixtral" | "olmoe" | "granitemoe":
            return True
        case "qwen2_moe" | "qwen3_moe":
            if layer in (config.get("mlp_only_layers") or []):
                return False
            return (layer + 1) % config["decoder_sparse_step"] == 0
        case "deepseek_v2":
            return layer >= config["first_k_dense_replace"]
        case _:
            return False


def mixture(config: Config, w: Tensors, h: Array) -> Array:
    """What the chosen experts add for h [T, D], and what is added for every token -> [T, D]."""
    router = next(name for name in ROUTERS if name in w)
    ids, weights = choices(config, h @ w[router].T)
    out = _experts(config, w, h, ids, weights)
    if model_type(config) == "deepseek_v2":
        out = out + gated_ffn(config, w, h, "mlp.shared_experts")
    if model_type(config) == "qwen2_moe":
        share = 1 / (1 + np.exp(-linear(h, w, "mlp.shared_expert_gate")))
        out = out + share * gated_ffn(config, w, h, "mlp.shared_expert")
    return out


def choices(config: Config, logits: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """logits [T, E] -> each token's experts [T, K], best first and the lower number of equals, and their weights."""
    count, kind = config["num_experts_per_tok"], model_type(config)
    scores = logits if kind == "granitemoe" else _softmax(logits)
    eligible = _best_groups(config, scores) if config.get("topk_method") == "group_limited_greedy" else scores
    ids = np.argsort(-eligible, axis=1, kind="stable")[:, :count]
    weights = np.take_along_axis(scores, ids, axis=1)
    if kind == "granitemoe":
        return ids, _softmax(weights)
    if kind == "mixtral" or (kind != "deepseek_v2" and config["norm_topk_prob"]):
        weights = weights / weights.sum(axis=1, keepdims=True)
    return ids, weights * (config["routed_scaling_factor"] if kind == "deepseek_v2" else 1)


def _best_groups(config: Config, scores: Array) -> Array:
    """Scores, and -1 for those outside of the groups whose best experts are best."""
    grouped = scores.reshape(len(scores), config["n_group"], -1)
    kept = np.argsort(-grouped.max(axis=2), axis=1, kind="stable")[:, : config["topk_group"]]
    mask = (np.arange(config["n_group"]) == kept[:, :, None]).any(axis=1)
    return np.where(mask[:, :, None], grouped, -1.0).reshape(scores.shape)


def _softmax(x: Array) -> Array:
    share = np.exp(x - x.max(axis=1, keepdims=True))
    return share / share.sum(axis=1, keepdims=True)


def _experts(config: Config, w: Tensors, h: Array, ids: npt.NDArray[np.int64], weights: Array) -> Array:
    """sum over a token's experts of its weight times their FFN."""
    act, out = gate_activation(config), np.zeros_like(h)
    chosen = [np.nonzero(ids == expert) for expert in range(int(ids.max()) + 1)]  # tokens, and which choice it was
    merged = next((names for names in MERGED if names[0] in w), None)
    if merged is not None:
        values = []
        for (tokens, _), matrix in zip(chosen, w.each(merged[0]), strict=False):
            gate, up = np.split(h[tokens] @ matrix.T, 2, axis=1)
            values.append(act(gate) * up)
        for (tokens, choice), value, matrix in zip(chosen, values, w.each(merged[1]), strict=False):
            out[tokens] += weights[tokens, choice, None] * (value @ matrix.T)
        return out
    at, (gate, up, down) = "mlp", ("gate_proj", "up_proj", "down_proj")
    if model_type(config) == "mixtral":
        at, (gate, up, down) = "block_sparse_moe", ("w1", "w3", "w2")
    for expert, (tokens, choice) in enumerate(chosen):
        if len(tokens):
            one = w.below(f"{at}.experts.{expert}.")
            value = act(linear(h[tokens], one, gate)) * linear(h[tokens], one, up)
            out[tokens] += weights[tokens, choice, None] * linear(value, one, down)
    return out


def latent_attention(config: Config, w: Tensors, h: Array, layer: int) -> Array:
    """DeepSeek-V2, section 2.1: keys and values of all heads from one latent a token, and one rotated key for all."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is None:
        q = linear(h, w, "self_attn.q_proj")
    else:
        inner = rms(linear(h, w, "self_attn.q_a_proj"), w["self_attn.q_a_layernorm.weight"], LATENT_EPS)
        q = linear(inner, w, "self_attn.q_b_proj")
    q, turn = split(q, heads), turns(config, len(h), rotary)
    q = np.concatenate([q[..., :plain], rotated_neighbours(q[..., plain:], turn)], axis=-1)
    down = linear(h, w, "self_attn.kv_a_proj_with_mqa")
    latent = rms(down[:, :rank], w["self_attn.kv_a_layernorm.weight"], LATENT_EPS)
    both = split(linear(latent, w, "self_attn.kv_b_proj"), heads)  # [N, T, key + value]
    shared = np.broadcast_to(rotated_neighbours(down[None, :, rank:], turn), (heads, len(h), rotary))
    k = np.concatenate([both[..., :plain], shared], axis=-1)
    scale = deepseek_sharpening(config) / math.sqrt(plain + rotary)
    return linear(attend(q, k, both[..., plain:], None, scale), w, "self_attn.o_proj")
