"""Attention over a prefix of the KV cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from dynajax.ops.linear import contract
from hostcompute import ffi


@jax.named_scope("attention")
def attention(
    q: jax.Array,  # [B, T, N, H] float32
    k: jax.Array,  # [B, S, KV, H] any float type
    v: jax.Array,  # [B, S, KV, H'], of the size of k or another
    positions: jax.Array,  # [B, T] int32, the absolute position of each query
    window: int | None = None,  # keys a query sees, its own included; None: all up to its own
    scale: float | None = None,  # of q k; None: H ** -0.5
    bias: jax.Array | None = None,  # [B, N, T, S] float32, added to the scaled scores; 1 row for all is fine
) -> jax.Array:
    """softmax(scale q k) v over keys 0..position; grouped queries share a KV head. -> [B, T, N, H'].

    Key s of row b is taken to sit at position s, so a cache prefix longer than the sequence is fine:
    keys behind the query are masked, whatever they hold (they must be finite). A query that sees all keys
    of a text, wherever it is itself, as in an encoder, is given the position of the last one.
    """
    batch, length, heads, size = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, length, k.shape[2], groups, size) * jnp.float32(size**-0.5 if scale is None else scale)
    scores = contract("BTKGH,BSKH->BKGTS", q, k)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, (batch, *bias.shape[1:])).reshape(scores.shape)
    keys, query = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :], positions[:, :, None]
    seen = keys <= query  # [B, T, S]
    if window is not None:
        seen &= keys > query - window
    scores = jnp.where(seen[:, None, None, :, :], scores, jnp.float32(-1e30))
    out = contract("BKGTS,BSKH->BTKGH", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(batch, length, heads, v.shape[-1])


@jax.named_scope("attention")
def cached_attention(
    q: jax.Array,  # [B, T, N, H] float32
    k: jax.Array,  # [B, S, KV, H], the whole cache
    v: jax.Array,  # [B, S, KV, H']
    positions: jax.Array,  # [B, T] int32, below prefix
    *,
    prefix: int,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`attention` over the first `prefix` keys of a cache -> [B, T, N, H'].

    On the CPU backend the host's kernel reads a cache of any type as it lies there, and only the keys that are seen.
    Has no gradient.
    """
    plain = partial(_prefix_attention, prefix=prefix, window=window, scale=scale)
    host = partial(_attention_on_cpu, prefix=prefix, window=window, scale=scale)
    return jax.lax.platform_dependent(q, k, v, positions, cpu=host, default=plain)


def _prefix_attention(q, k, v, positions, *, prefix: int, window: int | None, scale: float | None) -> jax.Array:
    return attention(q, k[:, :prefix], v[:, :prefix], positions, window, scale)


def _attention_on_cpu(q, k, v, positions, *, prefix: int, window: int | None, scale: float | None) -> jax.Array:
    if ffi.unavailable() is not None:
        return _prefix_attention(q, k, v, positions, prefix=prefix, window=window, scale=scale)
    return ffi.attend_ffi(q, k, v, positions, scale=q.shape[-1] ** -0.5 if scale is None else scale, window=window)
