"""What layers are made of: norms, matrices, activations, attention, and the FFN."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dynajax.reference.tensors import Array, Config, Tensors, model_type


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, w: Tensors, name: str, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    return centred / spread * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Array, w: Tensors, name: str) -> Array:
    """x W^T, plus the bias where the file has one."""
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def split(x: Array, heads: int) -> Array:
    """[T, N * H] -> [N, T, H]"""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def attend(q: Array, k: Array, v: Array, window: int | None = None, scale: float | None = None) -> Array:
    """q [N, T, H], k [K, T, H], v [K, T, V] -> [T, N * V]; query i sees the keys i - window < j <= i.

    scale multiplies the scores; None: 1 / sqrt(H).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shared = len(q) // len(k)
    i, j = np.ogrid[: q.shape[1], : k.shape[1]]
    seen = (j <= i) & (j > i - window) if window else j <= i
    mixed = []
    for n in range(len(q)):
        scores = np.where(seen, scale * (q[n] @ k[n // shared].T), -np.inf)
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed.append(share / share.sum(axis=1, keepdims=True) @ v[n // shared])
    return np.concatenate(mixed, axis=1)


def gated_ffn(config: Config, w: Tensors, h: Array, at: str = "mlp") -> Array:
    """down(act(gate h) * up h) of the matrices below `at`. Bamboo applies the activation to both; predictors in the
    file are not asked."""
    act = gate_activation(config)
    gate, up = act(linear(h, w, f"{at}.gate_proj")), linear(h, w, f"{at}.up_proj")
    if model_type(config) == "bamboo":
        up = act(up)
    return linear(gate * up, w, f"{at}.down_proj")


def gate_activation(config: Config) -> Callable[[Array], Array]:
    """What the gate goes through."""
    kind = "relu" if model_type(config) == "llama_sparse_relu" else config["hidden_act"]  # the file says silu
    return activation(kind, config.get("hidden_act_param", 0.0))


def activation(kind: str, threshold: float) -> Callable[[Array], Array]:
    match kind:
        case "relu":
            return lambda x: np.where(x > 0, x, 0.0)
        case "fatrelu":
            return lambda x: np.where(x >= threshold, x, 0.0)  # cut off, not shifted
        case "silu" | "swish":
            return lambda x: x * (1 + np.tanh(x / 2)) / 2  # x sigmoid(x), without an exp that could overflow
        case _:
            raise ValueError(f"no reference for activation {kind!r}")
