"""What the programs of a mixture of experts compute beside those of `bodies`: routing, and experts in place of neurons.

A layer of such a model is attention and router in one program, then on both sides the experts that the tokens chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dynajax.config import ModelSpec
from dynajax.models.decoder import AnyAttention, RoutingBlock, add_ffn
from dynajax.ops.experts import grouped_experts, routed_experts
from dynajax.programs.bodies import Parts, attend_chunk, attend_rows, embed_rows, head
from predictors.routing import corrected

HostExperts = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]  # h, ids, weights, active -> y_cold


def route_rows(block: AnyAttention, routing: RoutingBlock, k, v, x, y_cold, positions, *, prefix: int):
    """`attend_rows`, and where its tokens go: -> x, h [B,D], experts [B,K] int32, weights [B,K], and the caches."""
    x, h, k, v = attend_rows(block, k, v, x, y_cold, positions, prefix=prefix)
    ids, weights = routing.route(routing.logits(h))
    return x, h, ids, weights, k, v


def route_chunk(block: AnyAttention, routing: RoutingBlock, k, v, xs, y_cold, row, start, *, prefix: int):
    """`attend_chunk`, and where its tokens go: -> xs, h [T,D], experts [T,K], weights [T,K], and the caches."""
    xs, h, k, v = attend_chunk(block, k, v, xs, y_cold, row, start, prefix=prefix)
    ids, weights = routing.route(routing.logits(h))
    return xs, h, ids, weights, k, v


def always_rows(routing: RoutingBlock, x, h):
    """x [B,D] plus what every token gets: the shared expert, or a layer's only FFN."""
    y = routing.always(h)
    assert y is not None, "this layer has nothing for every token"
    return add_ffn(routing.spec, x, y)


def always_chunk(routing: RoutingBlock, xs, h, start):
    """The same at the T = h.shape[0] positions of xs [S,D] from `start`."""
    old = jax.lax.dynamic_slice_in_dim(xs, start, h.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(xs, always_rows(routing, old, h), start, axis=0)


def experts_rows(x, h, parts: Parts, slots, rows, weights, *, spec: ModelSpec):
    """x [B,D] plus the share of some slots of a pool: slots [A], the tokens of each [A,C], their weights [A,C]."""
    y = grouped_experts(h, parts, slots, rows, weights, width=spec.unit_rows, activation=spec.activation)
    return add_ffn(spec, x, y)


def experts_chunk(xs, h, parts: Parts, slots, rows, weights, start, *, spec: ModelSpec):
    """The same at the T = h.shape[0] positions of xs [S,D] from `start`."""
    old = jax.lax.dynamic_slice_in_dim(xs, start, h.shape[0])
    new = experts_rows(old, h, parts, slots, rows, weights, spec=spec)
    return jax.lax.dynamic_update_slice_in_dim(xs, new, start, axis=0)


def foretell(routing: RoutingBlock, h, shift, down, up):
    """Where tokens are expected to go in a later layer, by its router: h [B,D] corrected (`predictors.routing`) by
    shift [D], down [r,D] and up [D,r] -> experts [B,K] int32."""
    return routing.route(routing.logits(corrected(h, shift, down, up)))[0]


def routed_rows(routing: RoutingBlock, x, h, active, parts: Parts, host: HostExperts | None, where):
    """A layer's experts inside of a program: -> x [B,D] with the pool's share, the host's y_cold, and how many pairs
    were found in the pool, None if that is empty. where [E]: the slot of each expert, -1 on the host."""
    spec = routing.spec
    ids, weights = routing.route(routing.logits(h))
    y_cold = jnp.zeros_like(h) if host is None else host(h, ids, weights, active)
    if not parts:
        return x, y_cold, None
    found = (where[ids] >= 0) & active[:, None]
    weights = jnp.where(found, weights, jnp.float32(0))
    sizes = {"width": spec.unit_rows, "activation": spec.activation}
    y = routed_experts(h, parts, jnp.maximum(where, 0), ids, weights, **sizes)
    return add_ffn(spec, x, y), y_cold, jnp.sum(found, dtype=jnp.int32)


def token_rows(ends, blocks, caches, pools, hosts: Sequence[HostExperts | None], state, *, prefix: int):
    """A whole decode step in one program -> logits [B,V], tally, ks, vs. See `bodies.token_rows`.

    blocks: (AttentionBlock, RoutingBlock) of every layer. pools, hosts and where: of the layers that have experts, in
    their order; where [E] is the slot of an expert, -1 on the host. The tally gains the pairs found in a pool.
    """
    norm, table, tables = ends
    start, tally, positions, active, where = state
    spec = blocks[0][0].spec
    ks, vs = map(list, caches)
    x = embed_rows(tables, start, positions, spec=spec) if tables else start
    y_cold = none = jnp.zeros((x.shape[0], spec.hidden), jnp.float32)
    layers = spec.unit_layers
    for i, (block, routing) in enumerate(blocks):
        x, h, ks[i], vs[i] = attend_rows(block, ks[i], vs[i], x, y_cold, positions, prefix=prefix)
        y_cold = none
        if (same := routing.always(h)) is not None:
            x = add_ffn(spec, x, same)
        if i in layers:
            m = layers.index(i)
            x, y_cold, found = routed_rows(routing, x, h, active, pools[m], hosts[m], where[m])
            tally = tally if found is None else tally.at[i].add(found)
    return head(norm, table, x, y_cold, spec=spec), tally, ks, vs
