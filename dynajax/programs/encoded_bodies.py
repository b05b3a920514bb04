"""What the programs of a model with an encoder compute beside those of `mixture_bodies`.

The encoder reads a whole prompt [T, D] of one sequence at once, in the workspace `xs`. What comes out of it becomes
keys and values of every decoder layer, which decoding looks at and never writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dynajax.models.decoder import RoutingBlock, add_ffn, normed
from dynajax.models.encoder_decoder import DecoderBlock, EncoderBlock
from dynajax.programs.bodies import Parts, embed_rows, head, write_each_kv, write_kv
from dynajax.programs.mixture_bodies import HostExperts, routed_rows


def read(block: EncoderBlock, routing: RoutingBlock | None, xs, y_cold, length):
    """The first T = y_cold.shape[0] tokens of xs [S,D], `length` of which are a text -> xs, h [T,D], and with experts
    where each token wants to go: experts [T,1], weights [T,1]."""
    size = y_cold.shape[0]
    x, h = block.read(add_ffn(block.spec, xs[:size], y_cold)[None], length[None])
    xs = jax.lax.dynamic_update_slice_in_dim(xs, x[0], jnp.int32(0), axis=0)
    return (xs, h[0]) if routing is None else (xs, h[0], *routing.route(routing.logits(h[0])))


def seen(norm, xs, y_cold, *, spec):
    """What comes out of the encoder, in place of the first T = y_cold.shape[0] tokens of xs [S,D]."""
    x = normed(spec, add_ffn(spec, xs[: y_cold.shape[0]], y_cold), norm, None)
    return jax.lax.dynamic_update_slice_in_dim(xs, x, jnp.int32(0), axis=0)


def remember(block: DecoderBlock, k, v, xs, row, *, size: int):
    """A decoder layer's keys and values [B,S,KV,H] of what the encoder saw, the first `size` tokens, for one row."""
    k_new, v_new = block.remember(xs[:size][None])
    start = jnp.int32(0)
    return write_kv(k, k_new, row, start), write_kv(v, v_new, row, start)


def attend_rows(block: DecoderBlock, k, v, x, y_cold, positions, source, *, prefix: int):
    """`bodies.attend_rows`, and a look at the encoder's keys and values and their lengths: source (k, v, [B])."""
    where = positions[:, None]
    x = add_ffn(block.spec, x, y_cold)[:, None, :]
    q, k_new, v_new = block.project(x, where)
    k, v = write_each_kv(k, k_new, positions), write_each_kv(v, v_new, positions)
    x, h = block.look(x, block.mix(q, k[:, :prefix], v[:, :prefix], where), *source)
    return x[:, 0], h[:, 0], k, v


def route_rows(block: DecoderBlock, routing: RoutingBlock, k, v, x, y_cold, positions, source, *, prefix: int):
    """The same, and where its tokens go: -> x, h [B,D], experts [B,1], weights [B,1], and the caches."""
    x, h, k, v = attend_rows(block, k, v, x, y_cold, positions, source, prefix=prefix)
    return x, h, *routing.route(routing.logits(h)), k, v


def token_rows(ends, blocks, caches, pools, hosts: Sequence[HostExperts | None], state, source, *, prefix: int):
    """`mixture_bodies.token_rows` of the decoder. blocks, caches and source (ks, vs, lengths): of its layers; pools and
    hosts: of all layers that have experts."""
    norm, table, tables = ends
    start, tally, positions, active, where = state
    spec = blocks[0][0].spec
    ks, vs = map(list, caches)
    seen_ks, seen_vs, lengths = source
    x = embed_rows(tables, start, positions, spec=spec)
    y_cold = none = jnp.zeros((x.shape[0], spec.hidden), jnp.float32)
    for i, layer in enumerate(spec.stepped):
        block, routing = blocks[i]
        here = (seen_ks[i], seen_vs[i], lengths)
        x, h, ks[i], vs[i] = attend_rows(block, ks[i], vs[i], x, y_cold, positions, here, prefix=prefix)
        y_cold = none
        if (same := routing.always(h)) is not None:
            x = add_ffn(spec, x, same)
        if layer in spec.unit_layers:
            m = spec.unit_layers.index(layer)
            given: tuple[Parts, HostExperts | None, jax.Array] = pools[m], hosts[m], where[m]
            x, y_cold, found = routed_rows(routing, x, h, active, *given)
            tally = tally if found is None else tally.at[layer].add(found)
    return head(norm, table, x, y_cold, spec=spec), tally, ks, vs
