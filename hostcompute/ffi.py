"""The native kernels as custom calls inside jitted programs of the CPU backend: about a microsecond a call.

For the FFN a program gets the address of a `HostTable` as an operand, so it can be compiled before there are weights,
and one compiled program serves several engines. Kernels and answers are those of `HostPool.ffn`, bit for bit.
Products with 16-bit matrices, and with packed ones of fewer bits, need no table. They run in the threads of the pool
that was opened first among those that are open, an engine's for example; where none is, in as many as there are cores.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from hostcompute.checks import activation_code, check_array, check_bundle
from hostcompute.library import (
    ISA_VARIABLE,
    REMEDY,
    HostPool,
    call_error,
    creation_error,
    default_threads,
    find_library,
    load_library,
)
from hostcompute.packed import GROUP, is_packed, row_values

TARGET = "dynajax_cold_ffn"
EXPERTS = "dynajax_cold_experts"
DOT_ROWS = "dynajax_dot_rows"
SUM_ROWS = "dynajax_sum_rows"
POOL_FFN = "dynajax_pool_ffn"
ATTEND = "dynajax_attend"
LOWBIT = "dynajax_lowbit"
WEIGHT_TYPES = ("float16", "bfloat16", "uint16")  # uint16: the bits of bfloat16
MATRIX_TYPES = f"{', '.join(WEIGHT_TYPES)}, or packed in uint8 [O,groups,34 or 18]"
NOT_ATTACHED, NO_EXPERT = -2, -3
REBUILD = "it was built for a newer one: run `python setup.py build_ext --inplace --force` in a checkout, or reinstall"


class _Layer(ctypes.Structure):
    """FfiLayer of ffi_src/table.h."""

    _fields_ = (
        ("ffn", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("threshold", ctypes.c_float),
        ("skip_zeros", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("live", ctypes.c_int64),  # from here on 64-bit counters, see HostTable._counts
        ("bytes_read", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("nanoseconds", ctypes.c_int64),
        ("computed", ctypes.c_int64),
        ("status", ctypes.c_int64),
    )


class _Table(ctypes.Structure):
    """FfiTable of ffi_src/table.h."""

    _fields_ = (("layers", ctypes.c_int64), ("layer", ctypes.c_void_p))


class Counters(NamedTuple):
    """What the calls since the last `reset` added up to, by layer. The arrays belong to the caller."""

    live: npt.NDArray[np.int64]  # [L] live units, summed over the rows; of experts, pairs of a row and one on the host
    bytes_read: npt.NDArray[np.int64]  # [L] of weights
    rows: npt.NDArray[np.int64]  # [L] active rows
    seconds: npt.NDArray[np.float64]  # [L] inside the handler, on the host
    computed: npt.NDArray[np.int64]  # [L] units, each once a call; of experts those that an active row was sent to


class HostTable:
    """Where the weights of one engine's layers lie, for programs that call `cold_ffn_ffi` or `cold_experts_ffi`.

    Must live as long as any program that was given its address may run. `attach` and `detach` are for moments in
    which none runs; `detach` comes before the pool is closed.
    """

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"layers must be >= 1, got {layers}")
        self._layers = (_Layer * layers)()
        self._table = _Table(layers, ctypes.addressof(self._layers))
        words = np.frombuffer(memoryview(self._layers).cast("B"), np.int64).reshape(layers, -1)
        self._counts = words[:, _Layer.live.offset // 8 :]  # [L, live ... status]
        self._held: tuple[HostPool, list[np.ndarray], list[npt.NDArray[np.int32]]] | None = None

    @property
    def address(self) -> npt.NDArray[np.uint32]:
        """The operand [2] of the calls; always the same."""
        return np.array([ctypes.addressof(self._table)], np.uint64).view(np.uint32)

    def attach(
        self,
        pool: HostPool,
        arenas: Sequence[np.ndarray],  # [L] of [n,P,W,D]
        units_by_layer: Sequence[npt.NDArray[np.int32]],  # [L] of [C]
        *,
        activation: str,
        threshold: float = 0.0,
        skip_zeros: bool = True,
    ) -> None:
        """What the layers compute from now on; keeps pool and arrays alive. Counters start at zero.

        The arrays are read in place at every call: changed units take effect, and are checked, at the next one.
        """
        if not isinstance(pool, HostPool):
            raise ValueError(f"pool must be a HostPool, got {type(pool).__name__}")
        held = (pool, list(arenas), list(units_by_layer))
        for name, given in (("arenas", held[1]), ("units_by_layer", held[2])):
            if len(given) != len(self._layers):
                raise ValueError(f"{name} must have {len(self._layers)} layers, got {len(given)}")
        layers = []
        for arena, units in zip(held[1], held[2], strict=True):
            check_bundle(arena)
            if arena.shape[2] > 1 and pool.dense != "own":
                raise ValueError(f"pool must have dense 'own' to compute experts in programs, got {pool.dense!r}")
            check_array("units", units, np.dtype(np.int32), (None,))
            code = activation_code(activation, threshold, arena.shape[1])
            where = (pool.ffn_address, pool.handle, pool.arena_address(arena), units.ctypes.data, len(units))
            layers.append(_Layer(*where, code, threshold, skip_zeros))
        self._layers[:] = layers
        self._held = held

    def detach(self) -> None:
        """Lets go of pool and arrays; a program fails that calls a layer before something is attached again."""
        self._layers[:] = [_Layer() for _ in self._layers]
        self._held = None

    def reset(self) -> None:
        """Sets the counters to zero and forgets an error."""
        self._counts[:] = 0

    def counters(self) -> Counters:
        live, bytes_read, rows, nanoseconds, computed, _ = self._counts.T.copy()
        return Counters(live, bytes_read, rows, nanoseconds * 1e-9, computed)

    @property
    def error(self) -> Exception | None:
        """Why a program failed, if it was a layer of this table: to be raised in place of what JAX raised.

        That is a JaxRuntimeError or a ValueError, from the call or when the result is waited for.
        The first failure since the last `reset` or `attach`, of the first layer that had one.
        """
        for index, status in enumerate(self._counts[:, -1].tolist()):
            if status == NOT_ATTACHED:
                return RuntimeError(f"layer {index} has no weights: attach them before the program runs")
            if status:
                assert self._held is not None
                _, arenas, units_by_layer = self._held
                experts = len(arenas[index])
                if status <= NO_EXPERT:
                    chosen = ctypes.c_int32(NO_EXPERT - status).value
                    error = ValueError(f"ids must be in [0, {experts}), got {chosen}")
                else:
                    error = call_error(status, units_by_layer[index], experts)
                error.add_note(f"in layer {index}")
                return error
        return None


@functools.cache
def unavailable() -> str | None:
    """Why the custom calls cannot be used in this process; None if they can. The first call registers the handlers.

    It starts JAX's backends, because a handler that is refused while one starts takes the backend down with it.
    """
    try:
        native, library = load_library(), find_library("_ffi")
    except RuntimeError as error:
        return f"{error}; {REMEDY}"
    threads, isa = default_threads(), os.environ.get(ISA_VARIABLE, "")
    if status := native.hc_set_common(threads, isa.encode()):
        return str(creation_error(status, isa, threads))
    try:
        jax.devices("cpu")
    except RuntimeError as error:
        return f"no CPU backend: {error}"
    try:
        for name in (TARGET, EXPERTS, DOT_ROWS, SUM_ROWS, LOWBIT, POOL_FFN, ATTEND):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except RuntimeError as error:
        return f"jaxlib {version('jaxlib')} refuses the handler: {error}; {REBUILD}"
    library.dynajax_use_dot_rows(ctypes.cast(native.hc_dot_rows, ctypes.c_void_p))
    library.dynajax_use_sum_rows(ctypes.cast(native.hc_sum_rows, ctypes.c_void_p))
    library.dynajax_use_lowbit(ctypes.cast(native.hc_lowbit, ctypes.c_void_p))
    library.dynajax_use_ffn(ctypes.cast(native.hc_ffn, ctypes.c_void_p))
    library.dynajax_use_attend(ctypes.cast(native.hc_attend, ctypes.c_void_p))
    return None


def cold_ffn_ffi(table: jax.Array, layer: int, h: jax.Array, active: jax.Array) -> jax.Array:
    """y [T,D] float32: the FFN that the table holds for this layer, of the active rows. For use under `jit`.

    table: uint32 [2], `HostTable.address`; h: float32 [T,D]; active: bool [T]. Rows that are not active are zero and
    cost nothing. On the CPU backend only. When a call fails, so does the program: `HostTable.error` says why.
    """
    _check_rows(table, h, active)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(h.shape, np.float32))
    return call(table, h, active, layer=np.int32(layer))


def cold_experts_ffi(
    table: jax.Array, layer: int, h: jax.Array, ids: jax.Array, weights: jax.Array, active: jax.Array
) -> jax.Array:
    """y [B,D] float32: what the layer's experts on the host give to the active rows. For use under `jit`.

    table, h and active as in `cold_ffn_ffi`; ids: int32 [B,K], the experts of each row; weights: float32 [B,K]. A row
    gets the sum of its weights times the answers of those of its experts that are among the table's units; the others
    are somebody else's. An expert that no active row chose, or only with weight 0, is not read. The program fails where
    an active row chose one outside of the arena; `HostTable.error` says which.
    """
    _check_rows(table, h, active)
    if ids.ndim != 2 or ids.dtype != np.int32 or ids.shape[0] != h.shape[0]:
        raise ValueError(f"ids must be int32 [{h.shape[0]},K], got {_text(ids)}")
    if weights.dtype != np.float32 or weights.shape != ids.shape:
        raise ValueError(f"weights must be float32 {list(ids.shape)}, got {_text(weights)}")
    call = jax.ffi.ffi_call(EXPERTS, jax.ShapeDtypeStruct(h.shape, np.float32))
    return call(table, h, ids, weights, active, layer=np.int32(layer))


def _check_rows(table: jax.Array, h: jax.Array, active: jax.Array) -> None:
    _check_available()
    if table.dtype != np.uint32 or table.shape != (2,):
        raise ValueError(f"table must be uint32 [2], got {_text(table)}")
    if h.ndim != 2 or h.dtype != np.float32:
        raise ValueError(f"h must be float32 [T,D], got {_text(h)}")
    if active.dtype != np.bool_ or active.shape != h.shape[:1]:
        raise ValueError(f"active must be bool [{h.shape[0]}], got {_text(active)}")


def dot_rows_ffi(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The products of x [T,D] float32 with every row of weights [O,D] -> [T,O], in float32. For use under `jit`.

    Weights are of one of MATRIX_TYPES. On the CPU backend only. Equal operands give equal bits, whatever the number of
    threads. Has no gradient.
    """
    return dot_each_ffi(x, (weights,))[0]


def dot_each_ffi(x: jax.Array, matrices: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`dot_rows_ffi` with several matrices, alike but for their rows, in one call; bit for bit."""
    _check_available()
    width = _weights_width(matrices[0])
    for matrix in matrices[1:]:
        if _width(matrix) != width or matrix.dtype != matrices[0].dtype:
            raise ValueError(f"matrices must be alike but for their rows, got {', '.join(map(_text, matrices))}")
    _check_x(x, width)
    results = tuple(jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), np.float32) for matrix in matrices)
    return tuple(jax.ffi.ffi_call(DOT_ROWS, results, vmap_method="sequential")(x, *matrices))


def sum_rows_ffi(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The rows of weights [G,D], summed with the factors x [T,G] float32 -> [T,D]; else as `dot_rows_ffi`.

    Of up to 16 tokens, a row whose factors are all zero is not read.
    """
    _check_available()
    width = _weights_width(weights)
    _check_x(x, weights.shape[0])
    result = jax.ShapeDtypeStruct((x.shape[0], width), np.float32)
    return jax.ffi.ffi_call(SUM_ROWS, result, vmap_method="sequential")(x, weights)


def _weights_width(weights: jax.Array) -> int:
    width = _width(weights)
    if width is None or weights.dtype == np.float32:
        raise ValueError(f"weights must be a matrix of {MATRIX_TYPES}, got {_text(weights)}")
    return width


def _check_x(x: jax.Array, width: int) -> None:
    if x.ndim != 2 or x.dtype != np.float32 or x.shape[1] != width:
        raise ValueError(f"x must be float32 [T,{width}], got {_text(x)}")


def pool_ffn_ffi(
    h: jax.Array,
    parts: Sequence[jax.Array],
    admit: jax.Array | None = None,
    *,
    activation: str,
    threshold: float = 0.0,
    skip_zeros: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The FFN over all neurons of a pool -> y [T,D] float32, bool [T,G]: which neurons' activation is not zero, and
    int32 [T]: how many.

    h: float32 [T,D]; parts: (gate,) up, down, each [G,D] in float32 or one of MATRIX_TYPES. admit: bool [T,G]; what is
    not admitted adds nothing, and is not live. Answers, and what `skip_zeros` spares, are those of `HostPool.ffn`; on
    the CPU backend only, for use under `jit`. Equal operands give equal bits where the number of threads is the same.
    """
    _check_available()
    code = activation_code(activation, threshold, len(parts))
    if h.ndim != 2 or h.dtype != np.float32:
        raise ValueError(f"h must be float32 [T,D], got {_text(h)}")
    if len(parts) not in (2, 3) or len({(part.shape, part.dtype) for part in parts}) != 1:
        raise ValueError(f"parts must be 2 or 3 equal ones, got {', '.join(map(_text, parts))}")
    part = parts[0]
    if _width(part) != h.shape[1]:
        raise ValueError(f"parts must be [G,{h.shape[1]}] of float32, {MATRIX_TYPES}, got {_text(part)}")
    marks = (h.shape[0], part.shape[0])
    if admit is not None and (admit.dtype != np.bool_ or admit.shape != marks):
        raise ValueError(f"admit must be bool {list(marks)}, got {_text(admit)}")
    results = tuple(
        jax.ShapeDtypeStruct(*told) for told in ((h.shape, "float32"), (marks, "bool"), (marks[:1], "int32"))
    )
    call = jax.ffi.ffi_call(POOL_FFN, results, vmap_method="sequential")
    settings = {"activation": np.int32(code), "threshold": np.float32(threshold), "skip_zeros": skip_zeros}
    y, live, counts = call(h, *parts, *(() if admit is None else (admit,)), parts=np.int32(len(parts)), **settings)
    return y, live, counts


def attend_ffi(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, *, scale: float, window: int | None = None
) -> jax.Array:
    """softmax(scale q k) v over the keys up to each query's position -> [B,T,N,H'] float32. For use under `jit`.

    q: float32 [B,T,N,H]; k: [B,S,KV,H] and v: [B,S,KV,H'] of one type, float32 or one of WEIGHT_TYPES, key s at
    position s; positions: int32 [B,T]. A query sees `window` keys up to its own, None: all; zeros where it sees none.
    What is behind a position is not read. On the CPU backend only. Equal operands give equal bits, whatever the number
    of threads. Has no gradient.
    """
    _check_available()
    if q.ndim != 4 or q.dtype != np.float32:
        raise ValueError(f"q must be float32 [B,T,N,H], got {_text(q)}")
    if k.ndim != 4 or v.ndim != 4 or k.dtype != v.dtype or k.dtype.name not in ("float32", *WEIGHT_TYPES):
        raise ValueError(f"k and v must be [B,S,KV,H] of one of float32, {', '.join(WEIGHT_TYPES)}, got {_text(k)}")
    if v.shape[:3] != k.shape[:3] or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or q.shape[2] % k.shape[2]:
        raise ValueError(f"k and v must fit q {list(q.shape)}, got {_text(k)} and {_text(v)}")
    if positions.dtype != np.int32 or positions.shape != q.shape[:2]:
        raise ValueError(f"positions must be int32 {list(q.shape[:2])}, got {_text(positions)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1 keys, got {window}")
    result = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), np.float32)
    call = jax.ffi.ffi_call(ATTEND, result, vmap_method="sequential")
    return call(q, k, v, positions, window=np.int64(window or 0), scale=np.float32(scale))


def lowbit_rows_ffi(x: jax.Array, codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """The products of x [T,D] float32 with every row of a packed matrix -> [T,O], in float32; else as `dot_rows_ffi`.

    codes uint8 [O, groups * 4 * bits], scales float16 [O, groups], see src/lowbit.h; D is at most 32 a group.
    """
    _check_available()
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}")
    if scales.ndim != 2 or scales.dtype != np.float16:
        raise ValueError(f"scales must be float16 [O,groups], got {_text(scales)}")
    rows, groups = scales.shape
    if codes.dtype != np.uint8 or codes.shape != (rows, groups * 4 * bits):
        raise ValueError(f"codes must be uint8 [{rows}, {groups * 4 * bits}], got {_text(codes)}")
    if x.ndim != 2 or x.dtype != np.float32 or x.shape[1] > groups * GROUP:
        raise ValueError(f"x must be float32 [T, at most {groups * GROUP}], got {_text(x)}")
    result = jax.ShapeDtypeStruct((x.shape[0], rows), np.float32)
    call = jax.ffi.ffi_call(LOWBIT, result, vmap_method="sequential")
    return call(x, codes, scales, bits=np.int32(bits))


def _check_available() -> None:
    if (reason := unavailable()) is not None:
        raise RuntimeError(f"the FFI handler cannot be used: {reason}")


def _width(weights: jax.Array) -> int | None:
    """Values of a row of weights [O,D], or of packed ones [O,groups,bytes]; None where they are no matrix."""
    packed = weights.ndim == 3 and is_packed(weights)
    if not packed and (weights.ndim != 2 or weights.dtype.name not in ("float32", *WEIGHT_TYPES)):
        return None
    return row_values(weights)


def _text(array: jax.Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
