"""Matrices in few bits: groups of 32 columns share a float16 scale. NumPy only.

Code c of a group stands for (c - 2**(bits - 1)) * scale: one level is zero, and a scale may be negative, so that the
largest magnitude has the outermost level. Copies for predictors have levels symmetric about zero, none of them zero.
Inside a group byte j holds the columns j, j + n, j + 2 n, ... (n = 4 * bits bytes), the first in its lowest bits.

A packed matrix is uint8 [rows, groups, 4 * bits + 2], so that its shape tells bits and width. The bytes of a row are
those of one block: the codes of all groups, then the scales of all groups. `hostcompute.packed` unpacks them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynajax.config import GROUP, PACKED_BITS, group_bytes, head_dtype, is_packed, unpacked_dtype
from dynajax.errors import NumericalError

BITS = (1, 2, 4, 8)  # that codes can have; matrices of an engine have 4 or 8
BLOCK_VALUES = 2**18  # quantised at once: a few blocks of float32 stay in the second-level cache
# The code that zero would have in a packed matrix, by bits. Copies for predictors have (2**bits - 1) / 2 for all bits.
ZERO = {4: 8, 8: 128}
# Scales tried by bits, as shares of the element of the largest magnitude: the first and the last
# put it on an outermost level, the others err more there and less everywhere else.
CLIPS = {4: (-1 / 8, -0.93 / 8, -0.86 / 8, 1 / 7), 8: (-1 / 128, 1 / 127)}
LARGEST = 60_000  # of a magnitude; its scale must be a float16
_TINY = np.float32(2.0**-24)  # the smallest float16

# Never packed although they have two axes: routers, what scales a shared expert, relative and learned positions, and
# matrices that are taken apart by heads.
UNPACKED = frozenset({"router", "mix", "relative", "positions", "key_up", "value_up", "kv_up"})

Floats = npt.NDArray[np.float32]


class Grouped(NamedTuple):
    """Codes uint8 [rows, groups, 4 * bits] and scales float16 [rows, groups]."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]


def held_as(name: str, shape: tuple[int, ...], dtype: str, *, tied: bool = False) -> tuple[tuple[int, ...], str]:
    """Shape and type in which an engine of weights in `dtype` holds a tensor: matrices packed, the rest not.

    name: of a parameter as the blocks of `models` call it, "embed" or "head". Example: ("q", (64, 32), "int4") ->
    ((64, 1, 18), "uint8"), and a norm is float32.
    """
    kind = head_dtype(dtype, tied=tied) if name in ("embed", "head") else dtype
    return stored_as(shape, kind if len(shape) == 2 and name not in UNPACKED else unpacked_dtype(dtype))


def stored_as(shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], str]:
    """Shape and NumPy type in which values [..., D] of a type are stored: packed ones have an axis more, of bytes."""
    return (packed_shape(shape, PACKED_BITS[dtype]), "uint8") if is_packed(dtype) else (shape, dtype)


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """Of values [..., D] -> [..., groups, 4 * bits + 2]."""
    check_bits(bits)
    if shape[-1] % GROUP or not shape[-1]:
        raise ValueError(f"the last axis must be a positive multiple of {GROUP}, got {shape}")
    return (*shape[:-1], shape[-1] // GROUP, group_bytes(bits))


def bits_of(packed: npt.NDArray[np.uint8]) -> int:
    """Of a packed array, by its last axis."""
    bits = {group_bytes(bits): bits for bits in PACKED_BITS.values()}.get(packed.shape[-1])
    if bits is None or packed.dtype != np.uint8 or packed.ndim < 2:
        raise ValueError(f"packed must be uint8 [..., groups, 34 or 18], got {packed.dtype} {packed.shape}")
    return bits


def packed_rows(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A view of packed [rows, groups, n] as bytes of rows [rows, groups * n]; rows may be strided."""
    rows, groups, size = packed.shape
    assert packed.strides[1:] == (size, 1), packed.strides
    return np.lib.stride_tricks.as_strided(packed, (rows, groups * size), (packed.strides[0], 1))


def check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}")


def pack(values: npt.NDArray, bits: int) -> npt.NDArray[np.uint8]:
    """Values [..., D] of any float type -> uint8 [..., groups, 4 * bits + 2], in blocks of rows."""
    out = np.empty(packed_shape(values.shape, bits), np.uint8)
    pack_into(values.reshape(-1, values.shape[-1]), out.reshape(-1, out.shape[-2] * out.shape[-1]), bits)
    return out


def pack_into(
    values: npt.NDArray,  # [rows, D'], D' a multiple of 32
    out: npt.NDArray[np.uint8],  # [rows, the bytes of a row]; rows may be strided
    bits: int,
    first: int = 0,
) -> None:
    """Fill the groups from `first` on of packed rows: those of D' columns, the others stay as they are."""
    groups, total = values.shape[1] // GROUP, out.shape[1] // group_bytes(bits)
    if values.shape[1] % GROUP or first + groups > total or len(values) != len(out):
        raise ValueError(f"{values.shape} values do not fill groups from {first} on in {out.shape} bytes, {bits} bits")
    size, scales_at = GROUP * bits // 8, total * GROUP * bits // 8
    where = slice(first * size, (first + groups) * size)
    scales_where = slice(scales_at + 2 * first, scales_at + 2 * (first + groups))
    step = max(1, BLOCK_VALUES // max(1, values.shape[1]))
    for at in range(0, len(values), step):
        rows = slice(at, min(at + step, len(values)))
        block = checked(values[rows]).reshape(-1, groups, GROUP)
        coded = quantise_groups(block, bits, fitted_scales(block, bits), ZERO[bits])
        out[rows, where] = coded.codes.reshape(len(block), -1)
        out[rows, scales_where] = coded.scales.view(np.uint8).reshape(len(block), -1)


def checked(values: npt.NDArray) -> Floats:
    """As float32. NumericalError: NaN, infinity, or magnitudes beyond float16."""
    block = values.astype(np.float32, order="C")
    if not np.abs(block).max(initial=0) < LARGEST:  # NaN fails too
        raise NumericalError("a matrix to quantise must be finite and within float16")
    return block


def fitted_scales(block: Floats, bits: int) -> Floats:
    """One a group of block [rows, groups, 32]: of those in CLIPS the one with the least squared error, then that which
    is best for the levels it gave."""
    largest = np.take_along_axis(block, np.abs(block).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    least, chosen = np.full(largest.shape, np.inf, np.float32), np.zeros_like(block)
    for clip in CLIPS[bits]:
        scales = largest * np.float32(clip)
        scaled = block * _inverse(scales)[:, :, None]
        level = _nearest(scaled, bits, ZERO[bits])
        scaled -= level
        squared = np.einsum("rgc,rgc->rg", scaled, scaled) * np.square(scales)
        better = squared < least
        least[better], chosen[better] = squared[better], level[better]
    power = np.einsum("rgc,rgc->rg", chosen, chosen)
    return np.einsum("rgc,rgc->rg", block, chosen) / np.maximum(power, np.float32(0.25))  # 0: all zeros


def _inverse(scales: Floats) -> Floats:
    """1 / scales; 0 where a scale is none in float16."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(scales) > _TINY / 4)


def _nearest(scaled: Floats, bits: int, zero: float) -> Floats:
    """Of every element the nearest level, c - zero of its code c."""
    level = np.rint(scaled + np.float32(zero))
    np.clip(level, 0, 2**bits - 1, out=level)
    level -= np.float32(zero)
    return level


def quantise_groups(block: Floats, bits: int, scales: Floats, zero: float) -> Grouped:
    """block [rows, groups, 32] with scales [rows, groups] -> the nearest codes, packed. zero: the code that it has.

    Scales are rounded first, codes are those for what they became: tiny ones lose bits.
    """
    check_bits(bits)
    rounded = scales.astype(np.float16)
    if bits == 1:
        codes = (block >= 0).astype(np.uint8)
    else:
        inverse = _inverse(rounded.astype(np.float32))[:, :, None]
        codes = (_nearest(block * inverse, bits, zero) + np.float32(zero)).astype(np.uint8)
    if bits == 8:
        return Grouped(codes, rounded)
    parts = codes.reshape(*codes.shape[:2], 8 // bits, 4 * bits)
    shifts = (np.arange(8 // bits, dtype=np.uint8) * bits)[None, None, :, None]
    return Grouped(np.bitwise_or.reduce(parts << shifts, axis=2), rounded)


def dequantise_groups(grouped: Grouped, bits: int) -> Floats:
    """What copies for predictors stand for [rows, groups, 32] float32, one element's bits after the other."""
    check_bits(bits)
    codes, scales = grouped.codes, grouped.scales.astype(np.float32)
    count = 4 * bits  # bytes a group
    out = np.empty((*scales.shape, GROUP), np.float32)
    for element in range(GROUP):
        code = (codes[:, :, element % count] >> (bits * (element // count))) & (2**bits - 1)
        out[:, :, element] = (code - np.float32(symmetric_zero(bits))) * scales
    return out


def symmetric_zero(bits: int) -> float:
    """The code of zero where levels are symmetric about it, and none of them zero."""
    return (2**bits - 1) / 2


def wide_scales(block: Floats, sizes: Floats, bits: int) -> Floats:
    """One a group of block [rows, groups, 32], `sizes` [groups] of whose elements count, by rules that need no trials.

    1 bit from the mean; 2 bits by least squares, since the largest of few levels must not be the maximum; 4 and 8 bits
    so that the outermost level is the maximum.
    """
    magnitude = np.abs(block)
    if bits > 2:
        return magnitude.max(axis=2) / np.float32(symmetric_zero(bits))
    mean = magnitude.sum(axis=2) / sizes
    if bits == 1:
        return 2 * mean
    scale = np.float32(1.25) * mean  # the best of a Gaussian
    counted = np.arange(GROUP, dtype=np.float32)[None, :] < sizes[:, None]  # [groups, 32]
    for _ in range(2):
        level = np.where(magnitude > scale[:, :, None], np.float32(1.5), np.float32(0.5)) * counted[None]
        scale = (magnitude * level).sum(axis=2) / np.maximum((level * level).sum(axis=2), _TINY)
    return scale
