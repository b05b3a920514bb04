"""Products with matrices of few bits (see `dynajax.quant`) that never hold one unpacked.

Of few rows a product multiplies and adds while it unpacks, which XLA fuses into one pass over the packed bytes; of many
rows it unpacks blocks of BLOCK_BYTES and multiplies those. On the CPU backend the host's kernels do both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dynajax.quant import GROUP, ZERO
from hostcompute import ffi

BLOCK_BYTES = 8 * 2**20  # unpacked at once where a product has many rows
FEW_ROWS = 8  # up to which multiplying while unpacking is the faster way
_HIGHEST = jax.lax.Precision.HIGHEST


def unpacked(packed: jax.Array) -> jax.Array:
    """What a packed array stands for, uint8 [..., groups, 4 * bits + 2] -> float32 [..., D]."""
    level, scale = _levels(packed)
    return (level * scale[..., None, None]).reshape(*packed.shape[:-2], packed.shape[-2] * GROUP)


def dot_reference(x: jax.Array, packed: jax.Array) -> jax.Array:
    """What `packed_dot` must compute, with the whole matrix unpacked."""
    return jnp.einsum("TD,OD->TO", x, unpacked(packed), precision=_HIGHEST)


def sum_reference(x: jax.Array, packed: jax.Array) -> jax.Array:
    """What `packed_sum` must compute, with the whole matrix unpacked."""
    return jnp.einsum("TG,GD->TD", x, unpacked(packed), precision=_HIGHEST)


def packed_dot(x: jax.Array, packed: jax.Array) -> jax.Array:
    """x [T, D] float32 times every row of packed [O, groups, n] -> [T, O] float32. No gradient."""
    return jax.lax.platform_dependent(x, packed, cpu=_dot_on_cpu, default=_dot_elsewhere)


def packed_sum(x: jax.Array, packed: jax.Array) -> jax.Array:
    """The rows of packed [G, groups, n], summed with the factors x [T, G] float32 -> [T, D] float32. No gradient."""
    return jax.lax.platform_dependent(x, packed, cpu=_sum_on_cpu, default=_sum_elsewhere)


def _dot_on_cpu(x: jax.Array, packed: jax.Array) -> jax.Array:
    return block_dot(x, packed) if ffi.unavailable() is not None else ffi.dot_rows_ffi(x, packed)


def _sum_on_cpu(x: jax.Array, packed: jax.Array) -> jax.Array:
    return block_sum(x, packed) if ffi.unavailable() is not None else ffi.sum_rows_ffi(x, packed)


def _dot_elsewhere(x: jax.Array, packed: jax.Array) -> jax.Array:
    return fused_dot(x, packed) if len(x) <= FEW_ROWS else block_dot(x, packed)


def _sum_elsewhere(x: jax.Array, packed: jax.Array) -> jax.Array:
    return fused_sum(x, packed) if len(x) <= FEW_ROWS else block_sum(x, packed)


def block_dot(x: jax.Array, packed: jax.Array) -> jax.Array:
    """`packed_dot` on any backend, block after block of the matrix."""
    rows, blocks, rest = _cut(packed)
    tail = dot_reference(x, packed[packed.shape[0] - rest :])
    if not blocks:
        return tail

    def block(at: jax.Array) -> jax.Array:
        return dot_reference(x, jax.lax.dynamic_slice_in_dim(packed, at, rows))

    done = jax.lax.map(block, jnp.arange(blocks, dtype=jnp.int32) * jnp.int32(rows))  # [blocks, T, rows]
    return jnp.concatenate([done.swapaxes(0, 1).reshape(len(x), blocks * rows), tail], axis=1)


def block_sum(x: jax.Array, packed: jax.Array) -> jax.Array:
    """`packed_sum` on any backend, block after block of the matrix."""
    rows, blocks, rest = _cut(packed)
    tail = sum_reference(x[:, packed.shape[0] - rest :], packed[packed.shape[0] - rest :])
    if not blocks:
        return tail

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        at = index * jnp.int32(rows)
        factors = jax.lax.dynamic_slice_in_dim(x, at, rows, axis=1)
        return total + sum_reference(factors, jax.lax.dynamic_slice_in_dim(packed, at, rows))

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(blocks), add, tail)


def fused_dot(x: jax.Array, packed: jax.Array) -> jax.Array:
    """`packed_dot` of few rows. A row of the matrix meets all of x before the next one is read."""
    level, scale = _levels(packed)
    spread = x.reshape(1, len(x), *level.shape[1:])
    terms = level[:, None] * spread * scale[:, None, :, None, None]  # [O, T, groups, 8 / bits, 4 * bits]
    return jnp.sum(terms, axis=(2, 3, 4)).T


def fused_sum(x: jax.Array, packed: jax.Array) -> jax.Array:
    """`packed_sum` of few rows."""
    level, scale = _levels(packed)
    factors = scale[:, None, :] * x.T[:, :, None]  # [G, T, groups]
    return jnp.sum(level[:, None] * factors[..., None, None], axis=0).reshape(len(x), -1)


def _levels(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Levels [..., groups, 8 / bits, 4 * bits] and scales [..., groups] of packed [..., groups, 4 * bits + 2], float32.

    Every step is elementwise or a reshape, so that what reads them fuses with it.
    """
    *outer, groups, size = packed.shape
    count = size - 2
    bits = count // (GROUP // 8)
    row = packed.reshape(*outer, groups * size)
    codes = row[..., : groups * count].reshape(*outer, groups, 1, count)
    shifts = (jnp.arange(8 // bits, dtype=jnp.uint8) * jnp.uint8(bits)).reshape(*(1,) * (len(outer) + 1), -1, 1)
    level = (codes >> shifts) & jnp.full((1,) * codes.ndim, 2**bits - 1, jnp.uint8)
    pairs = row[..., groups * count :].reshape(*outer, groups, 2).astype(jnp.uint16)
    scale = jax.lax.bitcast_convert_type(pairs[..., 0] | (pairs[..., 1] << jnp.uint16(8)), jnp.float16)
    return level.astype(jnp.float32) - jnp.float32(ZERO[bits]), scale.astype(jnp.float32)


def _cut(packed: jax.Array) -> tuple[int, int, int]:
    """Rows of a block, how many blocks there are, and the rows behind the last one."""
    width = packed.shape[1] * GROUP
    rows = max(8, BLOCK_BYTES // (4 * width) // 8 * 8)
    return rows, *divmod(packed.shape[0], rows)
