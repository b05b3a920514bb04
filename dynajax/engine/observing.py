"""Shows an observer what a layer's FFN reads and which of its units are live, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.cold import ColdSide
from dynajax.pool import DevicePool
from dynajax.programs import Programs

Rows = npt.NDArray[np.float32]
Observe = Callable[[int, Rows, npt.NDArray[np.bool_]], None]  # layer, FFN input [T, D], live [T, F]: copies


class Observer:
    """Calls `tell` once for every layer of a prompt or of a step, in order of layers, in the thread that runs it.

    Live: the activation is not zero. The device's half is asked by a program of its own, so that those which compute
    stay as they are; while nobody observes, nothing of this runs.
    """

    def __init__(self, tell: Observe, programs: Programs, pool: DevicePool, cold: ColdSide):
        self._tell, self._programs, self._pool, self._cold = tell, programs, pool, cold

    def hot(self, layer: int, h: jax.Array) -> npt.NDArray[np.bool_]:
        """Which of the pool's slots are live for h [T, W]: [T, G]."""
        slots = self._pool.slots[layer]
        if not slots:
            return np.zeros((len(h), 0), np.bool_)
        program = self._programs.get("live_slots", len(h), slots)
        with self._pool.lock:
            return np.asarray(program(h, self._pool.parts(layer)))

    def compute(self, layer: int, h: Rows, hot: Sequence[npt.NDArray[np.bool_]]) -> Rows:
        """The host's half y_cold [T, W], and the observer told. hot: [T, G], in pieces of h's rows."""
        spec = self._programs.shapes.spec
        units = self._cold.units(layer)
        cold = np.zeros((len(h), len(units)), np.uint8)
        y = self._cold.run(layer, h, cold) if len(units) else np.zeros_like(h)
        live = np.empty((len(h), spec.ffn), np.bool_)
        live[:, units] = cold
        live[:, self._pool.bucket(layer)] = np.concatenate(hot)
        self._tell(layer, h[:, : spec.hidden].copy(), live)
        return y
