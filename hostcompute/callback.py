"""The host function as a JAX callback, inside one jitted program: the plain form that other modes are held against.

The host function gets NumPy arrays and must not call JAX: a callback that waits for a device can hang.
"""

from collections.abc import Callable
from typing import Self

import jax
import numpy as np
import numpy.typing as npt

HostFn = Callable[[int, npt.NDArray[np.float32]], npt.NDArray[np.float32]]  # (layer, h [T,D]) -> y [T,D]
# (layer, h [T,D], ids int32 [T,K], weights [T,K]) -> y [T,D]
ExpertsFn = Callable[
    [int, npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]], npt.NDArray[np.float32]
]


class CallbackSlot:
    """Carries an exception of a host function past JAX, which would make a runtime error of its own of it.

    Around each run of a program, until its result is ready:

        with slot:
            program(x).block_until_ready()

    The first exception in the block is raised at its end, with its own type. After it the host function is not
    called again before the end of the block; the program runs on with zeros, and its result is not to be used.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._watching = False

    def __enter__(self) -> Self:
        self.error, self._watching = None, True
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        error, self.error, self._watching = self.error, None, False
        if error is not None:
            raise error from raised

    def catch(self, error: BaseException) -> bool:
        """Whether the exception was kept; if not, nobody waits for it here and it must go on."""
        if self._watching:
            self.error = error
        return self._watching


def cold_ffn_callback(host_fn: HostFn, layer: jax.Array, h: jax.Array, slot: CallbackSlot | None = None) -> jax.Array:
    """y_cold [T,D] float32 = host_fn(layer, h), called when the program gets there. For use under `jit`.

    layer: int32 scalar, may be traced; h: [T,D] float32, which host_fn may read until it returns. JAX reports an
    exception that no slot caught when the program is called or when its result is waited for.
    """
    _check_rows(h)

    def on_host(layer: jax.Array, h: jax.Array) -> npt.NDArray[np.float32]:
        rows = np.asarray(h)
        return _guarded(slot, rows, lambda: host_fn(int(np.asarray(layer)), rows))

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(h.shape, np.float32), layer, h)


def cold_experts_callback(
    host_fn: ExpertsFn,
    layer: jax.Array,
    h: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    slot: CallbackSlot | None = None,
) -> jax.Array:
    """y_cold [T,D] float32 = host_fn(layer, h, ids, weights), else as `cold_ffn_callback`. For use under `jit`.

    ids: int32 [T,K], the experts of each row; weights: float32 [T,K]. What `ffi.cold_experts_ffi` gives, of a host_fn
    that sums up the share of the experts on the host in the active rows.
    """
    _check_rows(h)
    if ids.ndim != 2 or ids.dtype != np.int32 or ids.shape[0] != h.shape[0]:
        raise ValueError(f"ids must be int32 [{h.shape[0]},K], got {ids.dtype} {list(ids.shape)}")
    if weights.dtype != np.float32 or weights.shape != ids.shape:
        raise ValueError(f"weights must be float32 {list(ids.shape)}, got {weights.dtype} {list(weights.shape)}")

    def on_host(layer: jax.Array, *operands: jax.Array) -> npt.NDArray[np.float32]:
        h, ids, weights = (np.asarray(operand) for operand in operands)
        return _guarded(slot, h, lambda: host_fn(int(np.asarray(layer)), h, ids, weights))

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(h.shape, np.float32), layer, h, ids, weights)


def _check_rows(h: jax.Array) -> None:
    if h.ndim != 2 or h.dtype != np.float32:
        raise ValueError(f"h must be float32 [T,D], got {h.dtype} {list(h.shape)}")


def _guarded(
    slot: CallbackSlot | None, rows: npt.NDArray[np.float32], call: Callable[[], npt.NDArray[np.float32]]
) -> npt.NDArray[np.float32]:
    """What the call returns; zeros if the slot holds an exception, or catches the call's."""
    if slot is not None and slot.error is not None:
        return np.zeros_like(rows)
    try:
        y = call()
        if y.dtype != np.float32 or y.shape != rows.shape:
            raise ValueError(f"host_fn must return float32 {list(rows.shape)}, got {y.dtype} {list(y.shape)}")
    except BaseException as error:
        if slot is None or not slot.catch(error):
            raise
        return np.zeros_like(rows)
    return y
