"""Recorded live sets through the planner that drives the engine, and what was found where. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.placement_trace import Trace
from dynajax.config import NeuronPolicy, PolicyConfig
from dynajax.plan import LayerPlan, Placement
from dynajax.policy.costs import Costs
from dynajax.policy.placement import place_equal, place_static
from dynajax.policy.planner import NeuronPlanner

# ReluLLaMA-13B at 16 bit on an RTX 4090 with PCIe 4.0: derived from published bandwidths, not measured.
UNITS_13B = 13824
COSTS_13B = Costs(t0_s=2e-5, t_gather_s=7e-7, t_trans_s=1.4e-6, t_gpu_s=5e-8, t_cpu_s=7e-7, t_sync_s=1e-4)


@dataclass(slots=True)
class Tally:
    """Sums over the steps of layers >= 1."""

    live: int = 0
    hot: int = 0  # live and on the device
    skipped: int = 0  # live and below its threshold
    computed: int = 0
    moved: int = 0
    steps: int = 0
    err: float = 0.0  # expected activation mass below the thresholds, as a share of all of it
    ffn_s: float = 0.0  # by the cost model
    move_s: float = 0.0  # the same, hidden behind compute or not

    def figures(self) -> dict[str, float]:
        return {
            "hot_share": round(self.hot / self.live, 4),
            "missed": round(self.skipped / self.live, 4),
            "err": round(self.err / self.steps, 4),
            "computed_per_live": round(self.computed / self.live, 3),
            "moved_per_step": round(self.moved / self.steps, 2),
            "ffn_us": round(1e6 * self.ffn_s / self.steps, 1),
            "move_us": round(1e6 * self.move_s / self.steps, 1),
        }


def costs_of(units: int) -> Costs:
    """A layer as heavy as one of the 13B model: each neuron stands for 13824 / F of them."""
    scaled = {
        f"t_{name}_s": getattr(COSTS_13B, f"t_{name}_s") * UNITS_13B / units
        for name in ("gather", "trans", "gpu", "cpu")
    }
    return replace(COSTS_13B, **scaled)


def place(trace: Trace, pool: float, budgets: str) -> Placement:
    """As the engine does it, `static` for policies that move nothing, `equal` for those that do."""
    layers, units = trace.frequency.shape
    method = place_static if budgets == "static" else place_equal
    return method(trace.frequency, 1, int(pool * layers * units))


def replay(
    trace: Trace, placement: Placement, policy: NeuronPolicy, window: float, prompt: int, config: PolicyConfig
) -> Tally:
    """All documents one after the other; pools go on as they are, frequencies start anew from the document's prompt."""
    planner = NeuronPlanner(placement, trace.frequency, policy, config, trace.mass)
    allowed = [int(window * row.sum()) for row in trace.frequency]
    costs, tally = costs_of(placement.units), Tally()
    for document, scores in zip(trace.live, trace.score, strict=True):
        planner.start_sequence(document[:prompt].sum(axis=0), prompt)
        for live, score in zip(document[prompt:], scores[prompt:], strict=True):
            for layer in range(1, len(live)):
                plan = planner.plan(layer, score[layer], allowed[layer], costs)
                planner.applied(layer, plan)
                tally.ffn_s += costs.layer_s(plan.n_gpu, plan.n_cpu)
                tally.move_s += bool(len(plan.units)) * costs.t0_s
                tally.move_s += len(plan.units) * (costs.t_gather_s + costs.t_trans_s)
                count(tally, live[layer], score[layer], trace.mass[layer], plan, planner.bucket(layer))
                planner.observe(layer, live[layer])
    planner.check()
    return tally


def count(
    tally: Tally, live: np.ndarray, score: np.ndarray, mass: np.ndarray, plan: LayerPlan, bucket: np.ndarray
) -> None:
    """One layer's step."""
    threshold = np.full(len(live), plan.theta_c, np.uint8)
    threshold[bucket] = plan.theta_g
    below, expected = score < threshold, score * mass
    tally.live += int(np.count_nonzero(live))
    tally.hot += int(np.count_nonzero(live[bucket]))
    tally.skipped += int(np.count_nonzero(live & below))
    tally.err += float(expected @ below) / max(float(expected.sum()), 1e-9)
    tally.computed += plan.n_gpu + plan.n_cpu
    tally.moved += len(plan.units)
    tally.steps += 1


def bound(trace: Trace, placement: Placement, prompt: int) -> float:
    """hot_share with unlimited swaps and perfect foresight."""
    live = trace.live[:, prompt:, 1:].sum(axis=3)
    return float(np.minimum(live, placement.slots[1:]).sum() / live.sum())
