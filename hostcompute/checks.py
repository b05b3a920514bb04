"""What the pools accept, and the result they return. Shared by the compiled and the NumPy one."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostcompute.packed import GROUP_BYTES, is_packed

ACTIVATIONS = {"relu": 0, "fatrelu": 1, "silu": 2, "drelu": 3}
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4}  # the last two: packed rows


class FfnResult(NamedTuple):
    """The answer of one `ffn` call. The arrays belong to the caller."""

    y: npt.NDArray[np.float32]  # [B,D]
    live_count: npt.NDArray[np.int64]  # [B] live units of each row; with weights its live neurons, W to a unit
    bytes_read: int  # of weights: every gate row, of wanted units, and the up and down rows that were needed


def check_bundle(bundle: np.ndarray) -> None:
    """An arena is C-contiguous [n,P,W,D] with P 2 or 3, of floats; or of packed rows, [n,P,W,groups,bytes]."""
    if bundle.dtype == np.uint8:
        if bundle.ndim != 5 or not is_packed(bundle):
            sizes = " or ".join(f"{size} ({name})" for name, size in GROUP_BYTES.items())
            raise ValueError(f"a packed bundle must be uint8 [n,P,W,groups,{sizes}], got shape {bundle.shape}")
    elif bundle.dtype.name not in ("float32", "float16", "bfloat16") or not bundle.dtype.isnative:
        raise ValueError(f"bundle must be float32, float16 or bfloat16, or packed in uint8, got {bundle.dtype}")
    elif bundle.ndim != 4:
        raise ValueError(f"bundle must be [n, 2 or 3, W >= 1, D >= 1], got shape {bundle.shape}")
    if bundle.shape[1] not in (2, 3) or min(bundle.shape[2:]) < 1:
        raise ValueError(f"bundle must be [n, 2 or 3, W >= 1, D >= 1], got shape {bundle.shape}")
    if not bundle.flags.c_contiguous:
        raise ValueError(f"bundle must be C-contiguous, got strides {bundle.strides}")


def check_array(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int | None, ...]) -> None:
    """`array` has this dtype and shape (None: any length) and is C-contiguous."""
    if array.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {array.dtype}")
    found = array.shape
    if len(found) != len(shape) or any(want not in (None, got) for want, got in zip(shape, found, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(found)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous, got strides {array.strides}")


def check_output(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    check_array(name, array, dtype, shape)
    if not array.flags.writeable:
        raise ValueError(f"{name} must be writeable, got a read-only array")


def check_pairs(
    pairs: tuple[int, int],  # rows of x, units
    rows: int,  # of a unit
    live: np.ndarray | None,
    admit: np.ndarray | None,
    values: np.ndarray | None,
    weights: np.ndarray | None,
) -> None:
    """What `HostPool.ffn` is given for each row of x and unit."""
    if live is not None:
        check_output("live", live, np.dtype(np.uint8), pairs)
    if admit is not None:
        check_array("admit", admit, np.dtype(np.uint8), pairs)
    if values is not None:
        check_values(values, pairs, rows)
    if weights is not None:
        check_array("weights", weights, np.dtype(np.float32), pairs)


def check_values(values: np.ndarray, shape: tuple[int, int], rows: int) -> None:
    """A unit has one value where each of its parts has one row."""
    if rows != 1:
        raise ValueError(f"bundle must have W = 1 with values, got {rows}")
    check_output("values", values, np.dtype(np.float32), shape)


def activation_code(activation: str, threshold: float, parts: int) -> int:
    """The library's number of an activation; refuses a threshold or a bundle that it has no use for."""
    code = ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if threshold != 0.0 and (activation != "fatrelu" or not math.isfinite(threshold)):
        raise ValueError(f"threshold must be 0, or finite with fatrelu, got {threshold} with {activation}")
    if activation == "drelu" and parts != 3:
        raise ValueError(f"bundle must have 3 parts (gate, up, down) with drelu, got {parts}")
    return code


def outside_error(units: npt.NDArray[np.int32], index: int, count: int) -> ValueError:
    return ValueError(f"units must be in [0, {count}), got {units[index]} at index {index}")


def check_threads(threads: int) -> None:
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads must be in [1, 1024], got {threads}")
