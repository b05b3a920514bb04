"""What each program computes, as pure functions; `cache.py` gives them shapes and compiles them.

Rows: one token in each of B sequences (decode). Chunk: T tokens of one sequence (prefill), which live in the
workspace `xs` [S, D] at their own positions. The residual stream is float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dynajax.config import Activation
from dynajax.models.decoder import AttentionBlock
from dynajax.ops.attention import attention
from dynajax.ops.ffn import pool_ffn
from dynajax.ops.linear import contract, rms_norm

Parts = tuple[jax.Array, ...]
HostFfn = Callable[[jax.Array, jax.Array], jax.Array]  # layer int32, h [T,D] -> y_cold [T,D]
Hosts = Sequence[HostFfn | None]  # one a layer


def _write_kv(cache: jax.Array, new: jax.Array, row: jax.Array, start: jax.Array) -> jax.Array:
    """Write new [1,T,KV,H] at one row and positions start..; must fit, XLA would shift it silently."""
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), (row, start, zero, zero))


def attend_rows(block: AttentionBlock, k, v, x, y_cold, positions, *, prefix: int):
    """x, y_cold [B,D], positions [B] -> x [B,D], FFN input h [B,D], and the caches with the new keys."""
    where = positions[:, None]
    x = (x + y_cold)[:, None, :]
    q, k_new, v_new = block.project(x, where)
    for row in range(x.shape[0]):
        k = _write_kv(k, k_new[row : row + 1], jnp.int32(row), positions[row])
        v = _write_kv(v, v_new[row : row + 1], jnp.int32(row), positions[row])
    x, h = block.merge(x, attention(q, k[:, :prefix], v[:, :prefix], where))
    return x[:, 0], h[:, 0], k, v


def attend_chunk(block: AttentionBlock, k, v, xs, y_cold, row, start, *, prefix: int):
    """Chunk y_cold.shape[0] tokens of xs [S,D] from `start` -> xs, h [T,D], and the caches."""
    size = y_cold.shape[0]
    zero = jnp.zeros((), jnp.int32)
    x = (jax.lax.dynamic_slice_in_dim(xs, start, size) + y_cold)[None]
    where = (start + jnp.arange(size, dtype=jnp.int32))[None, :]
    q, k_new, v_new = block.project(x, where)
    k, v = _write_kv(k, k_new, row, start), _write_kv(v, v_new, row, start)
    window = (1, prefix, *k.shape[2:])
    k_row, v_row = (jax.lax.dynamic_slice(c, (row, zero, zero, zero), window) for c in (k, v))
    x, h = block.merge(x, attention(q, k_row, v_row, where))
    return jax.lax.dynamic_update_slice_in_dim(xs, x[0], start, axis=0), h[0], k, v


def hot_rows(x, h, parts: Parts, tally, layer, active, *, activation: Activation):
    """x [B,D] plus the pool's share of the FFN; tally [L] gains the live slots of the active rows [B]."""
    y, live = pool_ffn(h, parts, activation)
    count = jnp.sum(live & active[:, None], dtype=jnp.int32)
    return x + y, tally.at[layer].add(count)


def hot_chunk(xs, h, parts: Parts, start, *, activation: Activation):
    """xs [S,D] with the pool's share of the FFN added to the T = h.shape[0] positions from `start`."""
    y, _ = pool_ffn(h, parts, activation)
    old = jax.lax.dynamic_slice_in_dim(xs, start, h.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(xs, old + y, start, axis=0)


def embed_rows(table, ids):
    """table [V,D], ids [B] -> x [B,D] float32."""
    return table[ids].astype(jnp.float32)


def embed_prompt(table, xs, ids):
    """The workspace xs [S,D] filled with the embeddings of ids [S]."""
    return xs.at[:].set(table[ids].astype(xs.dtype))


def load_chunk(xs, rows, start):
    """xs [S,D] with rows [T,D] that were looked up on the host put at the positions from `start`."""
    return jax.lax.dynamic_update_slice_in_dim(xs, rows, start, axis=0)


def head(norm, table, x, y_cold, *, eps: float):
    """Final norm and head: x, y_cold [B,D] -> logits [B,V] float32."""
    return contract("BD,VD->BV", rms_norm(x + y_cold, norm, eps), table)


def token_rows(blocks, caches, pools, hosts: Hosts, x, tally, positions, active, *, prefix, activation):
    """Callback mode: a whole decode step in one program -> x, y_cold of the last layer [B,D], tally, ks, vs.

    hosts[i] computes the units of layer i that are not on the device, None where all are; pools[i] is () where
    none is.
    """
    ks, vs = map(list, caches)
    y_cold = jnp.zeros_like(x)
    for i, (block, host) in enumerate(zip(blocks, hosts, strict=True)):
        x, h, ks[i], vs[i] = attend_rows(block, ks[i], vs[i], x, y_cold, positions, prefix=prefix)
        y_cold = jnp.zeros_like(x) if host is None else host(jnp.int32(i), h)
        if pools[i]:
            x, tally = hot_rows(x, h, pools[i], tally, i, active, activation=activation)
    return x, y_cold, tally, ks, vs


def token_chunk(blocks, caches, pools, hosts: Hosts, xs, row, start, *, size, prefix, activation):
    """Callback mode: a prefill chunk through every layer in one program -> xs, ks, vs. Of a prompt only keys and
    values outlive its prefill, so the last layer ends with them."""
    ks, vs = map(list, caches)
    y_cold = jnp.zeros((size, xs.shape[1]), jnp.float32)
    for i, (block, host) in enumerate(zip(blocks, hosts, strict=True)):
        xs, h, ks[i], vs[i] = attend_chunk(block, ks[i], vs[i], xs, y_cold, row, start, prefix=prefix)
        if i == len(blocks) - 1:
            break
        y_cold = jnp.zeros_like(y_cold) if host is None else host(jnp.int32(i), h)
        if pools[i]:
            xs = hot_chunk(xs, h, pools[i], start, activation=activation)
    return xs, ks, vs
