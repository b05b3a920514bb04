"""Costs of experts that follow the machine: a function of the observations alone. NumPy only."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dynajax.policy.costs import HIGH_S, LOW_S, MEMORY, RECENT, recent_percentile
from dynajax.policy.experts.records import ExpertCosts

SideName = Literal["gpu", "cpu"]


class ExpertCostEstimator:
    """What n experts with w tokens in all take on a side is n a + w b; a and b are those that fit the last 32
    observations best, each counting 0.92 of the next newer one, by relative error. A transfer is the percentile
    `safety` of the last ones, as in `CostEstimator`.
    """

    def __init__(self, initial: ExpertCosts, safety: float = 0.8, *, fixed: bool = False):
        """fixed: the costs stay what they are."""
        if not 0 <= safety <= 1:
            raise ValueError(f"safety must be between 0 and 1, got {safety}")
        self._costs, self._safety = initial, safety
        self._seen: dict[str, list[tuple[float, float, float]]] = {"gpu": [], "cpu": []}
        self._moves: list[float] = []
        self._stale, self._fixed = False, fixed

    def observe(self, side: SideName, experts: int, tokens: int, seconds: float) -> None:
        """So many experts with so many tokens in all took so long."""
        if experts > 0 and seconds > 0 and not self._fixed:
            self._seen[side] = [*self._seen[side][1 - RECENT :], (float(experts), float(tokens), seconds)]
            self._stale = True

    def observe_move(self, seconds: float) -> None:
        """An expert came to the device in so many seconds."""
        if not self._fixed:
            self._moves = [*self._moves[1 - RECENT :], seconds]
            self._stale = True

    def costs(self) -> ExpertCosts:
        """The estimates as they are now; what was never observed is as it was given."""
        if self._stale:
            old, self._stale = self._costs, False
            gpu_s, gpu_token_s = _fitted(self._seen["gpu"], old.gpu_s, old.gpu_token_s)
            cpu_s, cpu_token_s = _fitted(self._seen["cpu"], old.cpu_s, old.cpu_token_s)
            trans_s = old.t_trans_s
            if self._moves:
                trans_s = recent_percentile(np.array(self._moves), self._safety) - old.t0_s
            self._costs = ExpertCosts(
                t0_s=old.t0_s,
                t_trans_s=_clamped(trans_s),
                gpu_s=_clamped(gpu_s),
                gpu_token_s=_clamped(gpu_token_s),
                cpu_s=_clamped(cpu_s),
                cpu_token_s=_clamped(cpu_token_s),
                t_sync_s=old.t_sync_s,
            )
        return self._costs


def _fitted(seen: list[tuple[float, float, float]], expert_s: float, token_s: float) -> tuple[float, float]:
    """(a, b), neither below zero. Where the observations do not tell the two apart their old ratio decides."""
    if not seen:
        return expert_s, token_s
    table = np.array(seen)
    weights = MEMORY ** np.arange(len(table) - 1, -1, -1.0) / table[:, 2] ** 2
    counts, seconds = table[:, :2], table[:, 2]
    gram, right = (counts.T * weights) @ counts, (counts.T * weights) @ seconds
    if np.linalg.cond(gram) < 1e6:
        a, b = np.linalg.solve(gram, right)
        if a > 0 and b > 0:
            return float(a), float(b)
        alone = right / np.diag(gram)  # the fit with one of the two only
        return (float(alone[0]), LOW_S) if b <= 0 else (LOW_S, float(alone[1]))
    old = counts @ np.array([expert_s, token_s])
    scale = float((weights * old) @ seconds / ((weights * old) @ old))
    return expert_s * scale, token_s * scale


def _clamped(seconds: float) -> float:
    return min(max(float(seconds), LOW_S), HIGH_S)
