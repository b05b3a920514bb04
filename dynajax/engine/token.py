"""A token as one program: with every unit on the device, or with the host's half called from inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.hosts import Host
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece
from dynajax.engine.threads import ThreadsRunner
from dynajax.engine.weights import DenseWeights
from dynajax.pool import DevicePool, Parts
from dynajax.programs import Programs, bucket_of
from dynajax.timeline import Lanes


class Operands(NamedTuple):
    """What every program that decodes a whole token is given."""

    ends: tuple  # norm, the head's table, and the embedding's where it is on the device
    caches: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
    pools: tuple[Parts, ...]  # by layer that has units
    start: npt.NDArray  # ids, or the rows of the embedding where that is on the host


Run = Callable[[Operands], tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]]  # logits, ks, vs


def run_token(
    weights: DenseWeights,
    pool: DevicePool,
    state: DeviceState,
    ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    lanes: Lanes | None,
    run: Run,
) -> jax.Array:
    """One token of each row by a program that takes the pool and the caches -> logits, once they are there."""
    ends = (weights.norm, weights.table, weights.tables)
    start = ids if weights.tables else weights.lookup(ids, positions)
    caches = (tuple(state.ks), tuple(state.vs))
    with pool.lock:
        begin = time.perf_counter()
        pools = tuple(pool.parts(layer) for layer in range(len(pool.slots)))
        logits, ks, vs = run(Operands(ends, caches, pools, start))
        state.ks, state.vs = list(ks), list(vs)
        logits.block_until_ready()
    if lanes is not None:
        lanes.add("device", "token", begin, time.perf_counter())
    return logits


class TokenRunner:
    """Decodes in one program. Prefill is layer-major as in threads mode, by `layers`, which also decodes while somebody
    observes: nothing inside one program can be seen."""

    def __init__(self, programs: Programs, weights: DenseWeights, pool: DevicePool, host: Host, layers: ThreadsRunner):
        self._programs, self._weights, self._pool, self._host = programs, weights, pool, host
        self.layers = layers
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
        if self.layers.observer is not None:
            return self.layers.rows(state, ids, positions, active)
        weights, pool = self._weights, self._pool
        prefix = bucket_of(int(positions.max()) + 1, self._programs.shapes.prefixes)
        program = self._programs.get("token_rows", prefix, *pool.slots)

        def run(given: Operands):
            ends, caches, pools, start = given
            logits, state.tally, ks, vs = program(
                self._host.handle, ends, weights.layers, caches, pools, start, state.tally, positions, active
            )
            return logits, ks, vs

        with self._host.running(active):
            return run_token(weights, pool, state, ids, positions, self.lanes, run)
