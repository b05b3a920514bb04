"""A mixture of experts layer by layer: the device attends, routes and computes the experts it has, the host the rest.

device   attend, route(i) | shared(i), experts(i)  | attend, route(i+1) ...
host                      | cold experts(i) ---------^ y_cold
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.mixture.cold import ColdExperts
from dynajax.engine.mixture.groups import Group, Routed, expert_sizes, token_sizes
from dynajax.engine.observing import Seen
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.engine.threads import cut_chunks
from dynajax.engine.weights import DenseWeights
from dynajax.pool import DevicePool
from dynajax.programs import MixturePrograms, bucket_of
from dynajax.timeline import Lanes

I32 = npt.NDArray[np.int32]
DECODE_STEP, PROMPT_STEP = 2, 8  # from one size of a group of experts to the next
MANY = 16  # experts at most in a step, above which decoding has fewer sizes


Place = tuple[DevicePool, int]  # a pool, and which of its layers


class Side(NamedTuple):
    """Where a prompt's experts are computed in one layer."""

    hot: I32  # in the pool
    cold: I32  # by the host
    streamed: I32  # through the device, and gone again


class PromptPlanner(Protocol):
    """Decides that, and brings in what is streamed."""

    def sides(self, m: int, tokens: npt.NDArray[np.int64]) -> Side:
        """By the tokens [E] of every expert; m: the layer's number among those that have experts."""
        ...

    def stream(self, m: int, experts: I32, use: Callable[[int, Place], None]) -> None:
        """Call use(expert, place) for each, when it is on the device, in slot 0 of the place."""
        ...


class MixtureLayers:
    """See the head of this file. Owns no buffers. `watch`, if set, is shown every layer of a prompt or a step."""

    def __init__(
        self,
        programs: MixturePrograms,
        weights: DenseWeights,
        pool: DevicePool,
        cold: ColdExperts,
        on_full: Callable[[], object],
    ):
        self.programs, self.weights, self.pool, self.cold = programs, weights, pool, cold
        self._on_full = on_full
        spec, shapes = programs.shapes.spec, programs.shapes
        assert spec.experts is not None, "a dense model has another runner"
        self.spec, self._numbers = spec, {layer: m for m, layer in enumerate(spec.unit_layers)}
        self.zeros = np.zeros((shapes.batch, spec.hidden), np.float32)
        self.planner: PromptPlanner | None = None  # None: what is not in the pool is the host's
        self.watch: Callable[[Seen], None] | None = None
        self.lanes: Lanes | None = None
        most = min(max(pool.slots), shapes.batch * spec.experts.router.top_k)
        self._row_sizes = expert_sizes(most, DECODE_STEP if most <= MANY else 2 * DECODE_STEP) if most else ()
        self._chunk_sizes = expert_sizes(max(pool.slots), PROMPT_STEP) if most else ()

    def number(self, layer: int) -> int | None:
        """The layer's number among those that have experts."""
        return self._numbers.get(layer)

    # --- a step ---

    def rows(self, state: DeviceState, ids: I32, positions: I32, active: npt.NDArray[np.bool_]) -> jax.Array:
        """One token in each row through the model, residents here and the rest on the host -> logits [B, V]."""
        x, prefix = self.embed_rows(ids, positions)
        y_cold, numbers = self.zeros, np.flatnonzero(active)
        for layer in self.spec.stepped:
            x, h, found = self.attend_rows(state, layer, x, y_cold, positions, prefix)
            y_cold = self.zeros
            if (m := self.number(layer)) is None:
                continue
            routed = Routed(np.asarray(found[0])[active], np.asarray(found[1])[active], numbers)
            sides = resident_sides(self, m, routed.counts(self.spec.units))
            if len(sides.hot):
                x = self.hot_rows(m, x, h, sides.hot, routed)
                found_here = np.int32(np.isin(routed.ids, sides.hot).sum())
                state.tally = state.tally.at[layer].add(found_here)
            hidden = np.asarray(h)[active]
            if self.watch is not None:
                self.watch(seen_of(self.spec, m, hidden, routed))
            y_cold = self.for_all(self.cold.run(m, hidden, routed, sides.cold), active)
        return self.logits(x, y_cold)

    def embed_rows(self, ids: I32, positions: I32) -> tuple[jax.Array | Rows, int]:
        """Embeddings of a token in each row [B, D], and the KV prefix that the longest row needs."""
        tables = self.weights.tables
        prefix = bucket_of(int(positions.max()) + 1, self.programs.shapes.prefixes)
        if not tables:
            return self.weights.lookup(ids, positions), prefix
        return self.programs.get("embed_rows")(tables, ids, positions), prefix

    def logits(self, x: jax.Array | Rows, y_cold: Rows) -> jax.Array:
        """The head [B, V]."""
        begin = time.perf_counter()
        logits = self.programs.get("head")(self.weights.norm, self.weights.table, x, y_cold)
        if self.lanes is not None:
            self.lanes.device("head", begin, logits)
            self.lanes.settle()
        return logits

    def for_all(self, y: Rows, active: npt.NDArray[np.bool_]) -> Rows:
        """y [R, D] of the rows that count -> [B, D], zeros for the others."""
        if len(y) == len(active):
            return y
        whole = np.zeros_like(self.zeros)
        whole[active] = y
        return whole

    def attend_rows(self, state: DeviceState, layer: int, x, y_cold: Rows, positions, prefix: int):
        """-> x, h [B, D], and ids and weights [B, K] of a layer that has experts, all on their way to the host."""
        at = layer - self.spec.stepped[0]
        leaves, k, v = self.weights.layers[layer], state.ks[at], state.vs[at]
        routing, begin = self.weights.routing[layer], time.perf_counter()
        given = (k, v, x, y_cold, positions, *self.source(state, layer))
        if self.number(layer) is None:
            x, h, state.ks[at], state.vs[at] = self.programs.get("attend_rows", prefix)(leaves, *given)
            routed = None
        else:
            attend = self.programs.get("route_rows", prefix)
            x, h, ids, weights, state.ks[at], state.vs[at] = attend(leaves, routing, *given)
            routed = ids, weights
            for array in (ids, weights, h):
                array.copy_to_host_async()
        if self.lanes is not None:
            self.lanes.device(f"attend {layer}", begin, h)
        kind = self.programs.kind(layer)
        if "up" in self.programs.routing_names[kind]:
            x = self.programs.get("always_rows", kind)(routing, x, h)
        return x, h, routed

    def source(self, state: DeviceState, layer: int) -> tuple:
        """What a layer looks at besides its own tokens: nothing without an encoder."""
        return ()

    def sources(self, state: DeviceState) -> tuple:
        """The same of all layers together."""
        return ()

    def hot_rows(
        self, m: int, x: jax.Array, h: jax.Array, experts: I32, routed: Routed, place: Place | None = None
    ) -> jax.Array:
        """x with the share of these experts, which are in the pool; place: of one that is somewhere else, in slot 0."""
        begin, sizes = time.perf_counter(), token_sizes(self.programs.shapes.batch)
        pool, layer = (self.pool, m) if place is None else place
        with pool.lock:
            slot_of = self.slots_of(m) if place is None else np.zeros(self.spec.units, np.int32)
            for group in routed.groups(experts, self._row_sizes if place is None else (1,), sizes):
                program = self.programs.get("experts_rows", pool.slots[layer], *group.rows.shape)
                x = program(x, h, pool.parts(layer), slot_of[group.experts], group.rows, group.weights)
        if self.lanes is not None:
            self.lanes.device(f"experts {self.spec.unit_layers[m]}", begin, x)
        return x

    def slots_of(self, m: int) -> I32:
        """[E] the slot of every expert; the caller holds the pool's lock."""
        bucket = self.pool.bucket(m)
        slot_of = np.full(self.spec.units, -1, np.int32)
        filled = bucket >= 0
        slot_of[bucket[filled]] = np.flatnonzero(filled)
        return slot_of

    # --- a prompt ---

    def prompt(
        self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart, *, whole: bool = False
    ) -> list[Rows]:
        """Prefill of one row, layer by layer; see `ThreadsRunner.prompt`."""
        zeros = [np.zeros((size, self.spec.hidden), np.float32) for _, size, _ in pieces]
        y_cold = zeros
        for layer in range(self.spec.layers):
            last = layer == self.spec.layers - 1 and not whole
            chunks = [self._attend_chunk(state, layer, row, piece, y) for piece, y in zip(pieces, y_cold, strict=True)]
            self._on_full()
            y_cold = zeros
            if not last:
                self._always_chunks(state, layer, chunks, pieces)
            m = self.number(layer)
            if m is not None and (not last or self.watch is not None):
                y_cold = self._experts_chunks(state, m, chunks, pieces, seen_only=last)
            on_part(layer + 1, self.spec.layers)
        return y_cold

    def _attend_chunk(self, state: DeviceState, layer: int, row: int, piece: Piece, y_cold: Rows) -> tuple:
        """-> h [T, D] on the device, and ids and weights [T', K] of its tokens where the layer has experts."""
        start, size, count = piece
        prefix = bucket_of(start + size, self.programs.shapes.chunk_prefixes)
        leaves, k, v = self.weights.layers[layer], state.ks[layer], state.vs[layer]
        if self.lanes is not None:  # a chunk is held until it is shown, so only one
            self.lanes.settle()
        begin, at = time.perf_counter(), (np.int32(row), np.int32(start))
        if self.number(layer) is None:
            attend = self.programs.get("attend_chunk", size, prefix)
            state.xs, h, state.ks[layer], state.vs[layer] = attend(leaves, k, v, state.xs, y_cold, *at)
            routed = None
        else:
            attend, routing = self.programs.get("route_chunk", size, prefix), self.weights.routing[layer]
            given = (leaves, routing, k, v, state.xs, y_cold, *at)
            state.xs, h, ids, weights, state.ks[layer], state.vs[layer] = attend(*given)
            routed = np.asarray(ids)[:count], np.asarray(weights)[:count]
        if self.lanes is not None:
            self.lanes.device(f"attend {layer}", begin, h)
        return h, routed

    def _always_chunks(self, state: DeviceState, layer: int, chunks: list, pieces: list[Piece]) -> None:
        kind = self.programs.kind(layer)
        if "up" in self.programs.routing_names[kind]:
            for (h, _), (start, size, _) in zip(chunks, pieces, strict=True):
                program = self.programs.get("always_chunk", kind, size)
                state.xs = program(self.weights.routing[layer], state.xs, h, np.int32(start))

    def _experts_chunks(
        self, state: DeviceState, m: int, chunks: list, pieces: list[Piece], *, seen_only: bool
    ) -> list[Rows]:
        """Every expert's share for all chunks: the device's added to `state.xs`, -> the host's, by chunk."""
        routed = [Routed(*found) for _, found in chunks]
        tokens = np.sum([each.counts(self.spec.units) for each in routed], axis=0)
        hidden = [np.asarray(h)[:count].copy() for (h, _), (*_, count) in zip(chunks, pieces, strict=True)]
        h_all, whole = np.concatenate(hidden), Routed(*map(np.concatenate, zip(*(c[1] for c in chunks), strict=True)))
        if self.watch is not None:
            self.watch(seen_of(self.spec, m, h_all, whole))
        if seen_only:
            return [np.zeros((size, self.spec.hidden), np.float32) for _, size, _ in pieces]
        sides = self._sides(m, tokens)
        self._on_device(
            state, m, sides, [(r, c[0], piece[0]) for r, c, piece in zip(routed, chunks, pieces, strict=True)]
        )
        begin = time.perf_counter()
        y = self.cold.run(m, h_all, whole, sides.cold)
        if self.lanes is not None:
            self.lanes.host(f"cold experts {self.spec.unit_layers[m]}", begin)
        return cut_chunks(y, pieces)

    def _on_device(self, state: DeviceState, m: int, sides: Side, chunks: list[tuple[Routed, jax.Array, int]]) -> None:
        """The device's share added to `state.xs`; a chunk: where its tokens go, h [T, D], and its start."""

        def use(experts: I32, place: Place, slot_of: I32, sizes: Sequence[int]) -> None:
            for each, h, start in chunks:
                for group in each.groups(experts, sizes, token_sizes(len(h))):
                    self._experts_chunk(state, h, start, group, (*place, slot_of[group.experts]))

        if len(sides.hot):
            use(sides.hot, (self.pool, m), self.slots_of(m), self._chunk_sizes)
        if len(sides.streamed):
            assert self.planner is not None
            first = np.zeros(self.spec.units, np.int32)
            self.planner.stream(m, sides.streamed, lambda e, at: use(np.array([e], np.int32), at, first, (1,)))

    def _sides(self, m: int, tokens: npt.NDArray[np.int64]) -> Side:
        return resident_sides(self, m, tokens) if self.planner is None else self.planner.sides(m, tokens)

    def _experts_chunk(self, state: DeviceState, h: jax.Array, start: int, group: Group, place: tuple) -> None:
        pool, layer, slots = place
        program = self.programs.get("experts_chunk", len(h), pool.slots[layer], *group.rows.shape)
        with pool.lock:
            parts = pool.parts(layer)
            state.xs = program(state.xs, h, parts, slots, group.rows, group.weights, np.int32(start))


def resident_sides(layers: MixtureLayers, m: int, tokens: npt.NDArray[np.int64]) -> Side:
    """What is in the pool there, the rest here."""
    live = np.flatnonzero(tokens).astype(np.int32)
    inside = layers.slots_of(m)[live] >= 0
    return Side(live[inside], live[~inside], np.empty(0, np.int32))


def seen_of(spec, m: int, hidden: Rows, routed: Routed) -> Seen:
    """What an observer is told: hidden [T, D], and which experts each token goes to."""
    live = np.zeros((len(hidden), spec.units), np.bool_)
    live[np.arange(len(hidden))[:, None], routed.ids] = True
    return Seen(layer=spec.unit_layers[m], hidden=hidden.copy(), live=live, stream=None, values=None)
