"""Callback mode: a token is one program, and the host's half is a JAX callback inside it.

Slower than threads mode on every device, since the halves cannot overlap; it is the plain form of the same
computation, kept as the oracle that threads mode is compared with.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.cold import ColdSide
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.engine.weights import DenseWeights
from dynajax.pool import DevicePool
from dynajax.programs import Programs, bucket_of
from hostcompute.callback import CallbackSlot, cold_ffn_callback


class HostBridge:
    """The host function behind the callbacks of one engine; the cold side is attached once it is loaded.

    `wanted` masks the rows of h that count; the others get zeros without being computed.
    """

    def __init__(self) -> None:
        self.slot = CallbackSlot()
        self.cold: ColdSide | None = None
        self.wanted: npt.NDArray[np.bool_] = np.ones(0, np.bool_)

    def ffn(self, layer: jax.Array, h: jax.Array) -> jax.Array:
        """Traced into the programs: layer int32, h [T,D] -> y_cold [T,D]."""
        return cold_ffn_callback(self.compute, layer, h, self.slot)

    def compute(self, layer: int, h: Rows) -> Rows:
        """Runs on the host while the program waits."""
        assert self.cold is not None, "no weights were attached"
        if self.wanted.all():
            return self.cold.run(layer, h)
        y = np.zeros_like(h)
        y[self.wanted] = self.cold.run(layer, h[self.wanted])
        return y


class CallbackRunner:
    """See the head of this file."""

    def __init__(
        self,
        programs: Programs,
        weights: DenseWeights,
        pool: DevicePool,
        bridge: HostBridge,
        on_full: Callable[[], object],
    ):
        self._programs, self._weights, self._pool, self._bridge = programs, weights, pool, bridge
        self._on_full = on_full

    def reset_counters(self) -> None:
        """Nothing is timed: the halves of one program cannot be told apart."""

    def hot_s(self, steps: int) -> None:
        """Unknown in this mode."""

    def rows(
        self, state: DeviceState, x: jax.Array | Rows, positions: npt.NDArray[np.int32], active: npt.NDArray[np.bool_]
    ) -> tuple[jax.Array, jax.Array]:
        """One token in each row through all layers; see `Runner`."""
        prefix = bucket_of(int(positions.max()) + 1, self._programs.shapes.prefixes)
        program = self._programs.get("token_rows", prefix, *self._pool.slots)
        self._bridge.wanted = active
        with self._pool.lock, self._bridge.slot:
            x, y_cold, state.tally, state.ks, state.vs = program(
                *self._weights_and_caches(state), x, state.tally, positions, active
            )
            x.block_until_ready()
        return x, y_cold

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> None:
        """One chunk after the other through all layers."""
        for done, (start, size, count) in enumerate(pieces, start=1):
            prefix = bucket_of(start + size, self._programs.shapes.chunk_prefixes)
            program = self._programs.get("token_chunk", size, prefix, *self._pool.slots)
            self._bridge.wanted = np.arange(size) < count
            with self._pool.lock, self._bridge.slot:
                state.xs, state.ks, state.vs = program(
                    *self._weights_and_caches(state), state.xs, np.int32(row), np.int32(start)
                )
                state.xs.block_until_ready()
            self._on_full()
            on_part(done, len(pieces))

    def _weights_and_caches(self, state: DeviceState):
        layers = range(len(self._weights.layers))
        caches = (tuple(state.ks), tuple(state.vs))
        return self._weights.layers, caches, tuple(self._pool.parts(i) for i in layers)
