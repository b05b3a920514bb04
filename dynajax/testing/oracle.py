"""What every dense model family must compute: one forward in float64 NumPy, read from the checkpoint's own files.

It reads config.json and the published tensor names and shares nothing with the engine, so that it can catch
mistakes made there. One function per idea (norm, positions, attention, ffn), one per residual layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # teaches NumPy, and so safetensors, what bfloat16 is
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

Array = npt.NDArray[np.float64]
Config = Mapping[str, Any]
Tensors = Mapping[str, Array]

TIED_UNLESS_SAID = ("opt", "falcon", "minicpm")  # their files do not hold `tie_word_embeddings`


def family_logits(folder: Path, tokens: npt.ArrayLike) -> Array:
    """tokens [T] -> logits [T, V] of the model in `folder` (config.json and *.safetensors)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            tensors |= {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
    return forward(config, tensors, tokens)


def forward(config: Config, tensors: Mapping[str, npt.NDArray[Any]], tokens: npt.ArrayLike) -> Array:
    """tokens [T] -> logits [T, V] from what config.json and the weight files hold."""
    run = FORWARDS.get(model_type(config))
    if run is None:
        raise ValueError(f"no oracle for model_type {model_type(config)!r}")
    wide = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    return run(config, wide, np.asarray(tokens))


def model_type(config: Config) -> str:
    """`model_type`; MiniCPM files exist that leave it out and are known by their architecture."""
    untyped = "minicpm" if config.get("architectures") == ["MiniCPMForCausalLM"] else ""
    return config.get("model_type", untyped)


# --- the three residual layouts -----------------------------------------------------------------------------------


def _llama_like(config: Config, tensors: Tensors, ids: npt.NDArray) -> Array:
    """Norm, attention, add; norm, gated ffn, add. MiniCPM scales the embedding, each branch and the last hidden."""
    at_embedding, at_branch, at_head = _minicpm_scales(config)
    eps = config.get("rms_norm_eps", 1e-6)
    x = tensors["model.embed_tokens.weight"][ids] * at_embedding
    for layer in range(config["num_hidden_layers"]):
        w = _below(tensors, f"model.layers.{layer}.")
        x = x + at_branch * _llama_attention(config, w, _rms(x, w["input_layernorm.weight"], eps), layer)
        x = x + at_branch * _gated_ffn(config, w, _rms(x, w["post_attention_layernorm.weight"], eps))
    return _rms(x, tensors["model.norm.weight"], eps) * at_head @ _head(config, tensors, "model.embed_tokens").T


def _opt(config: Config, tensors: Tensors, ids: npt.NDArray) -> Array:
    """LayerNorm everywhere, learned positions, biases, no gate. Some files leave `model.` out of the names."""
    root = "model.decoder." if "model.decoder.embed_tokens.weight" in tensors else "decoder."
    if not config.get("do_layer_norm_before", True) or config.get("word_embed_proj_dim") != config["hidden_size"]:
        raise ValueError("OPT with norms after the branches or with projected embeddings (opt-350m) has no oracle")
    positions = np.arange(len(ids)) + 2  # the first two rows belonged to padding
    x = tensors[f"{root}embed_tokens.weight"][ids] + tensors[f"{root}embed_positions.weight"][positions]
    heads = config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        w = _below(tensors, f"{root}layers.{layer}.")
        h = _layer_norm(x, w, "self_attn_layer_norm", 1e-5)
        q, k, v = (_split(_linear(h, w, f"self_attn.{part}_proj"), heads) for part in "qkv")
        x = x + _linear(_attend(q, k, v), w, "self_attn.out_proj")
        h = _layer_norm(x, w, "final_layer_norm", 1e-5)
        x = x + _linear(_activation(config["activation_function"], 0.0)(_linear(h, w, "fc1")), w, "fc2")
    x = _layer_norm(x, _below(tensors, root), "final_layer_norm", 1e-5)
    return x @ _head(config, tensors, f"{root}embed_tokens").T


def _falcon(config: Config, tensors: Tensors, ids: npt.NDArray) -> Array:
    """Attention and ffn read the same stream side by side: after two norms (40b) or one (7b)."""
    if config.get("alibi") or not config.get("parallel_attn", True):
        raise ValueError("falcon with alibi or without parallel attention (falcon-rw) has no oracle")
    eps = config["layer_norm_epsilon"]
    act = _activation(config.get("activation", "gelu"), 0.0)
    x = tensors["transformer.word_embeddings.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        w = _below(tensors, f"transformer.h.{layer}.")
        norms = ("ln_attn", "ln_mlp") if "ln_attn.weight" in w else ("input_layernorm", "input_layernorm")
        for_attention, for_ffn = (_layer_norm(x, w, norm, eps) for norm in norms)
        ffn = _linear(act(_linear(for_ffn, w, "mlp.dense_h_to_4h")), w, "mlp.dense_4h_to_h")
        x = x + _falcon_attention(config, w, for_attention) + ffn
    x = _layer_norm(x, _below(tensors, "transformer."), "ln_f", eps)
    return x @ _head(config, tensors, "transformer.word_embeddings").T


FORWARDS: dict[str, Callable[[Config, Tensors, npt.NDArray], Array]] = {
    "llama": _llama_like,
    "sparsellama": _llama_like,
    "llama_sparse_relu": _llama_like,
    "mistral": _llama_like,
    "bamboo": _llama_like,
    "minicpm": _llama_like,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
    "opt": _opt,
    "falcon": _falcon,
}


# --- attention ----------------------------------------------------------------------------------------------------


def _llama_attention(config: Config, w: Tensors, h: Array, layer: int) -> Array:
    heads = config["num_attention_heads"]
    q = _split(_linear(h, w, "self_attn.q_proj"), heads)
    k, v = (
        _split(_linear(h, w, f"self_attn.{part}_proj"), config.get("num_key_value_heads") or heads) for part in "kv"
    )
    if model_type(config) == "qwen3":  # one weight of a head's size, for every head
        eps = config.get("rms_norm_eps", 1e-6)
        q, k = _rms(q, w["self_attn.q_norm.weight"], eps), _rms(k, w["self_attn.k_norm.weight"], eps)
    turn = _turns(config, len(h), q.shape[-1])
    return _linear(_attend(_rotated(q, turn), _rotated(k, turn), v, _window(config, layer)), w, "self_attn.o_proj")


def _falcon_attention(config: Config, w: Tensors, h: Array) -> Array:
    """query_key_value holds, group after group, some query heads, one key head and one value head."""
    heads = config["num_attention_heads"]
    if config.get("new_decoder_architecture"):
        groups = config.get("num_kv_heads") or heads
    else:
        groups = 1 if config.get("multi_query", True) else heads  # falcon-7b says num_kv_heads 71 and means 1
    fused = _split(_linear(h, w, "self_attention.query_key_value"), heads + 2 * groups)  # [N + 2K, T, H]
    grouped = fused.reshape(groups, heads // groups + 2, *fused.shape[1:])
    q = grouped[:, :-2].reshape(heads, *fused.shape[1:])
    k, v = grouped[:, -2], grouped[:, -1]
    turn = _turns(config, len(h), q.shape[-1])
    return _linear(_attend(_rotated(q, turn), _rotated(k, turn), v), w, "self_attention.dense")


def _attend(q: Array, k: Array, v: Array, window: int | None = None) -> Array:
    """q [N, T, H], k and v [K, T, H] -> [T, N * H]; query i sees the keys i - window < j <= i."""
    shared = len(q) // len(k)
    i, j = np.ogrid[: q.shape[1], : k.shape[1]]
    seen = (j <= i) & (j > i - window) if window else j <= i
    mixed = []
    for n in range(len(q)):
        scores = np.where(seen, q[n] @ k[n // shared].T / math.sqrt(q.shape[-1]), -np.inf)
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed.append(share / share.sum(axis=1, keepdims=True) @ v[n // shared])
    return np.concatenate(mixed, axis=1)


def _window(config: Config, layer: int) -> int | None:
    """How many keys a query of this layer sees, itself included; None: all. Qwen names a window it does not use."""
    match model_type(config):
        case "mistral" | "bamboo":
            return config.get("sliding_window")
        case "qwen2" | "qwen3":
            used = config.get("use_sliding_window", False) and layer >= config.get("max_window_layers", 28)
            return config.get("sliding_window") if used else None
        case _:
            return None


# --- positions ----------------------------------------------------------------------------------------------------


def _rotated(x: Array, turn: npt.NDArray[np.complex128]) -> Array:
    """x [N, T, H]: the pair (i, i + H/2) is one complex number, turned by its position."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def _turns(config: Config, length: int, size: int) -> npt.NDArray[np.complex128]:
    """[T, H/2]: what each pair of a head of `size` is multiplied with at each position.

    Both spellings are read: rope_theta beside rope_scaling (published files) and rope_parameters (transformers 5).
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0
    frequency = base ** (-2 * np.arange(size // 2) / size)
    amplitude = 1.0
    match scaling.get("rope_type", scaling.get("type", "default")):
        case "default":
            pass
        case "linear":
            frequency = frequency / scaling["factor"]
        case "llama3":
            frequency = _llama3(frequency, scaling)
        case "yarn":
            frequency, amplitude = _yarn(frequency, scaling, base, config)
        case other:
            raise ValueError(f"no oracle for rope type {other!r}")
    return amplitude * np.exp(1j * np.outer(np.arange(length), frequency))


def _llama3(frequency: Array, scaling: Config) -> Array:
    """Slow pairs turn `factor` times slower, fast ones as before, between them a mixture."""
    turns_in_context = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    fast = np.clip((turns_in_context - low) / (high - low), 0, 1)
    return fast * frequency + (1 - fast) * frequency / scaling["factor"]


def _yarn(frequency: Array, scaling: Config, base: float, config: Config) -> tuple[Array, float]:
    """Like llama3, but the mixture is linear in the number of the pair, and what is turned also grows."""
    context = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    size = 2 * len(frequency)

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (2 * math.pi * times)) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(scaling.get("beta_fast") or 32)), 0)
    last = min(math.ceil(pair_that_turns(scaling.get("beta_slow") or 1)), size - 1)
    slow = np.clip((np.arange(size // 2) - first) / max(last - first, 0.001), 0, 1)
    amplitude = scaling.get("attention_factor") or 0.1 * math.log(scaling["factor"]) + 1
    return (1 - slow) * frequency + slow * frequency / scaling["factor"], amplitude


# --- ffn ----------------------------------------------------------------------------------------------------------


def _gated_ffn(config: Config, w: Tensors, h: Array) -> Array:
    """down(act(gate h) * up h). Bamboo applies the activation to both; predictors in the file are not asked."""
    kind = "relu" if model_type(config) == "llama_sparse_relu" else config["hidden_act"]  # the file says silu
    act = _activation(kind, config.get("hidden_act_param", 0.0))
    gate, up = act(_linear(h, w, "mlp.gate_proj")), _linear(h, w, "mlp.up_proj")
    if model_type(config) == "bamboo":
        up = act(up)
    return _linear(gate * up, w, "mlp.down_proj")


def _activation(kind: str, threshold: float) -> Callable[[Array], Array]:
    match kind:
        case "relu":
            return lambda x: np.where(x > 0, x, 0.0)
        case "fatrelu":
            return lambda x: np.where(x >= threshold, x, 0.0)  # cut off, not shifted
        case "silu":
            return lambda x: x / (1 + np.exp(-x))
        case _:
            raise ValueError(f"no oracle for activation {kind!r}")


# --- norms, scales and names --------------------------------------------------------------------------------------


def _rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _layer_norm(x: Array, w: Tensors, name: str, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return centred / spread * w[f"{name}.weight"] + w[f"{name}.bias"]


def _minicpm_scales(config: Config) -> tuple[float, float, float]:
    """What multiplies the embedding, each residual branch and the hidden state before the head."""
    if model_type(config) != "minicpm":
        return 1.0, 1.0, 1.0
    at_branch = config["scale_depth"] / math.sqrt(config["num_hidden_layers"])
    return config["scale_emb"], at_branch, config["dim_model_base"] / config["hidden_size"]


def _head(config: Config, tensors: Tensors, embedding: str) -> Array:
    tied = config.get("tie_word_embeddings", model_type(config) in TIED_UNLESS_SAID)
    return tensors[f"{embedding}.weight" if tied else "lm_head.weight"]


def _linear(x: Array, w: Tensors, name: str) -> Array:
    """x W^T, plus the bias where the file has one."""
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _split(x: Array, heads: int) -> Array:
    """[T, N * H] -> [N, T, H]"""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def _below(tensors: Tensors, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
