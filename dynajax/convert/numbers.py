"""Values from one float type to another, looked at on the way: NaN, infinity and overflow are refused by name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.reading import DTYPES
from dynajax.checkpoint.wording import plain
from dynajax.errors import NumericalError


def converted(block: npt.NDArray, dtype: str, name: str) -> npt.NDArray:
    """`block` (float16, bfloat16, float32 or float64) rounded to `dtype`; itself if it has that type already.

    NumericalError names the tensor if a value is NaN or infinite, before or after rounding.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = block.astype(DTYPES[dtype], copy=False)
    if not _all_finite(result):
        if not _all_finite(block):
            raise NumericalError(f"{plain(name)} holds NaN or infinity: the file is damaged")
        largest = float(np.abs(block.astype(np.float64)).max())
        raise NumericalError(f"{plain(name)} holds {largest:.6g}, beyond {dtype}: choose a wider --dtype")
    return result


def _all_finite(block: npt.NDArray) -> bool:
    """16-bit types compare as integers: several times faster."""
    if block.dtype.itemsize != 2:
        return bool(np.isfinite(block).all())
    infinity = np.asarray(np.inf, block.dtype).view(np.uint16)
    return block.size == 0 or bool((np.ascontiguousarray(block).view(np.uint16) & 0x7FFF).max() < infinity)
