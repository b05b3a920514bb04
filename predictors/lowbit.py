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

from dynajax.config import GROUP
from dynajax.quant import Grouped, check_bits, checked, dequantise_groups, quantise_groups, symmetric_zero, wide_scales
from hostcompute import ffi

BLOCK_BYTES = 2 * 2**20  # unpacked at once by `block_scores`
_QUANTISE_ROWS = 512


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
        part = checked(matrix[at : at + _QUANTISE_ROWS])
        block = np.pad(part, ((0, 0), (0, groups * GROUP - columns))).reshape(len(part), groups, GROUP)
        coded = quantise_groups(block, bits, wide_scales(block, sizes, bits), symmetric_zero(bits))
        codes[at : at + len(part)] = coded.codes.reshape(len(part), -1)
        scales[at : at + len(part)] = coded.scales
    return LowBit(codes, scales, bits, columns)


def dequantise(packed: LowBit) -> npt.NDArray[np.float32]:
    """The matrix [F, D] that the copy stands for: what the products must use."""
    rows, groups = packed.scales.shape
    grouped = Grouped(packed.codes.reshape(rows, groups, 4 * packed.bits), packed.scales)
    values = dequantise_groups(grouped, packed.bits)
    return values.reshape(rows, groups * GROUP)[:, : packed.columns]


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
