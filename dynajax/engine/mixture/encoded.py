"""A model with an encoder layer by layer: a prompt is read at once, and what comes of it is looked at while decoding.

prompt   read(0) | shared, experts(0) | read(1) ... | norm | keys and values of every decoder layer
step     as `mixture.layers`, from the decoder's first layer on
"""

from __future__ import annotations

import time
from typing import final

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.mixture.groups import F32, I32, Routed
from dynajax.engine.mixture.layers import MixtureLayers, seen_of
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.programs import bucket_of


@final
class EncodedLayers(MixtureLayers):
    """See the head of this file."""

    def source(self, state: DeviceState, layer: int) -> tuple:
        """What a decoder layer looks at."""
        at = layer - self.spec.stepped[0]
        return state.seen_ks[at], state.seen_vs[at], state.lengths

    def sources(self, state: DeviceState) -> tuple:
        """The same of all of its layers."""
        return tuple(state.seen_ks), tuple(state.seen_vs), state.lengths

    def prompt(
        self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart, *, whole: bool = False
    ) -> list[Rows]:
        """The encoder reads the tokens in `state.xs`, for one row; -> nothing is left to add."""
        assert not whole, "an encoder says nothing of the tokens that it reads"
        spec, count = self.spec, sum(tokens for *_, tokens in pieces)
        size = bucket_of(count, self.programs.shapes.sources)
        y_cold = zeros = np.zeros((size, spec.hidden), np.float32)
        for layer in range(spec.stepped[0]):
            y_cold = self._read(state, layer, (0, size, count), y_cold)
            self._on_full()
            on_part(layer + 1, spec.layers)
        state.xs = self.programs.get("seen", size)(self.weights.encoder_norm, state.xs, y_cold)
        remember = self.programs.get("remember", size)
        for at, layer in enumerate(spec.stepped):
            given = (self.weights.layers[layer], state.seen_ks[at], state.seen_vs[at], state.xs, np.int32(row))
            state.seen_ks[at], state.seen_vs[at] = remember(*given)
            on_part(layer + 1, spec.layers)
        state.lengths[row] = count
        return [zeros]

    def _read(self, state: DeviceState, layer: int, piece: Piece, y_cold: Rows) -> Rows:
        """One layer of the encoder: -> the host's share of its FFN [T, D], zeros where it has none."""
        _, size, count = piece
        read, routing = self.programs.get("read", self.programs.kind(layer), size), self.weights.routing[layer]
        if self.lanes is not None:
            self.lanes.settle()
        begin = time.perf_counter()
        state.xs, h, *wanted = read(self.weights.layers[layer], routing, state.xs, y_cold, np.int32(count))
        if self.lanes is not None:
            self.lanes.device(f"read {layer}", begin, h)
        self._always_chunks(state, layer, [(h, None)], [piece])
        y = np.zeros((size, self.spec.hidden), np.float32)
        if (m := self.number(layer)) is None:
            return y
        ids, weights = (np.asarray(array)[:count] for array in wanted)
        rows = self._accepted(ids)
        routed = Routed(ids[rows], weights[rows], rows)
        y[rows] = self._experts(state, m, h, routed, rows)
        return y

    def _accepted(self, ids: I32) -> npt.NDArray[np.int64]:
        """The tokens that their experts take, ascending."""
        assert self.spec.experts is not None
        capacity = self.spec.experts.capacity
        return np.arange(len(ids)) if capacity is None else first_come(ids[:, 0], capacity)

    def _experts(self, state: DeviceState, m: int, h: jax.Array, routed: Routed, rows: npt.NDArray[np.int64]) -> F32:
        """The experts' share for those tokens: the device's added to `state.xs`, -> the host's."""
        hidden = np.asarray(h)[rows]
        if self.watch is not None:
            self.watch(seen_of(self.spec, m, hidden, routed))
        sides = self._sides(m, routed.counts(self.spec.units))
        self._on_device(state, m, sides, [(routed, h, 0)])
        begin = time.perf_counter()
        y = self.cold.run(m, hidden, routed, sides.cold)
        if self.lanes is not None:
            self.lanes.host(f"cold experts {self.spec.unit_layers[m]}", begin)
        return y


def first_come(ids: I32, capacity: int) -> npt.NDArray[np.int64]:
    """Tokens that are among the first `capacity` of their expert: ids [T] -> their numbers, ascending.

    Example: 0, 0, 1, 0 and a capacity of 2 -> 0, 1, 2.
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    place = np.arange(len(ids)) - np.searchsorted(ordered, ordered, "left")
    return np.sort(order[place < capacity])
