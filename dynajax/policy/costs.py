"""What moving and computing a unit costs: the figures a plan goes by, and how they follow the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

CostName = Literal["t0_s", "t_gather_s", "t_trans_s", "t_gpu_s", "t_cpu_s", "t_sync_s"]

LOW_S, HIGH_S = 1e-10, 1.0  # bounds of every estimate: never zero, never endless
RECENT = 32  # observations that an estimate looks at
MEMORY = 0.92  # weight of an observation against the next newer one of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, all > 0; t0_s and t_sync_s are per transfer and per layer, the others per unit."""

    t0_s: float
    t_gather_s: float
    t_trans_s: float
    t_gpu_s: float
    t_cpu_s: float
    t_sync_s: float

    def __post_init__(self) -> None:
        for name in get_args(CostName):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 seconds, got {value!r}")

    def units_in(self, seconds: float) -> int:
        """Units that are gathered and sent within `seconds`."""
        return max(0, int((seconds - self.t0_s) / (self.t_gather_s + self.t_trans_s)))

    def layer_s(self, n_gpu: int, n_cpu: int) -> float:
        """Time of a layer's FFN (the paper's model): both sides work at once."""
        return max(self.t_gpu_s * n_gpu, self.t_cpu_s * n_cpu + self.t_sync_s)

    @property
    def uses_to_pay(self) -> float:
        """Uses on the device after which moving a unit has paid; inf where the host is no slower."""
        saved_s = self.t_cpu_s - self.t_gpu_s
        return (self.t_gather_s + self.t_trans_s) / saved_s if saved_s > 0 else math.inf


class CostEstimator:
    """Costs that follow the machine: a function of the observations alone.

    Each cost is a percentile of the rates (seconds / quantity) of its last 32 observations, each counting 0.92 of
    the next newer one. What is spent on moving is taken at `safety` (0.8: two wild observations in a row change
    nothing, three slow ones do, 17 good ones undo it), computing at the median: it also is what a move saves.
    """

    def __init__(self, initial: Costs, safety: float = 0.8) -> None:
        if not 0 <= safety <= 1:
            raise ValueError(f"safety must be between 0 and 1, got {safety}")
        self._estimates: dict[str, float] = {field.name: getattr(initial, field.name) for field in fields(Costs)}
        self._shares = {name: 0.5 if name in ("t_gpu_s", "t_cpu_s") else safety for name in self._estimates}
        self._rates = {name: np.empty(0, np.float64) for name in self._estimates}
        self._stale: set[str] = set()
        self._costs = _clamped(self._estimates)

    def observe(self, name: CostName, quantity: float, seconds: float) -> None:
        """`quantity` units (transfers for t0_s, layers for t_sync_s) took so long; for t_trans_s without their t0_s."""
        if name not in self._estimates:
            raise ValueError(f"no cost is named {name!r}, only {', '.join(self._estimates)}")
        if not quantity > 0 or not math.isfinite(seconds):
            raise ValueError(f"quantity must be > 0 and seconds finite, got {quantity!r} and {seconds!r}")
        self._rates[name] = np.append(self._rates[name][1 - RECENT :], seconds / quantity)
        self._stale.add(name)

    def costs(self) -> Costs:
        """The estimates as they are now; what was never observed is as it was given."""
        if self._stale:
            for name in sorted(self._stale):
                self._estimates[name] = recent_percentile(self._rates[name], self._shares[name])
            self._stale.clear()
            self._costs = _clamped(self._estimates)
        return self._costs


def recent_percentile(rates: npt.NDArray[np.float64], share: float) -> float:
    """The smallest of `rates` (oldest first) such that `share` of the decayed weight lies at or below it.

    Example: three equal rates and then an outlier: the outlier weighs 1 of 3.5, so share 0.7 does not see it.
    """
    weights = MEMORY ** np.arange(len(rates) - 1, -1, -1.0)
    order = np.argsort(rates, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, share * reached[-1]))
    return float(rates[order[min(at, len(rates) - 1)]])


def _clamped(estimates: dict[str, float]) -> Costs:
    return Costs(**{name: min(max(value, LOW_S), HIGH_S) for name, value in estimates.items()})
