"""A prompt through the layers with every token's own mask, as decoding would skip; and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.checks import LiveCheck
from dynajax.engine.cold import ColdSide
from dynajax.engine.loaded import Loaded
from dynajax.engine.prediction import Place, Predictors
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.engine.threads import ThreadsRunner, cut_chunks
from dynajax.programs.bodies import ADMITTED

Scores = npt.NDArray[np.uint8]


class Source(Protocol):
    """Where scores come from."""

    theta: np.uint8  # a unit that reaches it is computed

    def begin(self) -> None:
        """A new prompt."""

    def scores(self, layer: int, piece: int, stream: Callable[[], jax.Array], h: jax.Array) -> Scores:
        """[T, F] of one chunk in one layer; layers come in order, and every layer's chunks too."""


class PredictedScores:
    """Those of the engine's predictors."""

    def __init__(self, predictors: Predictors, theta: np.uint8):
        self._predictors, self.theta = predictors, theta
        self._ahead: dict[tuple[Place, int], Scores] = {}

    def begin(self) -> None:
        self._ahead.clear()

    def scores(self, layer: int, piece: int, stream: Callable[[], jax.Array], h: jax.Array) -> Scores:
        prediction = self._predictors.prediction
        for place in self._predictors.leads_from(layer):
            if prediction.skipping(place[1]) == place:
                self._ahead[place, piece] = np.asarray(self._predictors.score(place, stream(), h))
        place = prediction.skipping(layer)
        assert place is not None, f"layer {layer} has no scores to skip by"
        return self._ahead.pop((place, piece))


class RandomScores:
    """A random mask of given densities [L], for comparison; all zero: no FFN at all."""

    theta = np.uint8(1)

    def __init__(self, densities: npt.NDArray[np.float64], units: int, seed: int = 0):
        self._densities, self._units, self._rng = densities, units, np.random.default_rng(seed)

    def begin(self) -> None:
        """Nothing is remembered."""

    def scores(self, layer: int, piece: int, stream: Callable[[], jax.Array], h: jax.Array) -> Scores:
        return (self._rng.random((len(h), self._units)) < self._densities[layer]).astype(np.uint8)


@dataclass(slots=True)
class Masked:
    """What a pass computed, by layer, summed over its tokens."""

    tokens: int
    computed: npt.NDArray[np.int64]
    live: npt.NDArray[np.int64]  # of those tokens that were looked at exactly
    found: npt.NDArray[np.int64]  # live and computed
    seen_tokens: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, layers: int) -> Masked:
        return cls(0, *(np.zeros(layers, np.int64) for _ in range(4)))

    def plus(self, other: Masked) -> Masked:
        """The sums of both."""
        return Masked(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Masked)))


class MaskedPrompt:
    """Carries prompts through; `counts` sums until it is replaced. check: look at every token exactly, too."""

    def __init__(self, loaded: Loaded, check: LiveCheck | None = None):
        assert isinstance(loaded.layers, ThreadsRunner) and isinstance(loaded.cold, ColdSide), "only neurons are masked"
        self._programs, self._pool, self._cold = loaded.programs, loaded.pool, loaded.cold
        self._layers, self._check = loaded.layers, check
        self.counts = Masked.empty(loaded.programs.shapes.spec.layers)

    def run(
        self, state: DeviceState, row: int, pieces: list[Piece], source: Source, on_part: OnPart, *, whole: bool
    ) -> list[Rows]:
        """`ThreadsRunner.prompt` with masks -> the last layer's y_cold by chunk; `whole`: with that layer's FFN."""
        spec = self._programs.shapes.spec
        y_cold = [np.zeros((size, spec.unit_width), np.float32) for _, size, _ in pieces]
        source.begin()
        self.counts.tokens += sum(count for *_, count in pieces)
        for layer in range(spec.layers):
            hidden, scores, truth = [], [], []
            for index, (piece, y) in enumerate(zip(pieces, y_cold, strict=True)):
                start, size, count = piece
                h = self._layers.attend_chunk(state, layer, row, piece, y)
                if layer == spec.layers - 1 and not whole:
                    continue
                told = source.scores(layer, index, lambda start=start, size=size: _stream(state, start, size), h)
                self._hot(state, layer, h, start, told, source.theta, count)
                hidden.append(np.asarray(h)[:count].copy())
                scores.append(told[:count])
                if self._check is not None:
                    truth.append(self._check.live(layer, h, np.arange(size) < count))
            if hidden:
                y = self._cold_half(layer, np.concatenate(hidden), np.concatenate(scores), source.theta)
                y_cold = cut_chunks(y, pieces)
            if truth:
                self._look(layer, np.concatenate(truth), np.concatenate(scores), source.theta)
            on_part(layer + 1, spec.layers)
        return y_cold

    def _hot(self, state: DeviceState, layer: int, h: jax.Array, start: int, scores: Scores, theta, count: int) -> None:
        with self._pool.lock:
            bucket = self._pool.bucket(layer)
            if not len(bucket):
                return
            program = self._programs.get("hot_admitted_chunk", len(h), len(bucket))
            parts = self._pool.parts(layer)
            state.xs, marks = program(state.xs, h, parts, bucket, scores, theta, np.int32(start))
        self.counts.computed[layer] += np.count_nonzero(np.asarray(marks)[:count] & ADMITTED)

    def _cold_half(self, layer: int, hidden: Rows, scores: Scores, theta: np.uint8) -> Rows:
        cold = self._cold.units(layer)
        wanted = scores.take(cold, axis=1) >= theta
        some = wanted.any(axis=0)
        self.counts.computed[layer] += np.count_nonzero(wanted)
        if not some.any():
            return np.zeros_like(hidden)
        return self._cold.run_chosen(layer, hidden, cold[some], np.ascontiguousarray(wanted[:, some]).view(np.uint8))

    def _look(self, layer: int, truth: npt.NDArray[np.bool_], scores: Scores, theta: np.uint8) -> None:
        self.counts.seen_tokens[layer] += len(truth)
        self.counts.live[layer] += np.count_nonzero(truth)
        self.counts.found[layer] += np.count_nonzero(truth & (scores >= theta))


def _stream(state: DeviceState, start: int, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(state.xs, np.int32(start), size)
