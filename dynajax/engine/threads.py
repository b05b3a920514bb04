"""Threads mode: two programs a layer, and between them the host computes what is not in the pool.

device   attend(i) | hot(i)        | attend(i+1) ...
host               | cold(i) ------^ y_cold
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.cold import ColdSide
from dynajax.engine.observing import Observer
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.engine.weights import DenseWeights
from dynajax.pool import DevicePool
from dynajax.programs import Programs, bucket_of
from dynajax.timeline import Lanes

TIMED_EVERY = 16  # decode steps from one timing of the hot programs to the next


class HotTimer:
    """Estimates the time of the hot programs from every 16th step, which it lets run alone; waiting costs overlap."""

    def __init__(self) -> None:
        self._step = -1
        self._seconds, self._steps = 0.0, 0

    @property
    def due(self) -> bool:
        """Whether the step that runs is timed."""
        return self._step == 0 or self._step % TIMED_EVERY == 1

    def next_step(self) -> None:
        self._step += 1
        if self._step == 1:  # the first step was only timed in case there is no second
            self._seconds, self._steps = 0.0, 0
        self._steps += self.due

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def total_s(self, steps: int) -> float:
        """Seconds of that many steps."""
        return self._seconds / self._steps * steps if self._steps else 0.0


Watch = Callable[[int, Rows], None]  # layer, the FFN input of some tokens [T, W]: valid during the call


class ThreadsRunner:
    """See the head of this file. Owns no buffers. `watch`, if set, is shown every FFN input as it is computed, and
    `observer` also which units are live; with an observer a prompt's last layer is computed too."""

    def __init__(
        self,
        programs: Programs,
        weights: DenseWeights,
        pool: DevicePool,
        cold: ColdSide,
        on_full: Callable[[], object],
    ):
        self._programs, self._weights, self._pool, self._cold = programs, weights, pool, cold
        self._on_full = on_full
        shapes = programs.shapes
        self._zeros = np.zeros((shapes.batch, shapes.spec.unit_width), np.float32)
        self._timer = HotTimer()
        self.watch: Watch | None = None
        self.observer: Observer | None = None
        self.lanes: Lanes | None = None

    def reset_counters(self) -> None:
        """Start timing a new generation."""
        self._timer = HotTimer()

    def hot_s(self, steps: int) -> float:
        """Estimated seconds of the hot programs in that many decode steps since the last reset."""
        return self._timer.total_s(steps)

    def rows(
        self,
        state: DeviceState,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        active: npt.NDArray[np.bool_],
    ) -> jax.Array:
        """One token in each row through the model; see `Runner`."""
        programs, weights = self._programs, self._weights
        x, attend = begin_rows(programs, weights, ids, positions)
        self._timer.next_step()
        y_cold = self._zeros
        for layer, leaves in enumerate(self._weights.layers):
            k, v = state.ks[layer], state.vs[layer]
            stream = self.observer.before(x, 0, y_cold) if self.observer is not None else None
            begin = time.perf_counter()
            x, h, state.ks[layer], state.vs[layer] = attend(leaves, k, v, x, y_cold, positions)
            if self.lanes is not None:
                self.lanes.device(f"attend {layer}", begin, h)
            if self.observer is not None and stream is None:
                stream = self.observer.after(layer, x, 0, len(y_cold))
            if self.watch is not None:
                self.watch(layer, np.asarray(h))
            cold = self._cold.has(layer)
            if cold:
                h.copy_to_host_async()
            if self._pool.slots[layer]:
                x = self._hot_rows(state, layer, x, h, active)
            if self.observer is not None:
                y_cold = self._observed_rows(self.observer, layer, h, active, stream)
            else:
                y_cold = self._cold_rows(layer, np.asarray(h), active) if cold else self._zeros
        begin = time.perf_counter()
        logits = programs.get("head")(weights.norm, weights.table, x, y_cold)
        if self.lanes is not None:
            self.lanes.device("head", begin, logits)
            self.lanes.settle()
        return logits

    def prompt(
        self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart, *, whole: bool = False
    ) -> list[Rows]:
        """Every chunk passes layer i before any passes layer i + 1, so that each cold unit is read once a prompt.

        The last layer ends with its keys and values, for nothing reads its FFN, unless the `whole` is wanted: then
        the result is that layer's y_cold by chunk.
        """
        zeros = [np.zeros((size, self._zeros.shape[1]), np.float32) for _, size, _ in pieces]
        y_cold, layers = zeros, len(self._weights.layers)
        for layer in range(layers):
            last = layer == layers - 1 and not whole
            hidden, hot, streams = [], [], []
            for piece, y in zip(pieces, y_cold, strict=True):
                before = self.observer.before(state.xs, piece[0], y) if self.observer is not None else None
                h = self.attend_chunk(state, layer, row, piece, y)
                if self.watch is not None:
                    self.watch(layer, np.asarray(h)[: piece[2]])
                if self.observer is not None:
                    stream = self.observer.after(layer, state.xs, *piece[:2]) if before is None else before
                    streams.append(None if stream is None else stream[: piece[2]])
                if not last:
                    self.hot_chunk(state, layer, h, piece[0])
                if piece[0] == 0:  # the widest chunk's h is alive
                    self._on_full()
                if self.observer is not None:
                    hot.append(self.observer.hot(layer, h)[: piece[2]])
                if self.observer is not None or (self._cold.has(layer) and not last):
                    hidden.append(np.asarray(h)[: piece[2]].copy())  # a view would keep h on the device
            y_cold = self._cold_chunks(layer, pieces, hidden, hot, streams) if hidden else zeros
            on_part(layer + 1, layers)
        return y_cold

    def _hot_rows(self, state: DeviceState, layer: int, x: jax.Array, h: jax.Array, active) -> jax.Array:
        hot = self._programs.get("hot_rows", self._pool.slots[layer])
        if self._timer.due:
            h.block_until_ready()
        start = time.perf_counter()
        with self._pool.lock:
            x, state.tally = hot(x, h, self._pool.parts(layer), state.tally, np.int32(layer), active)
        if self._timer.due:
            x.block_until_ready()
            self._timer.add(time.perf_counter() - start)
        if self.lanes is not None:
            self.lanes.device(f"hot {layer}", start, x)
        return x

    def _cold_rows(self, layer: int, h: Rows, active: npt.NDArray[np.bool_]) -> Rows:
        begin = time.perf_counter()
        y = self._cold.run_active(layer, h, active)
        if self.lanes is not None:
            self.lanes.host(f"cold {layer}", begin)
        return y

    def attend_chunk(self, state: DeviceState, layer: int, row: int, piece: Piece, y_cold: Rows) -> jax.Array:
        """A chunk's attention, `state.xs` moved on -> the FFN's input h [T, W]."""
        start, size, _ = piece
        prefix = bucket_of(start + size, self._programs.shapes.chunk_prefixes)
        attend = self._programs.get("attend_chunk", size, prefix)
        k, v, leaves = state.ks[layer], state.vs[layer], self._weights.layers[layer]
        if self.lanes is not None:  # a chunk is held until it is shown, so only one
            self.lanes.settle()
        at, begin = np.int32(start), time.perf_counter()
        state.xs, h, state.ks[layer], state.vs[layer] = attend(leaves, k, v, state.xs, y_cold, np.int32(row), at)
        if self.lanes is not None:
            self.lanes.device(f"attend {layer}", begin, h)
        return h

    def hot_chunk(self, state: DeviceState, layer: int, h: jax.Array, start: int) -> None:
        """The device's half of a chunk's FFN, added to `state.xs`."""
        slots = self._pool.slots[layer]
        if slots:
            hot = self._programs.get("hot_chunk", len(h), slots)
            begin = time.perf_counter()
            with self._pool.lock:
                state.xs = hot(state.xs, h, self._pool.parts(layer), np.int32(start))
            if self.lanes is not None:
                self.lanes.device(f"hot {layer}", begin, state.xs)

    def _observed_rows(
        self,
        observer: Observer,
        layer: int,
        h: jax.Array,
        active: npt.NDArray[np.bool_],
        stream: Rows | None,
    ) -> Rows:
        """The host's half of the active rows, and the observer told of them."""
        y_cold = np.zeros_like(self._zeros)
        if active.any():
            streams = [None if stream is None else stream[active]]
            y_cold[active] = observer.compute(layer, np.asarray(h)[active], [observer.hot(layer, h)[active]], streams)
        return y_cold

    def _cold_chunks(
        self,
        layer: int,
        pieces: list[Piece],
        hidden: list[Rows],
        hot: list[npt.NDArray],
        streams: list[Rows | None],
    ) -> list[Rows]:
        """The host's half for all chunks at once, cut back into padded chunks."""
        h, begin = np.concatenate(hidden), time.perf_counter()
        y = self._cold.run(layer, h) if self.observer is None else self.observer.compute(layer, h, hot, streams)
        if self.lanes is not None:
            self.lanes.host(f"cold {layer}", begin)
        return cut_chunks(y, pieces)


def begin_rows(
    programs: Programs, weights: DenseWeights, ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
) -> tuple[jax.Array | Rows, jax.stages.Compiled]:
    """Embeddings of a token in each row [B, D], and the attention program for the longest row."""
    tables = weights.tables
    x = programs.get("embed_rows")(tables, ids, positions) if tables else weights.lookup(ids, positions)
    return x, programs.get("attend_rows", bucket_of(int(positions.max()) + 1, programs.shapes.prefixes))


def cut_chunks(y: Rows, pieces: list[Piece]) -> list[Rows]:
    """y [T, W] of all tokens, as padded chunks."""
    chunks = []
    for start, size, count in pieces:
        chunk = np.zeros((size, y.shape[1]), np.float32)
        chunk[:count] = y[start : start + count]
        chunks.append(chunk)
    return chunks
