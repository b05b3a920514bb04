"""Matrix products by oneDNN, loaded with ctypes from the PyPI package `onednn`, weights of 16 bits as they are.

The package has no Python module, and its library finds neither its own dependencies nor a CPU: those lie beside it and
are loaded first, and the OpenCL runtime among them is named in the environment while oneDNN looks for a device.
"""

import ctypes
import functools
import os
import re
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

REMEDY = "pip install 'dynajax[onednn]'"
LIBRARY, OPENCL, TBB = "libdnnl.so.3", "libintelocl.so", "libtbb.so.12"
OPENCL_VARIABLE = "OCL_ICD_FILENAMES"
CPU, IN_ORDER, SOURCE, WEIGHTS, TARGET = 1, 1, 1, 33, 17  # dnnl_types.h
TYPES = {"float16": 1, "bfloat16": 2, "float32": 3}
STATUSES = ("success", "out_of_memory", "invalid_arguments", "unimplemented", "last_impl_reached", "runtime_error")
TBB_CREATE = "_ZN3tbb6detail2r16createERNS0_2d114global_controlE"
TBB_DESTROY = "_ZN3tbb6detail2r17destroyERNS0_2d114global_controlE"
Floats = npt.NDArray[np.float32]
Pointer = ctypes.c_void_p


class _Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = (("index", ctypes.c_int), ("memory", Pointer))


class _GlobalControl(ctypes.Structure):
    """tbb::global_control; parameter 0 is the largest number of threads."""

    _fields_ = (("value", ctypes.c_size_t), ("reserved", ctypes.c_ssize_t), ("parameter", ctypes.c_int))


class _Library(NamedTuple):
    dnnl: ctypes.CDLL
    tbb: ctypes.CDLL
    engine: Pointer


class _Product(NamedTuple):
    """A product of one shape, ready to run, and the descriptions of its three operands."""

    primitive: Pointer
    operands: tuple[Pointer, Pointer, Pointer]


@functools.cache
def unavailable() -> str | None:
    """Why it cannot be used in this process, in one line; None if it can. The first call loads the library."""
    try:
        products = OnednnProducts(1)
    except RuntimeError as error:
        return str(error)
    products.close()
    return None


class OnednnProducts:
    """See `dense.Products`. RuntimeError where the library cannot be loaded or lacks one of the types."""

    def __init__(self, threads: int) -> None:
        self._library = _load()
        self._threads = threads
        self._known: dict[tuple, _Product] = {}
        self._turn = threading.Lock()
        stream = Pointer()
        self._check("stream_create", ctypes.byref(stream), self._library.engine, IN_ORDER)
        self._stream = stream
        self._destroy = weakref.finalize(self, _destroy, self._library.dnnl, stream, self._known)
        for dtype in TYPES:
            self._find(1, (2, 2), dtype, transposed=True)

    def dot_rows(self, x: Floats, matrix: np.ndarray) -> Floats:
        """x [n,D] times every row of the matrix [W,D] -> [n,W]."""
        return self._multiply(x, matrix, transposed=True)

    def sum_rows(self, h: Floats, matrix: np.ndarray) -> Floats:
        """The rows of the matrix [W,D], summed with the factors h [n,W] -> [n,D]."""
        return self._multiply(h, matrix, transposed=False)

    def close(self) -> None:
        self._destroy()

    def _multiply(self, x: Floats, matrix: np.ndarray, *, transposed: bool) -> Floats:
        with self._turn:
            return self._in_turn(x, matrix, transposed)

    def _in_turn(self, x: Floats, matrix: np.ndarray, transposed: bool) -> Floats:
        rows = padded(len(x))
        given = np.zeros((rows, x.shape[1]), np.float32)
        given[: len(x)] = x
        y = np.empty((rows, matrix.shape[0 if transposed else 1]), np.float32)
        product = self._find(rows, matrix.shape, matrix.dtype.name, transposed=transposed)
        with self._bounded(), self._memories(product, (given, matrix, y)) as memories:
            arguments = (_Argument * 3)(*zip((SOURCE, WEIGHTS, TARGET), memories, strict=True))
            self._check("primitive_execute", product.primitive, self._stream, 3, arguments)
            self._check("stream_wait", self._stream)
        return y[: len(x)]

    @contextmanager
    def _bounded(self) -> Generator[None]:
        """While it holds no pool of threads of the process has more; oneDNN's is TBB's."""
        control = _GlobalControl(self._threads, 0, 0)
        getattr(self._library.tbb, TBB_CREATE)(ctypes.byref(control))
        try:
            yield
        finally:
            getattr(self._library.tbb, TBB_DESTROY)(ctypes.byref(control))

    @contextmanager
    def _memories(self, product: _Product, arrays: tuple[np.ndarray, ...]) -> Generator[list[Pointer]]:
        memories: list[Pointer] = []
        try:
            for operand, array in zip(product.operands, arrays, strict=True):
                memory = Pointer()
                place = Pointer(array.ctypes.data)
                self._check("memory_create", ctypes.byref(memory), operand, self._library.engine, place)
                memories.append(memory)
            yield memories
        finally:
            for memory in memories:
                self._library.dnnl.dnnl_memory_destroy(memory)

    def _find(self, rows: int, shape: tuple[int, ...], dtype: str, *, transposed: bool) -> _Product:
        key = (rows, shape, dtype, transposed)
        if key not in self._known:
            self._known[key] = self._make(rows, shape, dtype, transposed)
        return self._known[key]

    def _make(self, rows: int, shape: tuple[int, ...], dtype: str, transposed: bool) -> _Product:
        inner, outer = shape[::-1] if transposed else shape
        operands = (
            self._describe((rows, inner), (inner, 1), "float32"),
            self._describe((inner, outer), (1, inner) if transposed else (outer, 1), dtype),
            self._describe((rows, outer), (outer, 1), "float32"),
        )
        source, weights, target = operands
        kind, primitive, engine = Pointer(), Pointer(), self._library.engine
        create = ctypes.byref(kind), engine, source, weights, None, target, None
        self._check("matmul_primitive_desc_create", *create, what=f"float32 times {dtype}")
        self._check("primitive_create", ctypes.byref(primitive), kind)
        self._library.dnnl.dnnl_primitive_desc_destroy(kind)
        return _Product(primitive, operands)

    def _describe(self, shape: tuple[int, int], strides: tuple[int, int], dtype: str) -> Pointer:
        description, pair = Pointer(), ctypes.c_int64 * 2
        arguments = ctypes.byref(description), 2, pair(*shape), TYPES[dtype], pair(*strides)
        self._check("memory_desc_create_with_strides", *arguments)
        return description

    def _check(self, name: str, *arguments: object, what: str = "") -> None:
        _check(self._library.dnnl, name, *arguments, what=what)


open_products = OnednnProducts


def padded(rows: int) -> int:
    """The rows of the product that is computed for so many: few different shapes, since each is compiled once."""
    step = 1 if rows <= 4 else 4 if rows <= 16 else 16 if rows <= 128 else 64
    return -(-rows // step) * step


def _check(dnnl: ctypes.CDLL, name: str, *arguments: object, what: str = "") -> None:
    status = getattr(dnnl, f"dnnl_{name}")(*arguments)
    if status:
        reason = STATUSES[status] if status < len(STATUSES) else str(status)
        raise RuntimeError(f"oneDNN's {name} failed{what and f' for {what}'}: {reason}")


def _destroy(dnnl: ctypes.CDLL, stream: Pointer, known: dict[tuple, _Product]) -> None:
    for product in known.values():
        dnnl.dnnl_primitive_destroy(product.primitive)
        for operand in product.operands:
            dnnl.dnnl_memory_desc_destroy(operand)
    known.clear()
    dnnl.dnnl_stream_destroy(stream)


@functools.cache
def _load() -> _Library:
    """The library with an engine for the CPU, once in a process. RuntimeError with the reason if there is none."""
    folder = _folder()
    dnnl, tbb = load_beside(folder, LIBRARY), load_beside(folder, TBB)
    engine = Pointer()
    before = os.environ.get(OPENCL_VARIABLE)
    os.environ[OPENCL_VARIABLE] = str(folder / OPENCL)
    try:
        _check(dnnl, "engine_create", ctypes.byref(engine), CPU, ctypes.c_size_t(0))
    finally:
        if before is None:
            del os.environ[OPENCL_VARIABLE]
        else:
            os.environ[OPENCL_VARIABLE] = before
    return _Library(dnnl, tbb, engine)


def _folder() -> Path:
    """Where the package has put its libraries, and its dependencies theirs."""
    try:
        package = distribution("onednn")
    except PackageNotFoundError:
        raise RuntimeError("the package onednn is not installed") from None
    for file in package.files or ():
        if file.name == LIBRARY:
            return Path(str(package.locate_file(file))).resolve().parent
    raise RuntimeError(f"the package onednn {package.version} has no {LIBRARY}")


def load_beside(folder: Path, name: str) -> ctypes.CDLL:
    """Loads a library, and before it those of the same folder that it asks for. RuntimeError where one is missing."""
    while True:
        try:
            return ctypes.CDLL(str(folder / name))
        except OSError as error:
            missing = re.match(r"(\S+): cannot open shared object file", str(error))
            if missing is None or missing[1] == str(folder / name) or not (folder / missing[1]).exists():
                raise RuntimeError(f"{name} cannot be loaded: {error}") from None
            load_beside(folder, missing[1])
