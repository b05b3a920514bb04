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
from predictors.calibration import top_mask

Bools = npt.NDArray[np.bool_]


class LiveCheck:
    """Computes a layer's live units once more, without a trace in the counters of what generates.

    Where no activation is zero, live are the units of the largest |value| x |down row|, as many as `density` says.
    """

    def __init__(self, loaded: Loaded, aside: ColdSide, density: float | None):  # aside: with counters of its own
        self._parts = (loaded.programs, loaded.weights, loaded.pool, aside)
        self._store, self._density = loaded.store, density
        self._hidden = loaded.programs.shapes.spec.hidden
        self._norms: dict[int, npt.NDArray[np.float32]] = {}
        self._live: Bools | None = None
        self._observer = self.observer(self._take)

    def observer(self, tell: Callable[[Seen, Bools], None]) -> Observer:
        """An observer that is told of every layer, and what is live in it."""
        ranks = self._density is not None and not self._parts[0].shapes.spec.activation.has_zeros
        return Observer(lambda seen: tell(seen, self._wanted(seen)), *self._parts, values=ranks)

    def live(self, layer: int, h: jax.Array, active: Bools) -> Bools:
        """[R, F] of the R active rows of h [B, W]. Nothing may move meanwhile."""
        rows = np.asarray(h)[active]
        self._observer.compute(layer, rows, [self._observer.hot(layer, h)[active]], [None])
        assert self._live is not None
        return self._live

    def _take(self, seen: Seen, live: Bools) -> None:
        self._live = live

    def _wanted(self, seen: Seen) -> Bools:
        if seen.values is None or self._density is None:
            return seen.live
        if seen.layer not in self._norms:
            down = self._store.arenas[seen.layer][:, -1, 0, : self._hidden]
            self._norms[seen.layer] = np.linalg.norm(down.astype(np.float32), axis=1)
        return top_mask(seen.values * self._norms[seen.layer], self._density)


class PromptCounts:
    """For how many tokens of the prompts each neuron was live."""

    def __init__(self, spec: ModelSpec):
        self._counts = np.zeros((spec.layers, spec.ffn), np.int64)
        self._tokens = 0

    def add(self, seen: Seen, live: Bools) -> None:
        """One layer of some tokens."""
        self._counts[seen.layer] += live.sum(axis=0)
        self._tokens += len(live) if seen.layer == 0 else 0

    def take(self) -> tuple[npt.NDArray[np.int64] | None, int]:
        """(counts [L, F], tokens), and start anew; None if there was no prompt."""
        counts, tokens = self._counts, self._tokens
        self._counts, self._tokens = np.zeros_like(counts), 0
        return (counts if tokens else None), tokens
