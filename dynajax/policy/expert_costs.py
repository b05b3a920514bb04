"""Costs of experts that follow the machine: a function of the observations alone. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from dynajax.policy.costs import HIGH_S, LOW_S, MEMORY, RECENT, recent_percentile
from dynajax.policy.experts.records import ExpertCosts

SideName = Literal["gpu", "cpu"]
REFRESH = 4  # observations of a side from one fit to the next, once there are a few
LEAST_SHARE = 0.1  # of an observation, which is there without the call
TOLD_APART = 1e6  # condition number up to which two unknowns are two


class ExpertCostEstimator:
    """What n experts with w tokens in all take on a side is n a + w b, beside the time of a call that has nothing to do
    and is there whoever computes what: a and b are those that fit the last 32 observations best, each counting 0.92 of
    the next newer one, by relative error; where the observations do not tell the two apart their old ratio decides. A
    transfer is the percentile `safety` of the last ones, as in `CostEstimator`.
    """

    def __init__(
        self,
        initial: ExpertCosts,
        safety: float = 0.8,
        *,
        calls: Mapping[SideName, float] | None = None,  # seconds of a side's call that has nothing to do
        fixed: bool = False,  # the costs stay what they are
    ):
        if not 0 <= safety <= 1:
            raise ValueError(f"safety must be between 0 and 1, got {safety}")
        self._costs, self._safety, self._fixed = initial, safety, fixed
        self._calls = {"gpu": 0.0, "cpu": 0.0, **(calls or {})}
        self._seen: dict[str, list[tuple[float, float, float]]] = {"gpu": [], "cpu": []}
        self._fresh = {"gpu": 0, "cpu": 0}
        self._moves: list[float] = []

    def observe(self, side: SideName, experts: int, tokens: int, seconds: float) -> None:
        """So many experts with so many tokens in all took so long, the call included."""
        if experts < 1 or not seconds > 0 or self._fixed:
            return
        own_s = max(seconds - self._calls[side], LEAST_SHARE * seconds)
        seen = self._seen[side] = [*self._seen[side][1 - RECENT :], (float(experts), float(tokens), own_s)]
        self._fresh[side] += 1
        if len(seen) <= REFRESH or self._fresh[side] >= REFRESH:
            self._fresh[side] = 0
            old = getattr(self._costs, f"{side}_s"), getattr(self._costs, f"{side}_token_s")
            expert_s, token_s = fitted(np.array(seen), old)
            values = {f"{side}_s": _clamped(expert_s), f"{side}_token_s": _clamped(token_s)}
            self._costs = replace(self._costs, **values)

    def observe_move(self, seconds: float) -> None:
        """An expert came to the device in so many seconds."""
        if not self._fixed:
            self._moves = [*self._moves[1 - RECENT :], seconds]
            trans_s = recent_percentile(np.array(self._moves), self._safety) - self._costs.t0_s
            self._costs = replace(self._costs, t_trans_s=_clamped(trans_s))

    def costs(self) -> ExpertCosts:
        """The estimates as they are now; what was never observed is as it was given."""
        return self._costs


def fitted(seen: npt.NDArray[np.float64], old: tuple[float, float]) -> tuple[float, float]:
    """(a, b), neither below zero, of rows (experts, tokens, seconds), oldest first; old: the last answer."""
    weights = MEMORY ** np.arange(len(seen) - 1, -1, -1.0) / seen[:, 2] ** 2
    counts, seconds = seen[:, :2], seen[:, 2]
    gram, right = (counts.T * weights) @ counts, (counts.T * weights) @ seconds
    if np.linalg.cond(gram) < TOLD_APART:
        a, b = np.linalg.solve(gram, right)
        if a > 0 and b > 0:
            return float(a), float(b)
        alone = right / np.diag(gram)  # the fit with one of the two only
        return (float(alone[0]), 0.0) if b <= 0 else (0.0, float(alone[1]))
    thought = counts @ np.array(old)
    scale = float((weights * thought) @ seconds / ((weights * thought) @ thought))
    return old[0] * scale, old[1] * scale


def _clamped(seconds: float) -> float:
    return min(max(float(seconds), LOW_S), HIGH_S)
