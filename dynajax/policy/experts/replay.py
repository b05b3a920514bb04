"""A routing trace through the planner that drives the engine: what was found where, and what it takes by the costs.

Times are modelled. One layer-step after the other: the planner decides at the layer's start, with the link as busy as
earlier transfers left it; fetches follow on the link; the layer takes its makespan and `dense_s` for all else. A
prefetch for the next layer, then background swaps, go over the link as soon as it is idle, if they arrive before the
next layer starts; until then they are pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from dynajax.policy.experts.planner import ExpertPlanner, LayerSwaps, StepPlan
from dynajax.policy.experts.records import F64, ExpertCosts, Ints, makespan
from dynajax.policy.experts.scan import scan

Predict = Callable[[int, int], F64]  # (step, layer) -> its workload [E] as expected before it is known


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Sums over a trace's steps, [L] each."""

    steps: int
    live: F64  # experts
    hits: F64  # of them in a slot when the layer starts
    tokens: F64  # at live experts
    hit_tokens: F64
    fetched: F64  # experts brought in on demand
    prefetched: F64
    useful: F64  # of them live in their layer's next step
    swapped: F64  # in the background
    host_s: F64  # busy
    gpu_s: F64
    link_s: F64
    makespan_s: F64
    best_s: F64  # of `scan` in the same situations: the optimum, or nearly

    def figures(self, unit_bytes: int = 0) -> dict[str, float]:
        """Over all layers: shares of 1, and means per layer-step."""
        layer_steps = len(self.live) * self.steps
        loads = self.fetched + self.prefetched + self.swapped
        return {
            "hits": self.hits.sum() / self.live.sum(),
            "weighted_hits": self.hit_tokens.sum() / self.tokens.sum(),
            "fetched": self.fetched.sum() / layer_steps,
            "prefetched": self.prefetched.sum() / layer_steps,
            "swapped": self.swapped.sum() / layer_steps,
            "loads": loads.sum() / layer_steps,
            "load_bytes": loads.sum() / layer_steps * unit_bytes,
            "prefetch_useful": self.useful.sum() / max(self.prefetched.sum(), 1),
            "layer_s": self.makespan_s.sum() / layer_steps,
            "over_best": self.makespan_s.sum() / self.best_s.sum(),
            "host_busy": self.host_s.sum() / self.makespan_s.sum(),
            "gpu_busy": self.gpu_s.sum() / self.makespan_s.sum(),
            "link_busy": self.link_s.sum() / self.makespan_s.sum(),
        }


def replay(
    trace: Ints,  # [steps, L, E] tokens at each expert
    planner: ExpertPlanner,
    costs: ExpertCosts,
    *,
    dense_s: float = 0.0,  # a layer's time outside its experts
    transit: int = 0,  # slots for fetched experts that are not kept, which all layers share
    predict: Predict | None = None,
) -> Tally:
    """The sums over all steps. The planner keeps its state; its transfers are all reported when this returns."""
    steps, layers, _ = trace.shape
    sums = {field.name: np.zeros(layers) for field in fields(Tally) if field.name != "steps"}
    tally = Tally(steps, **sums)
    link = _Link(planner, costs)
    guessed: dict[int, int] = {}
    now_s = 0.0
    for step in range(steps):
        for layer in range(layers):
            tokens = trace[step, layer]
            link.report(now_s)
            resident = planner.resident(layer)
            tally.live[layer] += np.count_nonzero(tokens)
            tally.hits[layer] += np.count_nonzero(tokens[resident])
            tally.tokens[layer] += tokens.sum()
            tally.hit_tokens[layer] += tokens[resident].sum()
            if layer in guessed:
                tally.useful[layer] += tokens[guessed.pop(layer)] > 0
            busy_s = max(0.0, link.free_s - now_s)
            plan = planner.plan_step(layer, tokens, costs, transit=transit, copy_busy_s=busy_s)
            takes_s = _count(tally, layer, plan, costs)
            link.send(layer, LayerSwaps(plan.units, plan.slots), now_s)
            planner.observe(layer, tokens)
            end_s = now_s + takes_s + dense_s
            later = (step, layer + 1) if layer + 1 < layers else (step + 1, 0)
            if predict is not None and later[0] < steps and max(link.free_s, now_s) + costs.copy_s <= end_s:
                swap = planner.prefetch(later[1], predict(*later), costs, transit=transit)
                if swap is not None:
                    link.send(later[1], swap, now_s)
                    tally.prefetched[later[1]] += 1
                    guessed[later[1]] = int(swap.units[0])
            swaps = planner.background(layer, costs, end_s - max(link.free_s, now_s))
            tally.swapped[layer] += len(swaps.units)
            link.send(layer, swaps, now_s)
            now_s = end_s
    link.report(np.inf)
    planner.check()
    tally.link_s[:] = (tally.fetched + tally.prefetched + tally.swapped) * costs.copy_s
    return tally


class _Link:
    """Transfers one after the other, each reported to the planner once it is there."""

    def __init__(self, planner: ExpertPlanner, costs: ExpertCosts) -> None:
        self._planner, self._copy_s = planner, costs.copy_s
        self._under_way: list[tuple[float, int, LayerSwaps]] = []
        self.free_s = 0.0

    def send(self, layer: int, swaps: LayerSwaps, now_s: float) -> None:
        """At once, or as soon as what was sent before is there; what passes through (slot -1) is not reported."""
        if len(swaps.units):
            self.free_s = max(self.free_s, now_s) + len(swaps.units) * self._copy_s
            kept = swaps.slots >= 0
            self._under_way.append((self.free_s, layer, LayerSwaps(swaps.units[kept], swaps.slots[kept])))

    def report(self, now_s: float) -> None:
        """Tell the planner what has arrived by now."""
        arrived = [entry for entry in self._under_way if entry[0] <= now_s * (1 + 1e-12)]
        self._under_way = [entry for entry in self._under_way if entry[0] > now_s * (1 + 1e-12)]
        for _, layer, swaps in arrived:
            self._planner.applied(layer, swaps.units, swaps.slots)


def _count(tally: Tally, layer: int, plan: StepPlan, costs: ExpertCosts) -> float:
    """Seconds of a layer's experts, added to the sums with what its sides are busy."""
    work, on_gpu = plan.work, plan.on_gpu
    takes_s = float(makespan(work, on_gpu, costs))
    best = scan(work, costs)
    tally.makespan_s[layer] += takes_s
    tally.best_s[layer] += min(takes_s, float(makespan(work, best.on_gpu, costs)))
    tally.gpu_s[layer] += costs.gpu(work.tokens)[on_gpu].sum()
    tally.host_s[layer] += work.host_busy_s + costs.cpu(work.tokens)[~on_gpu].sum()
    tally.host_s[layer] += costs.t_sync_s * (len(plan.cold) > 0)
    tally.fetched[layer] += len(plan.units)
    return takes_s
