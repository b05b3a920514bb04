"""The types of weights: floats, and packed ones of few bits. Sizes and names only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

DTypeName = Literal["float32", "float16", "bfloat16"]  # what a checkpoint may hold
WeightDType = Literal["float32", "float16", "bfloat16", "int8", "int4"]  # what an engine may hold

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
PACKED_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
GROUP = 32  # columns of a packed matrix that share a scale


def is_packed(dtype: str) -> bool:
    """Whether matrices of this type are codes with scales (see `dynajax.quant`)."""
    return dtype in PACKED_BITS


def group_bytes(bits: int) -> int:
    """Bytes of a packed group: its codes and a float16 scale."""
    return GROUP * bits // 8 + 2


def stored_bytes(count: int, dtype: str) -> int:
    """Bytes of `count` weights; of a packed type in whole groups."""
    if not is_packed(dtype):
        return count * DTYPE_BYTES[dtype]
    if count % GROUP:
        raise ValueError(f"count must be a multiple of {GROUP} in {dtype}, got {count}")
    return count // GROUP * group_bytes(PACKED_BITS[dtype])


def unpacked_dtype(dtype: str) -> str:
    """The type on the device of what is never packed (norms, biases, routers): few, and exact beside packed ones."""
    return "float32" if is_packed(dtype) else dtype


def head_dtype(dtype: str, *, tied: bool) -> str:
    """The type of the head's table. A tied one is the embedding too, which nothing can make up for: 8 bits at least."""
    return "int8" if tied and is_packed(dtype) else dtype
