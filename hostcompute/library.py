"""Loads the compiled library and gives it a Python face: `HostPool`, and `open_pool` that picks what there is."""

import ctypes
import importlib.machinery
import logging
import math
import os
import weakref
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hostcompute.checks import (
    DTYPES,
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
from hostcompute.numpy_pool import NumpyPool
from hostcompute.packed import row_type, row_values

ABI_VERSION = 8
ISA_VARIABLE = "HOSTCOMPUTE_ISA"
PACKAGE = Path(__file__).parent
REMEDY = "run `python setup.py build_ext --inplace` in a checkout, or reinstall with a C++17 compiler"
FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)
UNKNOWN_ISA, MISSING_ISA, NO_MEMORY = 1, 2, -1

log = logging.getLogger("hostcompute")


class _Arena(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("units", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("stride", ctypes.c_int64),
        ("places", ctypes.c_int64 * 2),
    )


class _Known(NamedTuple):
    """A bundle that was checked once. The reference tells a dead array from a new one with the same id."""

    bundle: weakref.ref
    arena: _Arena
    pointer: object  # what ctypes passes for &arena


def load_library(folder: Path = PACKAGE) -> ctypes.CDLL:
    """The compiled library in `folder`; RuntimeError with the reason if there is none that fits."""
    return _declare(find_library("_native", folder))


def find_library(stem: str, folder: Path = PACKAGE) -> ctypes.CDLL:
    """The library of that name whose interface has our version; RuntimeError with the reason if there is none."""
    own = [folder / f"{stem}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    others = sorted(set(folder.glob(f"{stem}*.so")) - set(own))  # built by another Python: it uses none of it
    problems = []
    for path in [*own, *others]:
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            found = library.hc_abi_version()
        except (OSError, AttributeError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        if found == ABI_VERSION:
            return library
        problems.append(f"{path.name} has interface version {found}, {ABI_VERSION} is needed")
    raise RuntimeError("; ".join(problems) or f"no compiled library {stem} in {folder.name}/")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, i32, i64, f32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
    library.hc_pool_create.argtypes = (i32, ctypes.c_char_p, pointer)
    library.hc_pool_create.restype = pointer
    library.hc_pool_destroy.argtypes = (pointer,)
    library.hc_pool_destroy.restype = None
    library.hc_pool_isa.argtypes = (pointer,)
    library.hc_pool_isa.restype = ctypes.c_char_p
    library.hc_ffn.argtypes = (pointer, pointer, pointer, i64, pointer, i64, i32, f32, i32, *[pointer] * 6)
    library.hc_ffn.restype = i64
    library.hc_gather.argtypes = (pointer, pointer, pointer, i64, pointer)
    library.hc_gather.restype = i64
    library.hc_read_sum.argtypes = (pointer, pointer, i64)
    library.hc_read_sum.restype = ctypes.c_uint64
    library.hc_dot_rows.argtypes = (pointer, pointer, i64, pointer, i64, i64, i32)
    library.hc_dot_rows.restype = i64
    library.hc_sum_rows.argtypes = (pointer, pointer, i64, pointer, i64, i32)
    library.hc_sum_rows.restype = i64
    library.hc_lowbit.argtypes = (pointer, pointer, i64, i64, pointer, pointer, i64, i64, i32, pointer)
    library.hc_lowbit.restype = i64
    library.hc_set_common.argtypes = (i32, ctypes.c_char_p)
    library.hc_set_common.restype = i32
    return library


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]  # half the time of array.ctypes.data


class HostPool:
    """The native worker pool: `threads` of them, the caller included. Calls release the GIL.

    Calls from several Python threads come one after another. Equal calls with equal `threads` give equal
    bits. RuntimeError when the library is missing or when HOSTCOMPUTE_ISA asks for what this CPU lacks.

    dense: what multiplies in calls with weights. blas is NumPy's OpenBLAS, onednn the library of that name: both
    compute the zeros too, give the same answers up to rounding, and have as many threads. RuntimeError without it.
    """

    def __init__(self, threads: int, dense: Dense = "own") -> None:
        check_threads(threads)
        self._products = open_products(dense, threads)
        self.dense = dense
        self._library = load_library()
        wanted = os.environ.get(ISA_VARIABLE, "")
        status = ctypes.c_int32()
        self._handle = self._library.hc_pool_create(threads, wanted.encode(), ctypes.addressof(status))
        if self._handle is None:
            raise creation_error(status.value, wanted, threads)
        self.threads = threads
        self.isa: str = self._library.hc_pool_isa(self._handle).decode()
        self._known: dict[int, _Known] = {}
        self._destroy = weakref.finalize(self, self._library.hc_pool_destroy, self._handle)

    def ffn(  # noqa: PLR0913  the arrays of one call
        self,
        x: npt.NDArray[np.float32],  # [B,D]
        bundle: np.ndarray,  # [n,P,W,D], or packed [n,P,W,groups,bytes]
        units: npt.NDArray[np.int32],  # [C]
        *,
        activation: str,
        threshold: float = 0.0,
        skip_zeros: bool = True,
        out: npt.NDArray[np.float32] | None = None,  # [B,D]; may be x
        live: npt.NDArray[np.uint8] | None = None,  # [B,C]
        admit: npt.NDArray[np.uint8] | None = None,  # [B,C]
        values: npt.NDArray[np.float32] | None = None,  # [B,C]; only with W = 1
        weights: npt.NDArray[np.float32] | None = None,  # [B,C]
    ) -> FfnResult:
        """The FFN of every row of x over the chosen units; a unit's rows are read from memory once per call.

        Writes `out`, `live` (1 where a row of the unit has a non-zero activation) and `values` (what a unit's down row
        is multiplied with) when they are given. The activation is that of the gate, or of gate and up with drelu:
        relu(gate) * relu(up). With two parts it is that of up. Where `admit` is 0 the unit is zero for that row of x.
        With `skip_zeros` up and down are read only where some row of x needs them; without it, and for silu without
        `admit`, always.

        `weights` are a router's: a unit's share of a row is multiplied with its weight. Where that is 0, or `admit`,
        the unit costs the row nothing, and what no row wants is not read. `live_count` is then that of live neurons.
        """
        known = self._find(bundle)
        if x.dtype != FLOAT32 or x.ndim != 2 or x.shape[1] != known.arena.width or not x.flags.c_contiguous:
            check_array("x", x, FLOAT32, (None, known.arena.width))
        if units.dtype != INT32 or units.ndim != 1 or not units.flags.c_contiguous:
            check_array("units", units, INT32, (None,))
        batch, count = len(x), len(units)
        if out is None:
            out = np.empty(x.shape, np.float32)
        else:
            check_output("out", out, FLOAT32, x.shape)
        check_pairs((batch, count), known.arena.rows, live, admit, values, weights)
        code = activation_code(activation, threshold, known.arena.parts)
        handle = self._open_handle()
        if weights is not None and self._products is not None:
            marks = (weights, admit, out, live, values)
            return dense_ffn(self._products, DenseCall(x, bundle, units, activation, threshold, *marks))
        totals = np.empty(batch + 1, np.int64)
        places = [None if one is None else _address(one) for one in (admit, weights, out, live, values, totals)]
        call = (handle, known.pointer, _address(x), batch, _address(units), count)
        status = self._library.hc_ffn(*call, code, threshold, 1 if skip_zeros else 0, *places)
        if status:
            raise call_error(status, units, known.arena.units)
        return FfnResult(out, totals[:batch], int(totals[batch]))

    def gather(self, bundle: np.ndarray, units: npt.NDArray[np.int32], out: np.ndarray) -> np.ndarray:
        """Copies whole units into `out` [C,P,W,...], past the CPU's caches, and returns it."""
        known = self._find(bundle)
        check_array("units", units, INT32, (None,))
        check_output("out", out, bundle.dtype, (len(units), *bundle.shape[1:]))
        status = self._library.hc_gather(self._open_handle(), known.pointer, _address(units), len(units), _address(out))
        if status:
            raise call_error(status, units, known.arena.units)
        return out

    def read_sum(self, buffer: np.ndarray) -> int:
        """The sum of the buffer's 64-bit words, modulo 2**64: reads it once, as fast as the threads can."""
        if not buffer.flags.c_contiguous:
            raise ValueError(f"buffer must be C-contiguous, got strides {buffer.strides}")
        return self._library.hc_read_sum(self._open_handle(), _address(buffer), buffer.nbytes)

    @property
    def handle(self) -> int:
        """The address of the pool for other C code, such as `hostcompute.ffi`'s. Valid until the pool is closed."""
        return self._open_handle()

    @property
    def ffn_address(self) -> int:
        """The address of `hc_ffn`, see src/api.h. Valid for as long as the process lives."""
        address = ctypes.cast(self._library.hc_ffn, ctypes.c_void_p).value
        assert address is not None
        return address

    def arena_address(self, bundle: np.ndarray) -> int:
        """The address of the bundle's `hc_arena`. Valid while both the bundle and the pool live."""
        return ctypes.addressof(self._find(bundle).arena)

    def close(self) -> None:
        """Ends the threads, after any call that is still running. Closing twice is allowed."""
        self._handle = None
        self._destroy()
        if self._products is not None:
            self._products.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open_handle(self) -> int:
        if self._handle is None:
            raise ValueError("pool must be open, got a closed one")
        return self._handle

    def _find(self, bundle: np.ndarray) -> _Known:
        known = self._known.get(id(bundle))
        return known if known is not None and known.bundle() is bundle else self._admit(bundle)

    def _admit(self, bundle: np.ndarray) -> _Known:
        """Checks a bundle and remembers it for as long as it lives; it must not be reshaped in place."""
        check_bundle(bundle)
        part = math.prod(bundle.shape[2:]) * bundle.itemsize
        layout = (bundle.shape[1] * part, (ctypes.c_int64 * 2)(part, 2 * part))
        kind = DTYPES[row_type(bundle)]
        arena = _Arena(_address(bundle), *bundle.shape[:3], row_values(bundle), kind, 0, *layout)
        key, table = id(bundle), self._known

        def forget(reference: weakref.ref) -> None:
            known = table.get(key)
            if known is not None and known.bundle is reference:
                del table[key]

        known = _Known(weakref.ref(bundle, forget), arena, ctypes.c_void_p(ctypes.addressof(arena)))
        table[key] = known
        return known


def creation_error(status: int, isa: str, threads: int) -> Exception:
    if status == UNKNOWN_ISA:
        return ValueError(f"{ISA_VARIABLE} must be portable, avx2, avx512 or avx512vnni, got {isa!r}")
    if status == MISSING_ISA:
        return RuntimeError(f"{ISA_VARIABLE}={isa}: this CPU lacks it; use portable or unset the variable")
    return RuntimeError(f"cannot start {threads} threads: lower the number, or raise the limit (ulimit -u)")


def call_error(status: int, units: npt.NDArray[np.int32], count: int) -> Exception:
    """What a status of `hc_ffn` or `hc_gather` means; count: units of the arena."""
    if status == NO_MEMORY:
        return RuntimeError("no memory for the sums of the threads: use fewer rows in x, or fewer threads")
    return outside_error(units, status - 1, count)


def open_pool(threads: int, dense: Dense = "own") -> HostPool | NumpyPool:
    """The native pool; the NumPy one, with one warning, if the library cannot be loaded.

    dense: what multiplies experts, see `HostPool`. RuntimeError if it cannot be had.
    """
    check_threads(threads)
    try:
        load_library()
    except RuntimeError as error:
        log.warning("computing in NumPy, many times slower (%s): %s", error, REMEDY)
        return NumpyPool(threads, dense)
    return HostPool(threads, dense)


def default_threads() -> int:
    """Physical cores in this process's affinity mask."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)
