"""Relative positions in buckets (Raffel et al. 2020): near distances have one each, far ones share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.config import EncoderSpec


def buckets_of(distance: npt.NDArray[np.int64], encoder: EncoderSpec, *, causal: bool) -> npt.NDArray[np.int32]:
    """The bucket of every distance (key minus query). Half of the buckets are of one distance each, the others grow
    with the logarithm up to `max_distance`. Where keys may lie behind a query, those have the second half of all.

    In float32, as the model was trained: where a bucket begins must not depend on a rounding.
    """
    count, first = encoder.buckets, np.zeros_like(distance)
    if causal:
        distance = np.maximum(-distance, 0)
    else:
        count //= 2
        first, distance = np.where(distance > 0, count, 0), np.abs(distance)
    exact = count // 2
    growth = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    steps = growth / np.float32(math.log(encoder.max_distance / exact)) * np.float32(count - exact)
    far = np.minimum(exact + np.maximum(steps, 0).astype(np.int64), count - 1)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)


@jax.named_scope("relative_bias")
def relative_bias(
    table: jax.Array,  # [R, N]
    positions: jax.Array,  # [B, T] int32, of the queries
    keys: int,  # S, at positions 0 .. S-1; no query that counts is behind them
    encoder: EncoderSpec,
    *,
    causal: bool,
) -> jax.Array:
    """What is added to the scores of attention [B, N, T, S]; which keys are seen is not decided here."""
    numbers = jnp.asarray(buckets_of(np.arange(-keys + 1, keys), encoder, causal=causal))
    apart = jnp.arange(keys, dtype=jnp.int32)[None, None, :] - positions[:, :, None]
    found = numbers.at[apart + jnp.int32(keys - 1)].get(mode="clip")
    return jnp.transpose(table.astype(jnp.float32)[found], (0, 3, 1, 2))
