"""Rotary positions, and how a trained context is stretched."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dynajax.reference.tensors import Array, Config


def rotated(x: Array, turn: npt.NDArray[np.complex128]) -> Array:
    """x [N, T, H]: the pair (i, i + H/2) is one complex number, turned by its position."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def rotated_neighbours(x: Array, turn: npt.NDArray[np.complex128]) -> Array:
    """x [N, T, H]: the same of the pairs (2 i, 2 i + 1)."""
    z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def turns(config: Config, length: int, size: int) -> npt.NDArray[np.complex128]:
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
        return _grown(scaling, weight)

    if scaling.get("attention_factor"):
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


def _grown(scaling: Config, weight: float) -> float:
    return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0


def deepseek_sharpening(config: Config) -> float:
    """By what DeepSeek multiplies the scores of attention in a stretched context: mscale_all_dim's growth, squared."""
    tables = [table for name in ("rope_parameters", "rope_scaling") if (table := config.get(name))]
    scaling = next((table for table in tables if _rope_type(table) != "default"), {})
    return _grown(scaling, scaling["mscale_all_dim"]) ** 2 if scaling.get("mscale_all_dim") else 1.0
