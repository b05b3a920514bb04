"""Matrix products by NumPy's OpenBLAS. Weights of 16 bits become float32 a piece at a time, while it is in a cache."""

import ctypes
import functools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

REMEDY = "install NumPy's wheel from PyPI, which brings OpenBLAS along"
PIECE_FLOATS = 1 << 18  # 1 MiB: a second-level cache
PREFIXES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")
Floats = npt.NDArray[np.float32]

_turn = threading.Lock()  # the number of threads is the process's


@functools.cache
def unavailable() -> str | None:
    """Why the number of its threads cannot be bounded; None if it can. Other BLAS are not asked."""
    return None if _threads_functions() is not None else "NumPy does not use the OpenBLAS of its wheel"


class BlasProducts:
    """See `dense.Products`. Each of `threads` threads computes a part of the answer with a BLAS of one thread.

    While a product is computed that holds for the whole process: BLAS's own threads wait for each other by spinning,
    which takes a multiple of the time where a core is busy with something else.
    """

    def __init__(self, threads: int) -> None:
        functions = _threads_functions()
        assert functions is not None
        self._get, self._set = functions
        self._threads = threads
        self._workers = ThreadPoolExecutor(threads, "hostcompute-blas")

    def dot_rows(self, x: Floats, matrix: np.ndarray) -> Floats:
        """x [n,D] times every row of the matrix [W,D] -> [n,W]."""
        y = np.empty((len(x), len(matrix)), np.float32)

        def compute(part: slice) -> None:
            for rows, piece in _pieces(matrix[part]):
                y[:, part][:, rows] = x @ piece.T

        self._share(len(matrix), compute)
        return y

    def sum_rows(self, h: Floats, matrix: np.ndarray) -> Floats:
        """The rows of the matrix [W,D], summed with the factors h [n,W] -> [n,D]."""
        y = np.zeros((len(h), matrix.shape[1]), np.float32)

        def compute(part: slice) -> None:
            for rows, piece in _pieces(matrix[:, part]):
                y[:, part] += h[:, rows] @ piece

        self._share(matrix.shape[1], compute)
        return y

    def close(self) -> None:
        """Ends the threads."""
        self._workers.shutdown()

    def _share(self, total: int, compute: Callable[[slice], None]) -> None:
        """compute(part) of equal parts of 0 .. total, each in a thread of its own."""
        cuts = [total * thread // self._threads for thread in range(self._threads + 1)]
        with _turn:
            before = self._get()
            self._set(1)
            try:
                list(self._workers.map(compute, map(slice, cuts[:-1], cuts[1:])))
            finally:
                self._set(before)


open_products = BlasProducts


def _pieces(matrix: np.ndarray) -> Generator[tuple[slice, Floats]]:
    """The matrix as float32, some rows at a time; a piece is valid until the next one."""
    if matrix.dtype == np.float32:
        yield slice(None), matrix
        return
    step = max(1, PIECE_FLOATS // max(1, matrix.shape[1]))
    wide = np.empty((min(step, len(matrix)), matrix.shape[1]), np.float32)
    for at in range(0, len(matrix), step):
        rows = slice(at, min(at + step, len(matrix)))
        piece = wide[: rows.stop - at]
        np.copyto(piece, matrix[rows])
        yield rows, piece


@functools.cache
def _threads_functions() -> tuple | None:
    """OpenBLAS's functions that get and set its number of threads."""
    for path in sorted(Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")):
        library = ctypes.CDLL(str(path))  # the one NumPy has loaded
        for prefix in PREFIXES:
            get, put = (getattr(library, prefix.format(verb), None) for verb in ("get", "set"))
            if get is not None and put is not None:
                get.restype, put.argtypes, put.restype = ctypes.c_int, (ctypes.c_int,), None
                return get, put
    return None
