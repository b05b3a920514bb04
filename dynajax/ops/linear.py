"""Matrix products and norms that keep the residual stream in float32, whatever the weights are."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contract(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum in the type of `b` (the weights), accumulated and returned in float32.

    float32 weights ask for full precision: on GPUs the default would be TF32, and placement could
    then change an answer by more than summation order.
    """
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32)


def rms_norm(
    x: jax.Array,  # [..., D] float32
    weight: jax.Array,  # [D]
    eps: float,
) -> jax.Array:
    """x / rms(x) * weight, in float32 (Zhang & Sennrich 2019, without the mean)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def layer_norm(
    x: jax.Array,  # [..., D] float32
    weight: jax.Array,  # [D]
    bias: jax.Array,  # [D]
    eps: float,
) -> jax.Array:
    """(x - mean) / deviation * weight + bias, in float32 (Ba et al. 2016)."""
    ends = (1,) * (x.ndim - 1) + (-1,)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + jnp.float32(eps))
    return centred * scale * weight.astype(jnp.float32).reshape(ends) + bias.astype(jnp.float32).reshape(ends)
