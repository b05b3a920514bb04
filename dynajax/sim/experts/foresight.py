"""What is known of a layer's workload before its router has run. NumPy only.

`count` is the planner's own predictor. Of the kinds that ask a later layer's router early, a recording may hold what it
said; otherwise predictions are drawn from the truth with a stated recall, and are called so.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dynajax.policy.experts.prefetch import CountPredictor
from dynajax.policy.experts.records import F64, Ints
from dynajax.sim.experts.activity import MixtureActivity

I32 = npt.NDArray[np.int32]

# Share of a token's K experts of the next layer that are foretold. Published: asking the next router with this layer's
# input finds 66.9 % on Qwen2-57B to about 90 % on Qwen3-30B; 70 to 80 % become 87 to 94 % with a trained residual
# (arXiv 2602.00509). residual-mean is the press summary's reading of DALI, of which nothing is published.
RECALL: Mapping[str, float] = MappingProxyType(
    {"gate": 0.70, "residual": 0.80, "residual-mean": 0.70, "corrected": 0.85}
)


class Foresight(Protocol):
    """Asked for the workload [E] of a layer in a step, while an earlier one runs; told of what it was."""

    def predict(self, step: int, layer: int) -> F64 | None:
        """None: nothing is known. Layers count among those that have experts."""
        ...

    def told(self, step: int, layer: int) -> npt.NDArray | None:
        """The same in whole tokens, as far as they are known: what the books go by."""
        ...

    def observe(self, layer: int, tokens: Ints) -> None:
        """The layer has run."""


class Counted:
    """The decayed past of the layer."""

    def __init__(self, layers: int, units: int, decay: float) -> None:
        self._predictor = CountPredictor(layers, units, decay)

    def predict(self, step: int, layer: int) -> F64 | None:
        """See Foresight."""
        return self._predictor.predict(layer)

    def told(self, step: int, layer: int) -> npt.NDArray | None:
        """See Foresight."""
        return self.predict(step, layer)

    def observe(self, layer: int, tokens: Ints) -> None:
        """See Foresight."""
        self._predictor.observe(layer, tokens)


class Known:
    """Predictions that are there beforehand."""

    def __init__(self, counts: I32, expected: npt.NDArray | None = None) -> None:  # [S, M, E]
        self._counts, self._expected = counts, counts if expected is None else expected

    def predict(self, step: int, layer: int) -> F64 | None:
        """See Foresight."""
        found = self._expected[step, layer]
        return found.astype(np.float64) if found.any() else None

    def told(self, step: int, layer: int) -> npt.NDArray | None:
        """See Foresight."""
        found = self._counts[step, layer]
        return found if found.any() else None

    def observe(self, layer: int, tokens: Ints) -> None:
        """Nothing is learned."""


def draw_foretold(steps: I32, frequency: npt.NDArray, recall: float, seed: int) -> I32:
    """[S, M, E] predictions of the workload [S, M, E]: each token's expert is found with probability `recall`; what is
    missed is put on other experts, by how often they are chosen at all [M, E]."""
    rng = np.random.default_rng(seed)
    found = rng.binomial(steps, recall)
    missed = steps.sum(axis=2) - found.sum(axis=2)
    usual = frequency.astype(np.float64) / frequency.sum(axis=1, keepdims=True, dtype=np.float64)
    return (found + rng.multinomial(missed, usual)).astype(np.int32)


def foresights(activity: MixtureActivity, kind: str, recall: float | None, decay: float) -> list[Foresight | None]:
    """One for every run; recall None: what was recorded, or else the kind's usual one. `count` never forgets a run."""
    found: list[Foresight | None] = []
    counting = Counted(*activity.frequency.shape, decay)
    for number, run in enumerate(activity.runs):
        if kind == "none":
            found.append(None)
        elif kind == "count":
            found.append(counting)
        elif recall is None and run.foretold is not None:
            found.append(Known(run.foretold, run.expected))
        else:
            share = RECALL[kind] if recall is None else recall
            found.append(Known(draw_foretold(run.steps, activity.frequency, share, number)))
    return found


def said_of(activity: MixtureActivity, kind: str, recall: float | None) -> str:
    """Where predictions come from, in a few words."""
    if kind == "none":
        return "none"
    if kind == "count":
        return "count: the planner's own"
    if recall is None and activity.foretold_by is not None:
        return f"{kind}: as recorded ({activity.foretold_by})"
    return f"{kind}: drawn, recall {RECALL[kind] if recall is None else recall:g}"
