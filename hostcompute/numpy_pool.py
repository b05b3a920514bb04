"""The pool that needs no compiler: same verbs and answers as `HostPool`, one to two orders slower."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hostcompute.checks import (
    FfnResult,
    activation_code,
    check_array,
    check_bundle,
    check_output,
    check_pairs,
    check_threads,
    outside_error,
)
from hostcompute.dense import Dense, DenseCall, dense_ffn, open_products
from hostcompute.packed import row_values, widened
from hostcompute.reference import activate, wanted_pairs

FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)
CHUNK_FLOATS = 1 << 22  # weights converted to float32 at a time


class NumpyPool:
    """Computes in float32 with NumPy on the calling thread; BLAS decides how many threads that uses."""

    isa = "numpy"

    def __init__(self, threads: int, dense: Dense = "own") -> None:
        check_threads(threads)
        self._products = open_products(dense, threads)
        self.dense = dense
        self.threads = threads
        self._closed = False

    def ffn(  # noqa: PLR0913  the arrays of one call
        self,
        x: npt.NDArray[np.float32],  # [B,D]
        bundle: np.ndarray,  # [n,P,W,D], or packed [n,P,W,groups,bytes]
        units: npt.NDArray[np.int32],  # [C]
        *,
        activation: str,
        threshold: float = 0.0,
        skip_zeros: bool = True,
        out: npt.NDArray[np.float32] | None = None,  # [B,D]
        live: npt.NDArray[np.uint8] | None = None,  # [B,C]
        admit: npt.NDArray[np.uint8] | None = None,  # [B,C]
        values: npt.NDArray[np.float32] | None = None,  # [B,C]; only with W = 1
        weights: npt.NDArray[np.float32] | None = None,  # [B,C]
    ) -> FfnResult:
        """See `HostPool.ffn`."""
        self._check(bundle, units)
        activation_code(activation, threshold, bundle.shape[1])
        check_array("x", x, FLOAT32, (None, row_values(bundle)))
        pairs = (len(x), len(units))
        check_pairs(pairs, bundle.shape[2], live, admit, values, weights)
        marks = np.empty(pairs, np.uint8) if live is None else live
        y = np.empty_like(x) if out is None else out
        check_output("out", y, FLOAT32, x.shape)
        if values is not None:
            values[...] = 0
        if weights is not None and self._products is not None:
            given = (weights, admit, y, marks, values)
            return dense_ffn(self._products, DenseCall(x, bundle, units, activation, threshold, *given))
        skip_zeros = skip_zeros and (activation != "silu" or (admit is not None and weights is None))
        total, neurons, rows_read = np.zeros_like(x), np.zeros(len(x), np.int64), 0
        marks[...] = 0
        for rows, here in _visits(pairs, bundle, admit, weights):
            at = (rows, here)
            admitted = None if admit is None else admit[at]
            part = _ffn_chunk(x[rows], bundle, units[here], activation, threshold, skip_zeros, admitted)
            h = part.h if weights is None else _weighted(part.h, weights[at])
            total[rows] += part.down(h)
            marks[at] = part.live.any(axis=2)
            neurons[rows] += part.live.sum(axis=(1, 2))
            rows_read += part.rows_read
            if values is not None:
                values[at] = h
        y[...] = total
        counts = marks.sum(axis=1, dtype=np.int64) if weights is None else neurons
        return FfnResult(y, counts, rows_read * bundle[:1, 0, 0].nbytes)

    def gather(self, bundle: np.ndarray, units: npt.NDArray[np.int32], out: np.ndarray) -> np.ndarray:
        """See `HostPool.gather`."""
        self._check(bundle, units)
        check_output("out", out, bundle.dtype, (len(units), *bundle.shape[1:]))
        return np.take(bundle, units, axis=0, out=out, mode="clip")

    def close(self) -> None:
        self._closed = True
        if self._products is not None:
            self._products.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check(self, bundle: np.ndarray, units: npt.NDArray[np.int32]) -> None:
        if self._closed:
            raise ValueError("pool must be open, got a closed one")
        check_bundle(bundle)
        check_array("units", units, INT32, (None,))
        outside = np.flatnonzero((units < 0) | (units >= len(bundle)))
        if outside.size:
            raise outside_error(units, int(outside[0]), len(bundle))


def _visits(
    pairs: tuple[int, int],
    bundle: np.ndarray,
    admit: npt.NDArray[np.uint8] | None,  # [B,C]
    weights: npt.NDArray[np.float32] | None,  # [B,C]
) -> Iterator[tuple[npt.NDArray[np.intp] | slice, npt.NDArray[np.intp] | slice]]:
    """Which rows meet which units at a time: all rows and some units that one of them admits, or with weights one unit
    and who wants it."""
    batch, count = pairs
    if weights is not None:
        for c, wanted in enumerate(wanted_pairs(weights, admit).T):
            if wanted.any():
                yield np.flatnonzero(wanted), slice(c, c + 1)
        return
    step = max(1, CHUNK_FLOATS // (bundle.shape[1] * bundle.shape[2] * row_values(bundle))) if len(bundle) else 1
    admitted = np.arange(count) if admit is None else np.flatnonzero(admit.any(axis=0))
    for at in range(0, len(admitted) if batch else 0, step):
        yield slice(None), admitted[at : at + step]


def _weighted(h: npt.NDArray[np.float32], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """h [B,C*W] times the weights [B,C] of its units; zero counts for nothing."""
    factors = np.repeat(weights, h.shape[1] // weights.shape[1], axis=1)
    return np.where(h == 0, np.float32(0), h * factors)


class _Chunk(NamedTuple):
    """Units that fit into one conversion, for some rows."""

    h: npt.NDArray[np.float32]  # [B,C*W]
    live: npt.NDArray[np.bool_]  # [B,C,W]
    rows_read: int
    needed: npt.NDArray[np.intp]  # the columns of h whose down rows are read
    down_rows: npt.NDArray[np.float32]  # [needed,D]

    def down(self, h: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """y [B,D] of this h."""
        return h[:, self.needed] @ self.down_rows


def _ffn_chunk(
    x: npt.NDArray[np.float32],
    bundle: np.ndarray,
    units: npt.NDArray[np.int32],
    activation: str,
    threshold: float,
    skip_zeros: bool,
    admit: npt.NDArray[np.uint8] | None,  # [B,C]
) -> _Chunk:
    parts, inner = bundle.shape[1:3]

    def rows(part: int, chosen: np.ndarray | slice) -> npt.NDArray[np.float32]:
        of_part = bundle[units, part]  # [C,W,D]
        return widened(of_part.reshape(-1, *of_part.shape[2:])[chosen]).astype(np.float32)  # [C*W,D]

    h = activate(x @ rows(0, slice(None)).T, activation, threshold)  # [B,C*W]
    if admit is not None:
        h[np.repeat(admit == 0, inner, axis=1)] = 0
    needed = _needed(h, skip_zeros)
    rows_read = h.shape[1]
    live = h != 0
    if parts == 3:
        rows_read += len(needed)
        up = x @ rows(1, needed).T
        gates = h[:, needed]
        h[:, needed] = np.where(gates == 0, 0, gates * (activate(up, "relu", 0.0) if activation == "drelu" else up))
        if activation == "drelu":
            live, needed = h != 0, _needed(h, skip_zeros)
    live = live.reshape(len(x), len(units), inner)
    return _Chunk(h, live, rows_read + len(needed), needed, rows(parts - 1, needed))


def _needed(h: npt.NDArray[np.float32], skip_zeros: bool) -> npt.NDArray[np.intp]:
    """The columns of h whose weights are read."""
    return np.flatnonzero((h != 0).any(axis=0)) if skip_zeros else np.arange(h.shape[1])
