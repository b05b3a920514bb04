"""Looking exactly at what predictions only guess: which units of a layer are live, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import numpy.typing as npt

from dynajax.config import ModelSpec
from dynajax.engine.cold import ColdSide
from dynajax.engine.loaded import Loaded
from dynajax.engine.observing import Observer, Seen
from hostcompute.packed import widened
from predictors.calibration import top_mask

Bools = npt.NDArray[np.bool_]


class Wanted:
    """Which units count as live: those whose activation is not zero. Where none is, as with silu: of every token the
    share `density` of the units that contribute most, by |value| x |down row|."""

    def __init__(self, spec: ModelSpec, density: float | None, down: Callable[[int], npt.NDArray]):
        self.density = None if spec.activation.has_zeros else density
        self._down = down  # a layer's down rows [F, W]; asked once each
        self._norms: dict[int, npt.NDArray[np.float32]] = {}

    def __call__(self, seen: Seen) -> Bools:
        """[T, F]"""
        if self.density is None:
            return seen.live
        assert seen.values is not None, "watch the engine with values=True"
        if seen.layer not in self._norms:
            self._norms[seen.layer] = np.linalg.norm(self._down(seen.layer).astype(np.float32), axis=1)
        return top_mask(seen.values * self._norms[seen.layer], self.density)


class LiveCheck:
    """Computes a layer's live units once more, without a trace in the counters of what generates."""

    def __init__(self, loaded: Loaded, aside: ColdSide, density: float | None):  # aside: with counters of its own
        self._parts = (loaded.programs, loaded.weights, loaded.pool, aside)
        self._wanted = Wanted(
            loaded.programs.shapes.spec, density, lambda layer: widened(loaded.units(layer)[:, -1, 0])
        )
        self._live: Bools | None = None
        self._observer = self.observer(self._take)

    def observer(self, tell: Callable[[Seen, Bools], None]) -> Observer:
        """An observer that is told of every layer, and what is live in it."""
        values = self._wanted.density is not None
        return Observer(lambda seen: tell(seen, self._wanted(seen)), *self._parts, values=values)

    def live(self, layer: int, h: jax.Array, active: Bools) -> Bools:
        """[R, F] of the R active rows of h [B, W]. Nothing may move meanwhile."""
        rows = np.asarray(h)[active]
        self._observer.compute(layer, rows, [self._observer.hot(layer, h)[active]], [None])
        assert self._live is not None
        return self._live

    def _take(self, seen: Seen, live: Bools) -> None:
        self._live = live


class LiveCounts:
    """For how many tokens each neuron was live."""

    def __init__(self, layers: int, units: int):
        self._counts = np.zeros((layers, units), np.int64)
        self._tokens = 0

    def add(self, seen: Seen, live: Bools) -> None:
        """One layer of some tokens."""
        self._counts[seen.layer] += live.sum(axis=0)
        self._tokens += len(live) if seen.layer == 0 else 0

    def take(self) -> tuple[npt.NDArray[np.int64] | None, int]:
        """(counts [L, F], tokens), and start anew; None if there was no token."""
        counts, tokens = self._counts, self._tokens
        self._counts, self._tokens = np.zeros_like(counts), 0
        return (counts if tokens else None), tokens
