"""The routed experts that lie in one pool: of every live slot the tokens that go there, one expert after the other."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dynajax.config import Activation
from dynajax.ops.ffn import as_stored, combine, pool_ffn_reference
from dynajax.ops.linear import contract


def grouped_experts_reference(h, parts, slots, rows, weights, *, width, activation):
    """What `grouped_experts` must compute, one token of one expert at a time."""
    y = jnp.zeros(h.shape, jnp.float32)
    for slot, at, weight in zip(slots, rows, weights, strict=True):
        mine = tuple(part[slot * width : (slot + 1) * width] for part in parts)
        for row, scale in zip(at, weight, strict=True):
            if scale != 0:
                y = y.at[row].add(scale * pool_ffn_reference(h[row][None], mine, activation)[0])
    return y


@jax.named_scope("experts")
def grouped_experts(
    h: jax.Array,  # [T, D] float32
    parts: tuple[jax.Array, ...],  # (gate,) up, down, each [G * W, D]: expert after expert
    slots: jax.Array,  # [A] int32, which experts of the pool
    rows: jax.Array,  # [A, C] int32, the tokens that go to each, any where the weight is 0
    weights: jax.Array,  # [A, C] float32
    *,
    width: int,  # W
    activation: Activation,
) -> jax.Array:
    """y[t] = sum over the pairs (a, c) with rows[a, c] = t of weights[a, c] FFN_slots[a](h[t]) -> [T, D] float32.

    A scan over the experts, so that no temporary is larger than one of them and its tokens. What a weight of 0 would
    multiply is left out, whatever it is; on the CPU backend an expert without tokens costs nothing (a GPU would have to
    ask the host whether it may skip one).
    """

    def add(y: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        slot, at, weight = group
        mine = [jax.lax.dynamic_slice_in_dim(part, slot * width, width) for part in parts]
        values = _values(h.at[at].get(mode="clip"), mine[:-1], activation)
        out = contract("CW,WD->CD", values * weight[:, None], mine[-1])
        return y.at[at].add(jnp.where(weight[:, None] != 0, out, jnp.float32(0))), None

    def add_if_any(y: jax.Array, group: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return jax.lax.cond(jnp.any(group[2] != 0), lambda: add(y, group)[0], lambda: y), None

    def scan(step: Callable) -> Callable[..., jax.Array]:
        return lambda *groups: jax.lax.scan(step, jnp.zeros(h.shape, jnp.float32), groups)[0]

    return jax.lax.platform_dependent(slots, rows, weights, cpu=scan(add_if_any), default=scan(add))


def _values(h: jax.Array, ups: list[jax.Array], activation: Activation) -> jax.Array:
    """What multiplies the down rows [C, W]."""
    products = [contract("CD,WD->CW", h, part) for part in ups]
    return combine(products[0], products[1] if len(ups) == 2 else None, activation)[0]


@jax.named_scope("experts_by_id")
def routed_experts(
    h: jax.Array,  # [T, D] float32
    parts: tuple[jax.Array, ...],  # each [E * W, D]: all experts of the layer
    where: jax.Array,  # [E] int32, the slot of each
    ids: jax.Array,  # [T, K] int32
    weights: jax.Array,  # [T, K] float32
    *,
    width: int,
    activation: Activation,
) -> jax.Array:
    """The same where every expert is in the pool, without the host: pair by pair, or with many tokens all experts."""
    tokens, chosen = ids.shape
    experts = where.shape[0]
    if tokens * chosen <= experts:
        rows = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), chosen)[:, None]
        slots, scale = where[ids.reshape(-1)], weights.reshape(-1, 1)
    else:
        rows = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None, :], (experts, tokens))
        goes = ids[None, :, :] == jnp.arange(experts, dtype=jnp.int32)[:, None, None]
        slots, scale = where, jnp.sum(jnp.where(goes, weights[None, :, :], jnp.float32(0)), axis=-1)
    return grouped_experts(h, parts, slots, rows, scale, width=width, activation=activation)


@jax.named_scope("write_rows")
def write_rows(part: jax.Array, rows: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """part [G * W, D], donated by the caller, with rows [r, D] in the host's type at `start`, and a small fence; packed
    ones have an axis more.

    The fence becomes ready together with the part and is never donated; see `ops.ffn.write_slots`.
    """
    new = as_stored(rows, part.dtype)
    return jax.lax.dynamic_update_slice_in_dim(part, new, start, axis=0), start + jnp.int32(0)
