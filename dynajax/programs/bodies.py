"""What each program computes, as pure functions; `cache.py` gives them shapes and compiles them.

Rows: one token in each of B sequences (decode). Chunk: T tokens of one sequence (prefill), which live in the
workspace `xs` [S, D] at their own positions. The residual stream is float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dynajax.config import ModelSpec
from dynajax.models.decoder import AnyAttention, add_ffn, embed, normed, scaled
from dynajax.ops.ffn import combine, counted_pool_ffn, pool_ffn
from dynajax.ops.linear import contract
from predictors.forms import Form, Shape
from predictors.scoring import probabilities, scores, to_uint8

LIVE, ADMITTED = 1, 2  # marks of a slot
HALVINGS = 24  # of the range of scores

Parts = tuple[jax.Array, ...]
HostFfn = Callable[[jax.Array, jax.Array], jax.Array]  # h [T,W], rows that count bool[T] -> y_cold [T,W]
Hosts = Sequence[HostFfn | None]  # one a layer


class Asked(NamedTuple):
    """Whose word a layer's skipping goes by, inside a program; static."""

    layer: int  # behind whose attention it is asked
    form: Form
    density: float | None  # see `score`


class Told(NamedTuple):
    """What such a predictor has on the device: arrays, or their shapes."""

    params: Mapping[str, Any]
    slope: Any
    intercept: Any
    norms: Any  # [F] or None: of the down rows, where no activation is zero: what is wanted is what weighs most


def write_kv(cache: jax.Array, new: jax.Array, row: jax.Array, start: jax.Array) -> jax.Array:
    """Write new [1,T,KV,H] at one row and positions start..; must fit, XLA would shift it silently."""
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(cache, _as_cached(new, cache.dtype), (row, start, zero, zero))


def write_each_kv(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Write new [B,1,KV,H], a token of every row at a position of its own."""
    zero = jnp.zeros((), jnp.int32)
    write = jax.vmap(lambda row, token, at: jax.lax.dynamic_update_slice(row, token, (at, zero, zero)))
    return write(cache, _as_cached(new, cache.dtype), positions)


def _as_cached(new: jax.Array, kind: jnp.dtype) -> jax.Array:
    """In the type of a cache, where uint16 holds the bits of bfloat16."""
    if kind != jnp.uint16:
        return new.astype(kind)
    return jax.lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)


def attend_rows(block: AnyAttention, k, v, x, y_cold, positions, *, prefix: int):
    """x [B,D], y_cold [B,W], positions [B] -> x [B,D], FFN input h [B,W], and the caches with the new keys."""
    where = positions[:, None]
    x = add_ffn(block.spec, x, y_cold)[:, None, :]
    q, k_new, v_new = block.project(x, where)
    k, v = write_each_kv(k, k_new, positions), write_each_kv(v, v_new, positions)
    x, h = block.merge(x, block.mix_cached(q, k, v, where, prefix))
    return x[:, 0], h[:, 0], k, v


def attend_chunk(block: AnyAttention, k, v, xs, y_cold, row, start, *, prefix: int):
    """The T = y_cold.shape[0] tokens of xs [S,D] from `start` -> xs, h [T,W], and the caches."""
    size = y_cold.shape[0]
    x = add_ffn(block.spec, jax.lax.dynamic_slice_in_dim(xs, start, size), y_cold)[None]
    where = (start + jnp.arange(size, dtype=jnp.int32))[None, :]
    q, k_new, v_new = block.project(x, where)
    k, v = write_kv(k, k_new, row, start), write_kv(v, v_new, row, start)
    k_row, v_row = (jax.lax.dynamic_slice_in_dim(c, row, 1) for c in (k, v))
    x, h = block.merge(x, block.mix_cached(q, k_row, v_row, where, prefix))
    return jax.lax.dynamic_update_slice_in_dim(xs, x[0], start, axis=0), h[0], k, v


def hot_rows(x, h, parts: Parts, tally, layer, active, *, spec: ModelSpec, skip_zeros: bool = True):
    """x [B,D] plus the pool's share of the FFN; tally [L] gains the live slots of the active rows [B]."""
    y, counts = counted_pool_ffn(h, parts, spec.activation, skip_zeros=skip_zeros)
    return add_ffn(spec, x, y), tally.at[layer].add(_counted(counts, active))


def _counted(counts, active):
    """counts [B] int32 of the active rows, added up."""
    return jnp.sum(counts * active, dtype=jnp.int32)


def hot_chunk(xs, h, parts: Parts, start, *, spec: ModelSpec, skip_zeros: bool = True):
    """xs [S,D] with the pool's share of the FFN added to the T = h.shape[0] positions from `start`."""
    y, _ = pool_ffn(h, parts, spec.activation, skip_zeros=skip_zeros)
    old = jax.lax.dynamic_slice_in_dim(xs, start, h.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(xs, add_ffn(spec, old, y), start, axis=0)


def hot_admitted_rows(x, h, parts: Parts, bucket, scores, theta, *, spec: ModelSpec, skip_zeros: bool = True):
    """`hot_rows` for the slots whose unit's score reaches theta: bucket [G] slot -> unit, scores [B,F] uint8.

    -> x [B,D], and of every slot [B,G] uint8: ADMITTED if it was computed, LIVE if its activation is not zero then.
    """
    admit = jnp.take(scores, bucket, axis=1, mode="clip") >= theta
    y, live = pool_ffn(h, parts, spec.activation, admit, skip_zeros=skip_zeros)
    return add_ffn(spec, x, y), live.astype(jnp.uint8) * jnp.uint8(LIVE) + admit.astype(jnp.uint8) * jnp.uint8(ADMITTED)


def hot_admitted_chunk(xs, h, parts: Parts, bucket, scores, theta, start, *, spec: ModelSpec, skip_zeros: bool = True):
    """`hot_chunk` for the slots whose unit's score reaches theta, and the same marks [T,G]."""
    old = jax.lax.dynamic_slice_in_dim(xs, start, h.shape[0])
    new, marks = hot_admitted_rows(old, h, parts, bucket, scores, theta, spec=spec, skip_zeros=skip_zeros)
    return jax.lax.dynamic_update_slice_in_dim(xs, new, start, axis=0), marks


def score(params, stream, h, slope, intercept, *, shape: Shape, form: Form, density: float | None):
    """What a predictor says of a layer's neurons [B,F], uint8: 255 times the probability of being live.

    stream, h [B,D]: what `form` may read. With a density the score is relative to the row's own quantile: it reaches
    1/2 for exactly the share `density` of a row's neurons.
    """
    z = scores(params, stream if form.reads == "stream" else h[:, : shape.hidden], shape, form)
    if density is not None:
        z, intercept = z - quantile(z, density), jnp.float32(0)
    return to_uint8(probabilities(z, slope, intercept))


def quantile(z, density: float):
    """Of every row of z [B,F] a value that the largest `density` share of it reaches: [B,1]. Bisection: no sort."""
    wanted = jnp.int32(max(1, round(density * z.shape[1])))

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) * jnp.float32(0.5)
        fits = jnp.sum(z >= middle, axis=1, keepdims=True, dtype=jnp.int32) <= wanted
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    highest = jnp.max(z, axis=1, keepdims=True)
    return jax.lax.fori_loop(0, HALVINGS, halve, (jnp.min(z, axis=1, keepdims=True), highest))[1]


def live_slots(h, parts: Parts, *, spec: ModelSpec):
    """For an observer, the FFN itself is another program's: h [T,W] -> which slots are live [T,G].

    Where the activation has no zeros: how large each slot's value is, float32; all are live.
    """
    *ups, _ = parts
    products = [contract("TD,GD->TG", h, part) for part in ups]
    values, live = combine(products[0], products[1] if len(ups) == 2 else None, spec.activation)
    return live if spec.activation.has_zeros else jnp.abs(values)


def embed_rows(tables: Parts, ids, positions, *, spec: ModelSpec):
    """tables: embeddings [V,D] and, where the model has them, learned positions; ids, positions [B] -> x [B,D]."""
    return embed(spec, tables[0], tables[1] if len(tables) == 2 else None, ids, positions)


def embed_prompt(tables: Parts, xs, ids, *, spec: ModelSpec):
    """The workspace xs [S,D] filled with the embeddings of ids [S]."""
    return xs.at[:].set(embed_rows(tables, ids, jnp.arange(len(ids), dtype=jnp.int32), spec=spec))


def load_chunk(xs, rows, start):
    """xs [S,D] with rows [T,D] that were looked up on the host put at the positions from `start`."""
    return jax.lax.dynamic_update_slice_in_dim(xs, rows, start, axis=0)


def head(norm: Parts, table, x, y_cold, *, spec: ModelSpec):
    """Final norm and head: x [B,D], y_cold [B,W] -> logits [B,V] float32. norm: weight, and bias where it has one."""
    x = normed(spec, add_ffn(spec, x, y_cold), norm[0], norm[1] if len(norm) == 2 else None)
    return contract("BD,VD->BV", scaled(x, spec.logit_scale), table)


def token_rows(ends, blocks, caches, pools, hosts: Hosts, state, *, prefix: int, skip_zeros: bool = True):
    """A whole decode step in one program -> logits [B,V], tally, ks, vs.

    ends: norm, head's table, and the tables of `embed_rows`, () where the embeddings are on the host: then `start` is
    x [B,D], else ids [B]. state: start, tally, positions, active. hosts[i] computes the units of layer i that are not
    on the device, None where all are; pools[i] is () where none is.
    """
    norm, table, tables = ends
    start, tally, positions, active = state
    spec = blocks[0].spec
    ks, vs = map(list, caches)
    x = embed_rows(tables, start, positions, spec=spec) if tables else start
    none = jnp.zeros((x.shape[0], spec.unit_width), jnp.float32)
    y_cold, live = none, [jnp.int32(0)] * len(blocks)
    for i, (block, host) in enumerate(zip(blocks, hosts, strict=True)):
        x, h, ks[i], vs[i] = attend_rows(block, ks[i], vs[i], x, y_cold, positions, prefix=prefix)
        y_cold = none if host is None else host(h, active)
        if pools[i]:
            y, counts = counted_pool_ffn(h, pools[i], spec.activation, skip_zeros=skip_zeros)
            x, live[i] = add_ffn(spec, x, y), _counted(counts, active)
    return head(norm, table, x, y_cold, spec=spec), tally + jnp.stack(live), ks, vs


def token_skipping_rows(
    ends, blocks, caches, pools, told: Sequence[Told], state, *, prefix: int, asked: Sequence[Asked]
):
    """`token_rows` where every unit is on the device, in order, and is computed if its score reaches theta.

    asked and told say of every layer who foretells it. state: start, counts, positions, active, looks, theta. looks [L]
    bool: in which layers all that is live is looked up. counts [3, L] int32 gain, of the active rows: neurons computed;
    in layers looked at, live ones, and those computed.
    """
    norm, table, tables = ends
    start, counts, positions, active, looks, theta = state
    spec = blocks[0].spec
    shape = Shape.of(spec)
    ks, vs = map(list, caches)
    x = embed_rows(tables, start, positions, spec=spec) if tables else start
    none = jnp.zeros((x.shape[0], spec.unit_width), jnp.float32)
    scored: dict[int, jax.Array] = {}
    gained = []
    for i, block in enumerate(blocks):
        x, h, ks[i], vs[i] = attend_rows(block, ks[i], vs[i], x, none, positions, prefix=prefix)
        for target, (at, form, density) in enumerate(asked):
            if at == i:
                params, slope, intercept, _ = told[target]
                scored[target] = score(params, x, h, slope, intercept, shape=shape, form=form, density=density)
        admit = scored.pop(i) >= theta
        y, _ = pool_ffn(h, pools[i], spec.activation, admit)
        x = add_ffn(spec, x, y)
        computed = admit & active[:, None]
        look = partial(_look, h, pools[i], told[i].norms, computed, active, spec=spec, density=asked[i].density)
        seen = jax.lax.cond(looks[i], look, lambda: (jnp.int32(0), jnp.int32(0)))
        gained.append(jnp.stack([jnp.sum(computed, dtype=jnp.int32), *seen]))
    return head(norm, table, x, none, spec=spec), counts + jnp.stack(gained, axis=1), ks, vs


def _look(h, parts: Parts, norms, computed, active, *, spec: ModelSpec, density: float | None):
    """How many of a layer's neurons are live for the active rows, and how many of these were computed [B,F]."""
    live = live_slots(h, parts, spec=spec)
    if density is not None and not spec.activation.has_zeros:
        sizes = live * norms[None, :]
        live = sizes >= quantile(sizes, density)
    live = live & active[:, None]
    return jnp.sum(live, dtype=jnp.int32), jnp.sum(live & computed, dtype=jnp.int32)
