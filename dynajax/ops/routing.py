"""Which experts a token goes to; and the FFN of a mixture as one plain product, for training and as an oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dynajax.config import Activation, RouterSpec
from dynajax.ops.ffn import combine
from dynajax.ops.linear import contract

LOWEST = -1e30  # below every score; a mask need not be infinite


def router_logits(
    h: jax.Array,  # [..., D] float32
    weight: jax.Array,  # [E, D]
    bias: jax.Array | None,  # [E]
    router: RouterSpec,
) -> jax.Array:
    """[..., E] float32."""
    logits = contract("TD,ED->TE", h.reshape(-1, h.shape[-1]), weight.astype(jnp.float32) if router.float32 else weight)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None, :]
    return logits.reshape(*h.shape[:-1], weight.shape[0])


@jax.named_scope("route")
def route(
    logits: jax.Array,  # [T, E] float32
    selection_bias: jax.Array | None,  # [E]
    router: RouterSpec,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token [T, K] int32, best first (of equals the one of lower number), and their weights."""
    scores = logits
    if router.score == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    elif router.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    choosing = scores if selection_bias is None else scores + selection_bias.astype(jnp.float32)[None, :]
    if router.groups > 1:
        choosing = _within_groups(choosing, router)
    _, ids = jax.lax.top_k(choosing, router.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if router.score == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if router.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.float32(router.epsilon))
    return ids, weights if router.scale == 1.0 else weights * jnp.float32(router.scale)


def _within_groups(scores: jax.Array, router: RouterSpec) -> jax.Array:
    """scores [T, E] with those outside of the best groups lowered."""
    grouped = scores.reshape(scores.shape[0], router.groups, -1)
    best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1) if router.group_rank == "top2" else grouped.max(axis=-1)
    _, kept = jax.lax.top_k(best, router.top_groups)
    mask = jnp.any(kept[:, :, None] == jnp.arange(router.groups, dtype=jnp.int32)[None, None, :], axis=1)
    return jnp.where(mask[:, :, None], grouped, jnp.float32(LOWEST)).reshape(scores.shape)


def first_come(ids: jax.Array, experts: int, capacity: int) -> jax.Array:
    """Which tokens their experts take [B, T, K]: of each sequence the first `capacity` that come to an expert.

    ids [B, T, K]: their experts. Example: 0, 0, 1, 0 and a capacity of 2 -> all but the last.
    """
    chosen = ids[..., None] == jnp.arange(experts, dtype=jnp.int32)[None, None, None, :]
    so_far = jnp.cumsum(jnp.any(chosen, axis=2), axis=1, dtype=jnp.int32)  # [B, T, E], the token itself included
    return jnp.take_along_axis(so_far, ids, axis=2) <= capacity


def spread(ids: jax.Array, weights: jax.Array, experts: int) -> jax.Array:
    """Weights [T, K] of the experts ids [T, K] -> [T, E], zero for all others."""
    chosen = ids[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None, :]
    return jnp.sum(jnp.where(chosen, weights[:, :, None], jnp.float32(0)), axis=1)


def all_experts(
    h: jax.Array,  # [T, D] float32
    parts: tuple[jax.Array, ...],  # (gate,) up, down, each [E * W, D]: one neuron a row, expert after expert
    weights: jax.Array,  # [T, E], zero where a token does not go
    activation: Activation,
) -> jax.Array:
    """sum over e of weights[t, e] FFN_e(h[t]) -> [T, D]: every expert for every token."""
    *ups, down = parts
    products = [contract("TD,FD->TF", h, part) for part in ups]
    values, _ = combine(products[0], products[1] if len(ups) == 2 else None, activation)
    weighed = values.reshape(*weights.shape, -1) * weights[:, :, None]
    return contract("TF,FD->TD", weighed.reshape(values.shape), down)
