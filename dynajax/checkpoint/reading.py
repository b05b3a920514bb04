"""Tensor data from shards into arrays: converted, screened for NaN, infinity and overflow, transposed.

Reads go block by block through one small buffer, so that reading costs no memory beyond the destination.
Every value is looked at: a maximum per block costs a few per cent of the read. GGUF's quantised types become
float32 block by block; its q and k rows, stored in another order, come out in the order of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.shards import Stamp, Stored
from dynajax.checkpoint.wording import plain
from dynajax.errors import ModelError, NumericalError, StorageError
from dynajax.quant import BLOCK_VALUES, GROUP, pack_into

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
STORED_DTYPES: dict[str, np.dtype] = {"F32": DTYPES["float32"], "F16": DTYPES["float16"], "BF16": DTYPES["bfloat16"]}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # read as float32
READABLE = (*STORED_DTYPES, *QUANTISED)
FLOAT16_MAX = 65504.0

_BLOCK_BYTES = 2**21  # stays in the second- or third-level cache
_TILE = (64, 256)  # rows x columns of a transposed tile: fastest of those tried, 16 and 32 bit
_PACKED_TILE = 8 * GROUP  # stored rows, which become groups of columns, that are packed at a time


def numpy_dtype(name: str) -> np.dtype:
    """float32, float16 or bfloat16 -> the NumPy type."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def read_bytes_into(stored: Stored, out: npt.NDArray) -> None:
    """Fill the contiguous `out`, of the stored type, as it is: of files that this program wrote."""
    assert out.nbytes == stored.nbytes, (stored.name, out.shape, stored.shape)
    file = _open_unchanged(stored)
    try:
        _read_exactly(file, out, stored, 0)
    finally:
        os.close(file)


def read_into(stored: Stored, out: npt.NDArray) -> None:
    """Fill `out`, of the stored shape (rows may be strided), rounding to its type."""
    assert out.shape == stored.shape, (stored.name, out.shape, stored.shape)
    rows = out if out.ndim == 2 else out.reshape(-1, out.shape[-1])  # of one or three axes: contiguous
    width = 4 if stored.dtype in QUANTISED else STORED_DTYPES[stored.dtype].itemsize
    per_block = max(1, _BLOCK_BYTES // (width * rows.shape[1]))
    order = None if stored.rotary_heads is None else rotary_order(rows.shape[0], stored.rotary_heads)
    for first, block in _blocks(stored, rows.shape, per_block, out.dtype):
        if order is None:
            np.copyto(rows[first : first + len(block)], block, casting="unsafe")
        else:
            rows[order[first : first + len(block)]] = block


def read_transposed_into(stored: Stored, out: npt.NDArray) -> None:
    """Fill `out` [F, D] (rows may be strided) from a stored [D, F]: its columns become rows."""
    assert out.shape == stored.shape[::-1], (stored.name, out.shape, stored.shape)
    assert stored.rotary_heads is None, stored.name
    tile_rows, tile_columns = _TILE
    converted = np.empty((tile_rows, stored.shape[1]), out.dtype)
    for first, block in _blocks(stored, stored.shape, tile_rows, out.dtype):
        np.copyto(converted[: len(block)], block, casting="unsafe")
        for column in range(0, stored.shape[1], tile_columns):
            tile = converted[: len(block), column : column + tile_columns]
            out[column : column + tile_columns, first : first + len(block)] = tile.T


def pack_rows_into(stored: Stored, out: npt.NDArray[np.uint8], bits: int) -> None:
    """Fill the first groups of packed rows `out` [rows, bytes] (rows may be strided) from a stored [rows, D]."""
    first = 0
    for block in read_blocks(stored, "float32"):
        pack_into(block, out[first : first + len(block)], bits)
        first += len(block)


def pack_columns_into(stored: Stored, out: npt.NDArray[np.uint8], bits: int) -> None:
    """The same from a stored [D, rows]: its columns become rows."""
    assert stored.rotary_heads is None, stored.name
    tile = min(_PACKED_TILE, max(GROUP, BLOCK_VALUES // stored.shape[1] // GROUP * GROUP))
    kept = np.empty((tile, stored.shape[1]), np.float32)
    for first, block in _blocks(stored, stored.shape, tile, kept.dtype):
        np.copyto(kept[: len(block)], block, casting="unsafe")
        pack_into(kept[: len(block)].T, out, bits, first // GROUP)


def read_blocks(stored: Stored, dtype: str) -> Iterator[npt.NDArray]:
    """The values in row-major order, rounded to `dtype`: some rows at a time, all at once where rows are reordered.

    Each block is valid until the next is asked for.
    """
    target, columns = numpy_dtype(dtype), stored.shape[-1]
    if stored.rotary_heads is not None:
        whole = np.empty(stored.shape, target)
        read_into(stored, whole)
        yield whole
        return
    shape = (prod(stored.shape[:-1]), columns)
    for _, block in _blocks(stored, shape, max(1, _BLOCK_BYTES // (4 * columns)), target):
        yield block.astype(target, copy=False)


def rotary_order(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Stored row -> row of the checkpoint, for rows that GGUF keeps as rotary pairs side by side.

    Within a head of size H the stored rows are 0, H/2, 1, H/2 + 1, ... of the checkpoint's, which has all first
    halves of the pairs, then all second halves. Example: one head of 4 rows -> [0, 2, 1, 3].
    """
    halves = np.arange(rows).reshape(heads, 2, rows // heads // 2)
    return halves.swapaxes(1, 2).reshape(rows)


def _blocks(
    stored: Stored, shape: tuple[int, ...], per_block: int, target: np.dtype
) -> Iterator[tuple[int, npt.NDArray]]:
    """(first row, rows in the stored type) until the end; each block is valid until the next is asked for."""
    rows, columns = shape
    limit = FLOAT16_MAX if target == np.float16 else float("inf")
    if stored.dtype in QUANTISED:
        buffer = np.empty((min(rows, per_block), stored.nbytes // rows), np.uint8)
    else:
        buffer = np.empty((min(rows, per_block), columns), STORED_DTYPES[stored.dtype])
    file = _open_unchanged(stored)
    try:
        for first in range(0, rows, per_block):
            block = buffer[: min(per_block, rows - first)]
            _read_exactly(file, block, stored, first * buffer.strides[0])
            if stored.dtype in QUANTISED:
                block = _dequantised(block, stored.dtype, columns)
            largest = _largest(block)
            if not np.isfinite(largest):
                raise NumericalError(f"{plain(stored.name)} holds NaN or infinity: the checkpoint is damaged")
            if largest > limit:
                raise NumericalError(
                    f"{plain(stored.name)} holds {largest:.6g}, beyond float16's {limit:.0f}: use bfloat16 or float32"
                )
            yield first, block
    finally:
        os.close(file)


def _dequantised(raw: npt.NDArray[np.uint8], dtype: str, columns: int) -> npt.NDArray[np.float32]:
    """The float32 values [rows, columns] of quantised rows. As one row, which the library does in one go."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged scale is infinity or NaN: seen by the caller
        return dequantize(raw.reshape(1, -1), GGMLQuantizationType[dtype]).reshape(-1, columns)


def _largest(block: npt.NDArray) -> float:
    """The largest magnitude; NaN or infinity if the block holds one. 16-bit types compare as integers."""
    if block.dtype == np.float32:
        with np.errstate(invalid="ignore"):
            return float(np.maximum(block.max(), -block.min()))
    return float((block.view(np.uint16) & 0x7FFF).max().view(block.dtype))


def _open_unchanged(stored: Stored) -> int:
    """A file descriptor of the shard, if it is still the file whose header was read."""
    try:
        file = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ModelError(f"{plain(stored.path.name)} was removed while the model was being read") from error
    except OSError as error:
        raise StorageError(f"cannot read {plain(stored.path.name)}: {error.strerror}") from error
    if Stamp.of(os.fstat(file)) != stored.stamp:
        os.close(file)
        raise ModelError(f"{plain(stored.path.name)} changed while the model was being read: load it again")
    return file


def _read_exactly(file: int, block: npt.NDArray, stored: Stored, start: int) -> None:
    """Fill the contiguous `block` from `start` bytes into the tensor."""
    view = block.view(np.uint8).reshape(-1).data
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], stored.offset + start + done)
        except OSError as error:
            raise StorageError(f"cannot read {plain(stored.path.name)}: {error.strerror}") from error
        if count == 0:
            raise ModelError(f"{plain(stored.path.name)} became shorter while the model was being read: load it again")
        done += count
