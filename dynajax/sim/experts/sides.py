"""What experts take on each side of a machine: rooflines, and the straight lines that a planner goes by. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynajax.policy.costs import LOW_S
from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.records import F64, ExpertCosts, Ints
from dynajax.sim.experts.shapes import MixtureLoad
from dynajax.sim.hardware import Hardware

PROBES = 24  # numbers of tokens that a line is laid through
_START = ExpertCosts(
    t0_s=1e-5, t_trans_s=4e-4, gpu_s=2e-5, gpu_token_s=5e-7, cpu_s=2.5e-4, cpu_token_s=2e-5, t_sync_s=2e-5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """An expert with w tokens takes the longer of reading its weights and of computing w tokens.

    Example: 10 MB at 800 GB/s and 19 MFLOP a token at 50 TFLOP/s: 12.5 us up to 33 tokens, 38 us for 100.
    """

    device_read_s: float
    device_token_s: float
    host_read_s: float
    host_token_s: float
    copy_fixed_s: float  # the starts of its transfers
    copy_busy_s: float  # its bytes over the link
    sync_s: float  # the host's share of a layer: h to it, its result back, and the call

    @classmethod
    def of(cls, load: MixtureLoad, hardware: Hardware, piece: float = 2**25) -> Sides:
        """piece: bytes at most of one transfer; a larger expert goes in several."""
        starts = -(-load.host_unit // piece)
        return cls(
            device_read_s=load.unit / hardware.device_bps,
            device_token_s=load.unit_flops / hardware.device_flops,
            host_read_s=load.host_unit / hardware.host_rate(load.host_dtype),
            host_token_s=load.unit_flops / hardware.cpu_flops,
            copy_fixed_s=starts * hardware.t0_s,
            copy_busy_s=load.host_unit / hardware.link_bps,
            sync_s=hardware.sync_s / 2 + hardware.call_s,
        )

    def device_s(self, tokens: Ints) -> F64:
        """Seconds of experts with so many tokens, where nobody else slows the device down."""
        return np.maximum(self.device_read_s, self.device_token_s * np.asarray(tokens, np.float64))

    def host_s(self, tokens: Ints) -> F64:
        """The same on the host."""
        return np.maximum(self.host_read_s, self.host_token_s * np.asarray(tokens, np.float64))

    def fitted(self, tokens: Any) -> ExpertCosts:
        """The straight lines through these numbers of tokens, as the engine's probe and its estimator lay them."""
        seen = np.unique(np.asarray(tokens, np.int64))
        seen = seen[seen > 0] if (seen > 0).any() else np.ones(1, np.int64)
        picked = np.unique(seen[np.linspace(0, len(seen) - 1, PROBES).round().astype(np.int64)])
        start = ExpertCosts(
            t0_s=max(LOW_S, self.copy_fixed_s),
            t_trans_s=max(LOW_S, self.copy_busy_s),
            gpu_s=_START.gpu_s,
            gpu_token_s=_START.gpu_token_s,
            cpu_s=_START.cpu_s,
            cpu_token_s=_START.cpu_token_s,
            t_sync_s=max(LOW_S, self.sync_s),
        )
        estimator = ExpertCostEstimator(start)
        for count in picked.tolist():
            estimator.observe("gpu", 1, count, float(self.device_s(count)))
            estimator.observe("cpu", 1, count, float(self.host_s(count)))
        return estimator.costs()
