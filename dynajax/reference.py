"""The plain reference: what every dense model family must compute, one forward in float64 NumPy.

It reads the words of config.json and the published tensor names and shares nothing with the engine, so that it can
catch mistakes made there. One function per idea (norm, positions, attention, ffn), one per residual layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Config = Mapping[str, Any]
Watch = Callable[[int, Array], None]  # layer, what its FFN reads [T, D]

TIED_UNLESS_SAID = ("opt", "falcon", "minicpm")  # their files do not hold `tie_word_embeddings`
HEAD_ROWS = 8192  # of the head that are float64 at a time


class Tensors(Mapping[str, Array]):
    """Tensors by name below a prefix, made float64 when they are asked for and not kept."""

    def __init__(self, inner: Mapping[str, npt.NDArray[Any]], prefix: str = ""):
        self._inner, self._prefix = inner, prefix

    def below(self, prefix: str) -> Tensors:
        return Tensors(self._inner, self._prefix + prefix)

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self._inner[self._prefix + name], np.float64)

    def rows(self, name: str, ids: npt.NDArray) -> Array:
        """Some rows of a table, which is large."""
        return np.asarray(self._inner[self._prefix + name])[ids].astype(np.float64)

    def scores(self, name: str, x: Array) -> Array:
        """x [T, D] times every row of a table [V, D] -> [T, V]."""
        table = np.asarray(self._inner[self._prefix + name])
        blocks = (table[first : first + HEAD_ROWS] for first in range(0, len(table), HEAD_ROWS))
        return np.concatenate([x @ block.astype(np.float64).T for block in blocks], axis=1)

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._inner

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._inner if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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


def model_type(config: Config) -> str:
    """`model_type`; MiniCPM files exist that leave it out and are known by their architecture."""
    untyped = "minicpm" if config.get("architectures") == ["MiniCPMForCausalLM"] else ""
    return config.get("model_type", untyped)


# --- the three residual layouts -----------------------------------------------------------------------------------


def _llama_like(config: Config, tensors: Tensors, ids: npt.NDArray, watch: Watch) -> Array:
    """Norm, attention, add; norm, gated ffn, add. MiniCPM scales the embedding, each branch and the last hidden."""
    at_embedding, at_branch, at_head = _minicpm_scales(config)
    eps = config.get("rms_norm_eps", 1e-6)
    x = tensors.rows("model.embed_tokens.weight", ids) * at_embedding
    for layer in range(config["num_hidden_layers"]):
        w = tensors.below(f"model.layers.{layer}.")
        x = x + at_branch * _llama_attention(config, w, _rms(x, w["input_layernorm.weight"], eps), layer)
        h = _rms(x, w["post_attention_layernorm.weight"], eps)
        watch(layer, h)
        x = x + at_branch * _gated_ffn(config, w, h)
    x = _rms(x, tensors["model.norm.weight"], eps) * at_head
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
        h = _layer_norm(x, w, "self_attn_layer_norm", 1e-5)
        q, k, v = (_split(_linear(h, w, f"self_attn.{part}_proj"), heads) for part in "qkv")
        x = x + _linear(_attend(q, k, v), w, "self_attn.out_proj")
        h = _layer_norm(x, w, "final_layer_norm", 1e-5)
        watch(layer, h)
        x = x + _linear(_activation(config["activation_function"], 0.0)(_linear(h, w, "fc1")), w, "fc2")
    x = _layer_norm(x, tensors.below(root), "final_layer_norm", 1e-5)
    return tensors.scores(_head(config, f"{root}embed_tokens"), x)


def _is_projected(config: Config) -> bool:
    return config.get("word_embed_proj_dim") not in (None, config["hidden_size"])


def _falcon(config: Config, tensors: Tensors, ids: npt.NDArray, watch: Watch) -> Array:
    """Attention and ffn read the same stream side by side: after two norms (40b) or one (7b)."""
    if config.get("alibi") or not config.get("parallel_attn", True):
        raise ValueError("falcon with alibi or without parallel attention (falcon-rw) has no reference")
    eps = config["layer_norm_epsilon"]
    act = _activation(config.get("activation", "gelu"), 0.0)
    x = tensors.rows("transformer.word_embeddings.weight", ids)
    for layer in range(config["num_hidden_layers"]):
        w = tensors.below(f"transformer.h.{layer}.")
        norms = ("ln_attn", "ln_mlp") if "ln_attn.weight" in w else ("input_layernorm", "input_layernorm")
        for_attention, for_ffn = (_layer_norm(x, w, norm, eps) for norm in norms)
        watch(layer, for_ffn)
        ffn = _linear(act(_linear(for_ffn, w, "mlp.dense_h_to_4h")), w, "mlp.dense_4h_to_h")
        x = x + _falcon_attention(config, w, for_attention) + ffn
    x = _layer_norm(x, tensors.below("transformer."), "ln_f", eps)
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
            return config.get("sliding_window", 4096)  # null: all
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
    tables = [table for name in ("rope_parameters", "rope_scaling") if (table := config.get(name))]
    base = next((t["rope_theta"] for t in (config, *tables) if t.get("rope_theta")), 10_000.0)
    frequency = base ** (-2 * np.arange(size // 2) / size)
    amplitude = 1.0
    scaling = next((table for table in tables if _rope_type(table) != "default"), {})
    match _rope_type(scaling):
        case "default":
            pass
        case "linear":
            frequency = frequency / scaling["factor"]
        case "llama3":
            frequency = _llama3(frequency, scaling, config)
        case "yarn":
            frequency, amplitude = _yarn(frequency, scaling, base, config)
        case other:
            raise ValueError(f"no reference for rope type {other!r}")
    return amplitude * np.exp(1j * np.outer(np.arange(length), frequency))


def _rope_type(scaling: Config) -> str:
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _trained_context(scaling: Config, config: Config) -> int:
    names = ("original_max_position_embeddings", "max_position_embeddings")
    return scaling.get(names[0]) or config.get(names[0]) or config[names[1]]


def _llama3(frequency: Array, scaling: Config, config: Config) -> Array:
    """Slow pairs turn `factor` times slower, fast ones as before, between them a mixture."""
    turns_in_context = _trained_context(scaling, config) * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    fast = np.clip((turns_in_context - low) / (high - low), 0, 1)
    return fast * frequency + (1 - fast) * frequency / scaling["factor"]


def _yarn(frequency: Array, scaling: Config, base: float, config: Config) -> tuple[Array, float]:
    """Like llama3, but the mixture is linear in the number of the pair, and what is turned also grows."""
    context = _trained_context(scaling, config)
    size = 2 * len(frequency)

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (2 * math.pi * times)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slow = np.clip((np.arange(size // 2) - first) / max(last - first, 0.001), 0, 1)
    return (1 - slow) * frequency + slow * frequency / scaling["factor"], _yarn_amplitude(scaling)


def _yarn_amplitude(scaling: Config) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor"):
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


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
        case "silu" | "swish":
            return lambda x: x * (1 + np.tanh(x / 2)) / 2  # x sigmoid(x), without an exp that could overflow
        case _:
            raise ValueError(f"no reference for activation {kind!r}")


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


def _head(config: Config, embedding: str) -> str:
    """The name of the head's table."""
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = model_type(config) in TIED_UNLESS_SAID
    return f"{embedding}.weight" if tied else "lm_head.weight"


def _linear(x: Array, w: Tensors, name: str) -> Array:
    """x W^T, plus the bias where the file has one."""
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def _split(x: Array, heads: int) -> Array:
    """[T, N * H] -> [N, T, H]"""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)
