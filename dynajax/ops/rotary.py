"""Rotary positions of the llama family, with the ways in which a trained context is stretched."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.config import Rope


def frequencies(rope: Rope, size: int) -> npt.NDArray[np.float32]:
    """The angle per position of each pair of a head of `size` dimensions: [H/2]."""
    half = size // 2
    plain = rope.theta ** (-np.arange(half, dtype=np.float64) / half)
    match rope.kind:
        case "default":
            stretched = plain
        case "linear":
            stretched = plain / rope.factor
        case "llama3":  # the share of the plain frequency rises with the turns within the original context
            turns = rope.original_positions * plain / (2 * math.pi)
            kept = np.clip((turns - rope.low_freq) / (rope.high_freq - rope.low_freq), 0, 1)
            stretched = plain * (kept + (1 - kept) / rope.factor)
        case "yarn":
            kept = 1 - _yarn_ramp(rope, size)
            stretched = plain * (kept + (1 - kept) / rope.factor)
    return stretched.astype(np.float32)


def _yarn_ramp(rope: Rope, size: int) -> npt.NDArray[np.float64]:
    """0 where a pair turns more than beta_fast times within the original context, 1 below beta_slow turns: [H/2]."""

    def pair_of(turns: float) -> float:
        return size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    return np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)


def rotate(
    x: jax.Array,  # [B, T, N, H] float32
    positions: jax.Array,  # [B, T] int32
    rope: Rope,
) -> jax.Array:
    """Rotate pairs (i, i + H/2) by position * frequency: the rotate-half form of the llama family.

    Interleaved pairs (2 i, 2 i + 1) come out as (i, i + H/2), in queries and keys alike, so that scores are the same.
    """
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequencies(rope, x.shape[-1])[None, None, None, :]
    scale = jnp.float32(rope.attention_factor)
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    first, second = (x[..., ::2], x[..., 1::2]) if rope.interleaved else (x[..., :half], x[..., half:])
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
