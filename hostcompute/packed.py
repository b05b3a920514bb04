"""Packed rows, int8 and int4, in NumPy: uint8 [..., groups, 4 * bits + 2], of which the shape tells bits and width.

The last two axes are one block of bytes: first the codes of all groups, in the order of src/lowbit.h, then the
float16 scales of all groups, which may be negative. Code c stands for (c - 2**(bits - 1)) times its group's scale.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

GROUP = 32  # values that share a scale
GROUP_BYTES = {"int8": 34, "int4": 18}


class AnyArray(Protocol):
    """Of NumPy or of jax."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def is_packed(array: AnyArray) -> bool:
    """Whether these are packed rows, and no matrix of numbers."""
    return array.dtype == np.uint8 and array.ndim > 1 and array.shape[-1] in GROUP_BYTES.values()


def row_values(array: AnyArray) -> int:
    """How many values a row has, of packed rows or of numbers."""
    return array.shape[-2] * GROUP if is_packed(array) else array.shape[-1]


def row_type(array: np.ndarray) -> str:
    """int8, int4, or the name of the numbers' type."""
    if not is_packed(array):
        return array.dtype.name
    return next(name for name, size in GROUP_BYTES.items() if size == array.shape[-1])


def unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The values [..., D] of packed rows. Exact: nine bits times eleven. ValueError for anything else."""
    if not is_packed(packed):
        raise ValueError(f"packed must be uint8 [..., groups, 34 or 18], got {packed.dtype} {packed.shape}")
    *outer, groups, size = packed.shape
    code_bytes = size - 2
    bits = code_bytes // 4
    rows = np.ascontiguousarray(packed).reshape(-1, groups * size)
    codes = rows[:, : groups * code_bytes].reshape(-1, groups, 1, code_bytes)
    scales = np.ascontiguousarray(rows[:, groups * code_bytes :]).view(np.float16)  # [rows, groups]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    levels = (codes >> shifts & np.uint8(2**bits - 1)).astype(np.float32) - np.float32(2 ** (bits - 1))
    values = levels.reshape(-1, groups, GROUP) * scales.astype(np.float32)[:, :, None]
    return values.reshape(*outer, groups * GROUP)


def widened(rows: np.ndarray) -> np.ndarray:
    """Rows of numbers as they are, packed ones as float32."""
    return unpack(rows) if is_packed(rows) else rows
