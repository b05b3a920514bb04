"""The experts on their way to the device: who asks for them, when they are there, what comes of them. NumPy only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.planner import ExpertPlanner, LayerSwaps
from dynajax.policy.experts.records import Bools, Ints
from dynajax.sim.events import Process, Work
from dynajax.sim.experts.foresight import Foresight
from dynajax.sim.experts.lanes import Lanes
from dynajax.sim.experts.tally import MixtureTally, Why

I32 = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Move:
    """An expert on its way."""

    unit: int
    slot: int  # -1: it passes through a buffer, and the planner is not told
    why: Why
    work: Work


class Moves:
    """Transfers of all layers, one after the other on the link; the planner hears of each when its layer runs next."""

    def __init__(
        self,
        lanes: Lanes,
        planner: ExpertPlanner,
        estimator: ExpertCostEstimator,
        tally: MixtureTally,
        *,
        layers: int,
        lead: int,
        allowed: bool,  # whether anything may move
    ) -> None:
        self._lanes, self._planner, self._estimator, self._tally = lanes, planner, estimator, tally
        self.lead, self.allowed = lead, allowed
        self.told: Foresight | None = None  # of the run
        self._open: list[list[Move]] = [[] for _ in range(layers)]
        self._brought: list[list[int]] = [[] for _ in range(layers)]  # prefetched for the layer's next step
        self._coming: deque[Work] = deque()  # on the link, and some that have left it

    def asks(self, layer: int) -> bool:
        """Whether a later layer's router is asked with this one's input."""
        kind = self._planner.policy.prefetch
        return self.allowed and kind not in ("none", "count") and layer + self.lead < len(self._open)

    @property
    def unfinished(self) -> int:
        """Transfers that were asked for and are not done."""
        while self._coming and self._coming[0].happened:
            self._coming.popleft()
        return len(self._coming)

    def send(self, layer: int, units: I32, slots: I32, why: Why) -> list[Move]:
        """Bring these experts into these slots, in this order."""
        pairs = zip(units.tolist(), slots.tolist(), strict=True)
        moves = [Move(unit, slot, why, self._lanes.transfer()) for unit, slot in pairs]
        self._open[layer] += moves
        self._coming.extend(move.work for move in moves)
        self._tally.moved[why] += len(moves)
        return moves

    def land(self, layer: int) -> None:
        """Tell the planner of the moves in a layer that are done, and the estimator how long the last one took."""
        done = [move for move in self._open[layer] if move.work.happened]
        if done:
            self._estimator.observe_move(done[-1].work.seconds)
        for move in done:
            self._open[layer].remove(move)
            unit, slot = np.array([move.unit], np.int32), np.array([move.slot], np.int32)
            if move.slot >= 0:
                self._planner.applied(layer, unit, slot)
            if move.why == "prefetched":
                self._brought[layer].append(move.unit)

    def settle(self) -> Process:
        """Wait for everything that moves."""
        for layer, moves in enumerate(self._open):
            for move in list(moves):
                yield move.work
            self.land(layer)

    def ahead(self, layer: int, step: int, left_s: float | None) -> None:
        """On an idle link a prefetch for a later layer, else what the cache wants in this one.

        left_s: until the next layer that has experts plans; what would arrive later is left alone. None: as the engine
        does, one move whenever it arrives.
        """
        target = layer + self.lead
        if not self.allowed:
            return
        asks = self.told is not None and target < len(self._open) and self._planner.asks(target)
        if self.unfinished:
            return
        costs, expected = self._estimator.costs(), None
        if self.told is not None and asks and (left_s is None or costs.copy_s <= left_s):
            expected = self.told.predict(step, target)
        if expected is not None:
            self.land(target)
            found = self._planner.prefetch(target, expected, costs)
            if found is not None:
                self.send(target, found.units, found.slots, "prefetched")
                return
        swaps = self._planner.background(layer, costs, max(costs.copy_s, left_s or 0.0))
        self._send_swaps(layer, swaps)

    def _send_swaps(self, layer: int, swaps: LayerSwaps) -> None:
        self.send(layer, swaps.units, swaps.slots, "swapped")

    def look_back(self, layer: int, step: int, tokens: Ints, resident: Bools) -> None:
        """What came of what was foretold of a layer-step, and of what was brought in for it."""
        tally, coming = self._tally, self._open[layer]
        tally.useful += _needed(tokens, self._brought[layer])
        tally.late += _needed(tokens, [move.unit for move in coming if move.why == "prefetched"])
        self._brought[layer] = []
        if self.told is not None and self.allowed and layer >= self.lead:
            expected, counts = self.told.predict(step, layer), self.told.told(step, layer)
            if expected is not None and counts is not None:
                tally.foretell(tokens, resident, counts, expected)


def _needed(tokens: Ints, units: Sequence[int]) -> int:
    return sum(bool(tokens[unit] > 0) for unit in units)
