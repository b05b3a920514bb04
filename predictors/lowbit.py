"""A packed low-bit copy of a matrix [F, D], and products with it that never hold it unpacked.

Code c of group g stands for (c - (2**bits - 1) / 2) * scale[g]: levels symmetric about zero, none of them zero. With
1 bit that is the sign times the group's mean magnitude. A group is 32 neighbours along D; D is padded to whole groups.
Inside a group byte j holds elements j, j + n, j + 2 n, ... (n = 4 * bits bytes a group), the first in its lowest
bits, so that one shift and one mask unpack a run of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.errors import NumericalError
from hostcompute import ffi

GROUP = 32
BITS = (1, 2, 4, 8)
BLOCK_BYTES = 2 * 2**20  # unpacked at once by `block_scores`
_QUANTISE_ROWS = 512
_TINY = np.float32(2.0**-24)  # the smallest float16


@dataclass(frozen=True, slots=True, eq=False)
class LowBit:
    """codes uint8 [F, groups * 4 * bits], scales float16 [F, groups], and the D that both stand for."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    bits: int
    columns: int

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}")


def lowbit_bytes(rows: int, columns: int, bits: int) -> int:
    """What a copy of [rows, columns] takes."""
    groups = -(-columns // GROUP)
    return rows * groups * (4 * bits + 2)


def quantise(matrix: npt.NDArray, bits: int) -> LowBit:
    """The copy of `matrix` [F, D] of any float type, made in blocks of rows; the same on every machine.

    NumericalError: NaN, infinity, or magnitudes beyond float16.
    """
    check_bits(bits)
    rows, columns = matrix.shape
    groups = -(-columns // GROUP)
    codes = np.empty((rows, groups * 4 * bits), np.uint8)
    scales = np.empty((rows, groups), np.float16)
    sizes = np.minimum(GROUP, columns - GROUP * np.arange(groups)).astype(np.float32)  # the last one may be short
    for at in range(0, rows, _QUANTISE_ROWS):
        part = matrix[at : at + _QUANTISE_ROWS].astype(np.float32)
        if not np.abs(part).max(initial=0) < 60_000:  # NaN fails too
            raise NumericalError("a matrix to quantise must be finite and within float16")
        block = np.pad(part, ((0, 0), (0, groups * GROUP - columns))).reshape(len(part), groups, GROUP)
        scales[at : at + len(part)] = _scales(block, sizes, bits)
        # Rounded scales first, codes for them after: tiny ones lose bits.
        packed = _codes(block, scales[at : at + len(part)].astype(np.float32), bits).reshape(
            len(part), groups, 8 // bits, 4 * bits
        )
        shifts = (np.arange(8 // bits, dtype=np.uint8) * bits)[None, None, :, None]
        codes[at : at + len(part)] = np.bitwise_or.reduce(packed << shifts, axis=2).reshape(len(part), -1)
    return LowBit(codes, scales, bits, columns)


def _scales(block: npt.NDArray[np.float32], sizes: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """One a group: 1 bit from the mean; 2 bits by least squares, since the largest of few levels must not be the
    maximum; 4 and 8 bits so that the outermost level is the maximum."""
    magnitude = np.abs(block)
    half = np.float32((2**bits - 1) / 2)
    if bits > 2:
        return magnitude.max(axis=2) / half
    mean = magnitude.sum(axis=2) / sizes
    if bits == 1:
        return 2 * mean
    scale = np.float32(1.25) * mean  # the best of a Gaussian
    for _ in range(2):
        level = np.where(magnitude > scale[:, :, None], np.float32(1.5), np.float32(0.5))
        counted = np.arange(GROUP, dtype=np.float32)[None, :] < sizes[:, None]  # [groups, GROUP]
        level = level * counted[None]
        scale = (magnitude * level).sum(axis=2) / np.maximum((level * level).sum(axis=2), _TINY)
    return scale


def _codes(block: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.uint8]:
    if bits == 1:
        return (block >= 0).astype(np.uint8)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    half = np.float32((2**bits - 1) / 2)
    return np.clip(np.rint(block * inverse[:, :, None] + half), 0, 2**bits - 1).astype(np.uint8)


def dequantise(packed: LowBit) -> npt.NDArray[np.float32]:
    """The matrix [F, D] that the copy stands for, one element's bits after the other: what the products must use."""
    bits, (rows, groups) = packed.bits, packed.scales.shape
    count = 4 * bits  # bytes a group
    out = np.empty((rows, groups, GROUP), np.float32)
    codes = packed.codes.reshape(rows, groups, count)
    for element in range(GROUP):
        shift = bits * (element // count)
        code = (codes[:, :, element % count] >> shift) & (2**bits - 1)
        out[:, :, element] = (code - np.float32((2**bits - 1) / 2)) * packed.scales.astype(np.float32)
    return out.reshape(rows, groups * GROUP)[:, : packed.columns]


def lowbit_scores_reference(x: jax.Array, codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """What `lowbit_scores` must compute, with the whole matrix unpacked."""
    return _product(_padded(x, scales), codes, scales, bits)


@partial(jax.named_call, name="lowbit_scores")
def lowbit_scores(
    x: jax.Array,  # [B, D] float32
    codes: jax.Array,  # uint8 [F, groups * 4 * bits]
    scales: jax.Array,  # float16 [F, groups]
    bits: int,
) -> jax.Array:
    """x times the transpose of the matrix that a LowBit stands for -> float32 [B, F]; differentiable in x.

    On the CPU backend the host's kernels read the packed form as it is. Elsewhere, and in the backward pass everywhere,
    rows are unpacked in blocks of BLOCK_BYTES.
    """
    return _scores(bits, x, codes, scales)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(bits: int, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    blocks = partial(block_scores, bits=bits)
    return jax.lax.platform_dependent(x, codes, scales, cpu=partial(_scores_on_cpu, bits), default=blocks)


def _scores_forward(bits: int, x: jax.Array, codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, tuple]:
    return _scores(bits, x, codes, scales), (x, codes, scales)


def _scores_backward(bits: int, operands: tuple, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    x, codes, scales = operands
    transposed = jax.linear_transpose(lambda x: block_scores(x, codes, scales, bits), x)
    return (*transposed(cotangent), None, None)


_scores.defvjp(_scores_forward, _scores_backward)


def _scores_on_cpu(bits: int, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    if ffi.unavailable() is not None:
        return block_scores(x, codes, scales, bits)
    return ffi.lowbit_rows_ffi(x, codes, scales, bits)


def block_scores(x: jax.Array, codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """`lowbit_scores` on any backend, and its gradient."""
    x = _padded(x, scales)
    total, width = codes.shape[0], x.shape[1]
    rows = max(8, BLOCK_BYTES // (4 * width) // 8 * 8)
    blocks, rest = divmod(total, rows)

    @jax.checkpoint
    def block(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(codes, start, rows), jax.lax.dynamic_slice_in_dim(scales, start, rows)
        return _product(x, *part, bits)

    tail = _product(x, codes[total - rest :], scales[total - rest :], bits)
    if not blocks:
        return tail
    done = jax.lax.map(block, jnp.arange(blocks, dtype=jnp.int32) * jnp.int32(rows))  # [blocks, B, rows]
    return jnp.concatenate([done.swapaxes(0, 1).reshape(len(x), blocks * rows), tail], axis=1)


def _padded(x: jax.Array, scales: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, scales.shape[1] * GROUP - x.shape[1])))


def _product(x: jax.Array, codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """x [B, groups * 32] times rows that are unpacked for it -> [B, rows]."""
    rows, groups = scales.shape
    shifts = (jnp.arange(8 // bits, dtype=jnp.uint8) * jnp.uint8(bits))[None, None, :, None]
    mask = jnp.full((1, 1, 1, 1), 2**bits - 1, jnp.uint8)
    level = (codes.reshape(rows, groups, 1, 4 * bits) >> shifts) & mask
    level = level.reshape(rows, groups, GROUP).astype(jnp.float32) - jnp.float32((2**bits - 1) / 2)
    matrix = (level * scales.astype(jnp.float32)[:, :, None]).reshape(rows, groups * GROUP)
    return jnp.einsum("BD,FD->BF", x, matrix, precision=jax.lax.Precision.HIGHEST)
