"""The FFN over unit-major rows, gated or not: whole, or over the live slots of a device pool."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from dynajax.config import Activation
from dynajax.ops.linear import as_weights, contract
from hostcompute import ffi

MOST_SKIPPING = 4  # tokens for which leaving out what is zero was measured to pay,
LEAST_LISTED = 17  # and from so many on again (many_tokens of hostcompute/src/plan.h), where the kernel counts them


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The FFN's non-linearity on one projection; all but silu give exact zeros."""
    match activation.kind:
        case "relu" | "drelu":
            return jnp.maximum(x, 0)
        case "fatrelu":
            return jnp.where(x >= jnp.asarray(activation.threshold, x.dtype), x, jnp.zeros_like(x))
        case "silu":
            return x * jax.nn.sigmoid(x)
    raise ValueError(f"activation must be relu, fatrelu, silu or drelu, got {activation.kind!r}")


def pool_ffn_reference(h: jax.Array, parts: tuple[jax.Array, ...], activation: Activation) -> jax.Array:
    """What `pool_ffn` must compute, one plain product after the other in float32. h [T,D], parts [G,D] -> [T,D]."""
    *ups, down = (as_weights(part).astype(jnp.float32) for part in parts)
    act = activate(h @ ups[0].T, activation)
    if len(ups) == 2:
        up = h @ ups[1].T
        act = act * (activate(up, activation) if activation.kind == "drelu" else up)
    return act @ down


def combine(first: jax.Array, up: jax.Array | None, activation: Activation) -> tuple[jax.Array, jax.Array]:
    """The neurons' values, and which are live: the activation is not zero (drelu: neither of the two is).

    first: the gate's products, or those of up in a model without a gate, where `up` is None.
    """
    act = activate(first, activation)
    if up is None:
        return act, act != 0
    if activation.kind == "drelu":
        act = act * activate(up, activation)
        return act, act != 0
    return act * up, act != 0


@jax.named_scope("pool_ffn")
def pool_ffn(
    h: jax.Array,  # [T, D] float32, the FFN's input
    parts: tuple[jax.Array, ...],  # (gate,) up, down, each [G, D]: one neuron a row
    activation: Activation,
    admit: jax.Array | None = None,  # [T, G] bool: what is not admitted adds nothing; None admits all
    *,
    skip_zeros: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The part of the FFN that lives in a pool -> [T, D] float32, and which slots are admitted and live [T, G].

    The host adds the units that are not in the pool. The parts are separate arrays because slicing one [G, P, D] array
    costs a temporary as large as the pool. On the CPU backend the host's kernels compute this too, and of few tokens
    and of many leave out of up and down what is zero, unless `skip_zeros` is false; everywhere else, and in
    gradients, it is `pool_ffn_products`.
    """
    return _pool_ffn(activation, skip_zeros, h, parts, admit)[:2]


@jax.named_scope("pool_ffn")
def counted_pool_ffn(
    h: jax.Array, parts: tuple[jax.Array, ...], activation: Activation, *, skip_zeros: bool = True
) -> tuple[jax.Array, jax.Array]:
    """`pool_ffn` of all slots, and how many of them are live [T] int32: the kernel knows, XLA would have to add up."""
    y, _, counts = _pool_ffn(activation, skip_zeros, h, parts, None)
    return y, counts


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _pool_ffn(activation: Activation, skip_zeros: bool, h, parts, admit) -> tuple[jax.Array, jax.Array, jax.Array]:
    plain = partial(_counted_products, activation=activation)
    host = partial(_pool_ffn_on_cpu, activation=activation, skip_zeros=skip_zeros)
    return jax.lax.platform_dependent(h, parts, admit, cpu=host, default=plain)


@_pool_ffn.defjvp
def _pool_ffn_jvp(activation: Activation, skip_zeros: bool, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(partial(_counted_products, activation=activation), primals, tangents)


def _pool_ffn_on_cpu(h, parts, admit, *, activation: Activation, skip_zeros: bool) -> tuple:
    if ffi.unavailable() is not None:
        return _counted_products(h, parts, admit, activation=activation)
    threshold = activation.threshold if activation.kind == "fatrelu" else 0.0
    skips = skip_zeros and (len(h) <= MOST_SKIPPING or len(h) >= LEAST_LISTED)
    return ffi.pool_ffn_ffi(h, parts, admit, activation=activation.kind, threshold=threshold, skip_zeros=skips)


def _counted_products(h, parts, admit, *, activation: Activation) -> tuple[jax.Array, jax.Array, jax.Array]:
    y, live = pool_ffn_products(h, parts, admit, activation=activation)
    return y, live, jnp.sum(live, axis=1, dtype=jnp.int32)


def pool_ffn_products(
    h: jax.Array, parts: tuple[jax.Array, ...], admit: jax.Array | None = None, *, activation: Activation
) -> tuple[jax.Array, jax.Array]:
    """`pool_ffn` as one product after the other, zeros included."""
    *ups, down = parts
    products = [contract("TD,GD->TG", h, part) for part in ups]
    values, live = combine(products[0], products[1] if len(ups) == 2 else None, activation)
    if admit is not None:
        values, live = jnp.where(admit, values, jnp.float32(0)), live & admit
    return contract("TG,GD->TD", values, down), live


def as_stored(rows: jax.Array, kind: jnp.dtype) -> jax.Array:
    """Rows of the host's type in that of a pool; of bfloat16 and of packed ones the same bytes."""
    if (rows.dtype == jnp.uint8) != (kind == jnp.uint8):
        raise ValueError(f"packed rows fill packed pools and others do not, got {rows.dtype} for a pool of {kind}")
    return jax.lax.bitcast_convert_type(rows, jnp.uint16) if kind == jnp.uint16 else rows.astype(kind)


def write_slots_reference(parts, rows, slots):
    """What `write_slots` must do, one unit at a time, for parts in the type of `rows` (W = 1)."""
    for index, slot in enumerate(slots):
        parts = tuple(part.at[slot].set(rows[index, p, 0]) for p, part in enumerate(parts))
    return parts


@jax.named_scope("write_slots")
def write_slots(
    parts: tuple[jax.Array, ...],  # P arrays [G*W, D], or packed ones [G*W, groups, n]; donated by the caller
    rows: jax.Array,  # [n, P, W, D] in the host's type; packed [n, P, W, groups, n]
    slots: jax.Array,  # [n] int32, distinct
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The parts with units `rows` written into `slots`, converted to the pool's type, and a small fence.

    The fence becomes ready together with the parts and is never donated: whoever filled the memory behind
    `rows` waits for it before using that memory again.
    """
    count, _, width, *row = rows.shape
    where = (slots[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None, :]).reshape(count * width)
    written = []
    for p, part in enumerate(parts):
        new = as_stored(rows[:, p].reshape(count * width, *row), part.dtype)
        written.append(part.at[where].set(new, unique_indices=True))
    return tuple(written), slots[:1]
