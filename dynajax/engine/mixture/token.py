"""A token of a mixture of experts as one program; see `engine.token`."""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.hosts import Host
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece
from dynajax.engine.token import Operands, run_token
from dynajax.programs import bucket_of
from dynajax.timeline import Lanes


class MixtureTokenRunner:
    """Decodes in one program: with every expert on the device, or with the host's half called from inside. Prefill, and
    decoding while somebody looks on, is layer by layer."""

    def __init__(self, layers: MixtureLayers, host: Host):
        self.layers, self._host = layers, host
        self.lanes: Lanes | None = None

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> None:
        """Prefill of one row; see `Runner`."""
        self.layers.prompt(state, row, pieces, on_part)

    def reset_counters(self) -> None:
        """Nothing is timed: the halves of one program cannot be told apart."""

    def hot_s(self, steps: int) -> None:
        """Unknown in this mode."""

    def rows(
        self,
        state: DeviceState,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        active: npt.NDArray[np.bool_],
    ) -> jax.Array:
        """One token in each row through the model; see `Runner`."""
        layers, pool, weights = self.layers, self.layers.pool, self.layers.weights
        if layers.watch is not None:
            return layers.rows(state, ids, positions, active)
        prefix = bucket_of(int(positions.max()) + 1, layers.programs.shapes.prefixes)
        program = layers.programs.get("token_rows", prefix, *pool.slots)
        first = layers.spec.stepped[0]
        leaves = (weights.layers[first:], weights.routing[first:])

        def run(given: Operands):
            ends, caches, pools, start = given
            where = tuple(layers.slots_of(m) for m in range(len(pools)))
            known = (start, state.tally, positions, active, where, *layers.sources(state))
            logits, state.tally, ks, vs = program(self._host.handle, ends, leaves, caches, pools, *known)
            return logits, ks, vs

        with self._host.running(active):
            return run_token(weights, pool, state, ids, positions, self.lanes, run)
