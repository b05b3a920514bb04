"""Shows an observer what a layer's FFN reads and which of its units are live, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.cold import ColdSide
from dynajax.engine.weights import DenseWeights
from dynajax.pool import DevicePool
from dynajax.programs import Programs

Rows = npt.NDArray[np.float32]
Observe = Callable[[int, Rows, npt.NDArray[np.bool_]], None]  # layer, FFN input [T, D], live [T, F]: copies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """Some tokens in one layer. Copies, the observer's own."""

    layer: int
    hidden: Rows  # [T, D] what the FFN reads
    live: npt.NDArray[np.bool_]  # [T, F] whose activation is not zero
    stream: Rows | None  # [T, D] what the norm before the FFN reads, if asked for
    values: Rows | None  # [T, F] |activation (x up)|, what multiplies the down row, if asked for


class Observer:
    """Calls `tell` once for every layer of a prompt or of a step, in order of layers, in the thread that runs it.

    Live: the activation is not zero. The device's half is asked by a program of its own, so that those which compute
    stay as they are; while nobody observes, nothing of this runs. values: only where the activation has no zeros.
    """

    def __init__(
        self,
        tell: Callable[[Seen], None],
        programs: Programs,
        weights: DenseWeights,
        pool: DevicePool,
        cold: ColdSide,
        *,
        streams: bool = False,
        values: bool = False,
    ):
        self._tell, self._programs, self._weights, self._pool, self._cold = tell, programs, weights, pool, cold
        self._spec, self._streams, self._values = programs.shapes.spec, streams, values
        assert not (values and self._spec.activation.has_zeros), "live says what has a value"

    def before(self, x: jax.Array | Rows, start: int, y_cold: Rows) -> Rows | None:
        """What the norm of a parallel layer reads, if that is wanted: x [S, D] from `start`, its host's share added."""
        if not self._streams or not self._spec.parallel:
            return None
        return _rows(x, start, len(y_cold)) + y_cold[:, : self._spec.hidden] * np.float32(self._spec.residual_scale)

    def after(self, layer: int, x: jax.Array, start: int, count: int) -> Rows | None:
        """The same of any other layer: x [S, D] behind its attention, without the bias that waits there for the FFN."""
        if not self._streams or self._spec.parallel:
            return None
        stream = _rows(x, start, count)
        if self._spec.ffn_bias:
            bias = self._weights.layers[layer][self._programs.leaf_names.index("down_bias")]
            stream -= np.asarray(bias).astype(np.float32) * np.float32(self._spec.residual_scale)
        return stream

    def hot(self, layer: int, h: jax.Array) -> npt.NDArray:
        """Of the pool's slots for h [T, W]: [T, G] which are live, or |value| where the activation has no zeros."""
        slots = self._pool.slots[layer]
        if not slots:
            return np.zeros((len(h), 0), np.bool_)
        program = self._programs.get("live_slots", len(h), slots)
        with self._pool.lock:
            return np.asarray(program(h, self._pool.parts(layer)))

    def compute(self, layer: int, h: Rows, hot: Sequence[npt.NDArray], streams: Sequence[Rows | None]) -> Rows:
        """The host's half y_cold [T, W], and the observer told. hot [T, G], streams [T, D]: in pieces of h's rows."""
        spec, count = self._spec, len(h)
        units, found = self._cold.units(layer), np.concatenate(hot)
        cold = np.zeros((count, len(units)), np.uint8)
        values = np.zeros((count, len(units)), np.float32) if self._values else None
        y = self._cold.run(layer, h, cold, values) if len(units) else np.zeros_like(h)
        bucket = self._pool.bucket(layer)
        live, whole = np.empty((count, spec.ffn), np.bool_), None
        live[:, units], live[:, bucket] = cold, found != 0
        if values is not None:
            whole = np.empty((count, spec.ffn), np.float32)
            whole[:, units], whole[:, bucket] = np.abs(values), found
        parts = [part for part in streams if part is not None]
        stream = np.concatenate(parts) if parts else None
        self._tell(Seen(layer=layer, hidden=h[:, : spec.hidden].copy(), live=live, stream=stream, values=whole))
        return y


def _rows(x: jax.Array | Rows, start: int, count: int) -> Rows:
    """A copy of some rows; x itself remembers nothing, for the next program takes it."""
    return np.array(jax.lax.dynamic_slice_in_dim(x, np.int32(start), count))
