"""Experts by a library's matrix products, all zeros computed: an option, and what the own tiles are held against."""

from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hostcompute import blas, onednn
from hostcompute.checks import FfnResult, outside_error
from hostcompute.packed import widened
from hostcompute.reference import activate, wanted_pairs

Dense = Literal["own", "blas", "onednn"]
LIBRARIES = {"blas": blas, "onednn": onednn}
Floats = npt.NDArray[np.float32]


class Products(Protocol):
    """Products of float32 rows with a part of an expert [W,D], C-contiguous, of any float type of `DTYPES`."""

    def dot_rows(self, x: Floats, matrix: np.ndarray) -> Floats:
        """x [n,D] times every row of the matrix -> [n,W]."""
        ...

    def sum_rows(self, h: Floats, matrix: np.ndarray) -> Floats:
        """The rows of the matrix, summed with the factors h [n,W] -> [n,D]."""
        ...

    def close(self) -> None: ...


class DenseCall(NamedTuple):
    """Arguments of `HostPool.ffn` that have been checked, all but the units' range."""

    x: Floats  # [B,D]
    bundle: np.ndarray  # [n,P,W,D]
    units: npt.NDArray[np.int32]  # [C]
    activation: str
    threshold: float
    weights: Floats  # [B,C]
    admit: npt.NDArray[np.uint8] | None  # [B,C]
    out: Floats  # [B,D]; may be x
    live: npt.NDArray[np.uint8] | None  # [B,C]
    values: Floats | None  # [B,C]


def unavailable(dense: str) -> str | None:
    """Why experts cannot be computed by this library here; None if they can. ValueError for an unknown name."""
    if dense not in ("own", *LIBRARIES):
        raise ValueError(f"dense must be one of own, {', '.join(LIBRARIES)}, got {dense!r}")
    return LIBRARIES[dense].unavailable() if dense in LIBRARIES else None


def open_products(dense: str, threads: int) -> Products | None:
    """The library's products, in at most so many threads; None for `own`. RuntimeError, with the remedy, without it."""
    if (reason := unavailable(dense)) is not None:
        raise RuntimeError(f"dense={dense!r} cannot be used here: {reason}; {LIBRARIES[dense].REMEDY}, or use 'own'")
    return LIBRARIES[dense].open_products(threads) if dense in LIBRARIES else None


def dense_ffn(products: Products, call: DenseCall) -> FfnResult:
    """`HostPool.ffn` with weights: the rows of each expert that some row wants, as one block."""
    x, bundle, units = call.x, call.bundle, call.units
    outside = np.flatnonzero((units < 0) | (units >= len(bundle)))
    if outside.size:
        raise outside_error(units, int(outside[0]), len(bundle))
    wanted = wanted_pairs(call.weights, call.admit)
    y, neurons = np.zeros_like(x), np.zeros(len(x), np.int64)
    for marks in (call.live, call.values):
        if marks is not None:
            marks[...] = 0
    experts = np.flatnonzero(wanted.any(axis=0))
    for c in experts:
        rows = np.flatnonzero(wanted[:, c])
        expert = widened(bundle[units[c]])
        h, live = _activations(products, x[rows], expert, call.activation, call.threshold)
        h = np.where(h == 0, np.float32(0), h * call.weights[rows, c, None])
        y[rows] += products.sum_rows(h, expert[-1])
        neurons[rows] += live.sum(axis=1)
        if call.live is not None:
            call.live[rows, c] = live.any(axis=1)
        if call.values is not None:
            call.values[rows, c] = h[:, 0]
    call.out[...] = y
    return FfnResult(call.out, neurons, len(experts) * (bundle[0].nbytes if len(bundle) else 0))


def _activations(
    products: Products, x: Floats, expert: np.ndarray, activation: str, threshold: float
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """What the down rows are multiplied with, before the router's weight, and which neurons are live: [n,W] each."""
    h = activate(products.dot_rows(x, expert[0]), activation, threshold)
    live = h != 0
    if len(expert) == 3:
        up = products.dot_rows(x, expert[1])
        h = np.where(live, h * (activate(up, "relu", 0.0) if activation == "drelu" else up), np.float32(0))
    return h, h != 0 if activation == "drelu" else live
