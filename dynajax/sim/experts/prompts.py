"""Prompts of a mixture in simulated time, and other steps whose experts pass through the device. NumPy only."""

from __future__ import annotations

import numpy as np

from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.records import ExpertCosts, Ints
from dynajax.policy.experts.records import Work as Asked
from dynajax.sim.events import Process, Signal, Work
from dynajax.sim.experts.lanes import Lanes
from dynajax.sim.experts.systems import MixtureSystem
from dynajax.sim.experts.tally import MixtureTally

BUFFERS = 2  # experts that are on their way through the device


class Passing:
    """Nothing in the pool moves: residents stay, and what else the device computes goes through two buffers."""

    def __init__(self, lanes: Lanes, planner: ExpertPlanner, system: MixtureSystem, *, moves: bool) -> None:
        self._lanes, self._planner, self._system, self._moves = lanes, planner, system, moves

    def offloads(self, tokens: int) -> bool:
        """Whether a step of so many tokens streams all that is absent."""
        return self._system.offload_from is not None and tokens >= self._system.offload_from

    def prompt_layer(self, layer: int, counts: Ints, tokens: int) -> Process:
        """Both sides of a prompt's layer, with counts [E] of `tokens` tokens. Costs: lines through those counts."""
        assign = "fetch-all" if self.offloads(tokens) else self._system.policy.assign
        costs = self._lanes.sides.fitted(counts)
        yield from self.layer(layer, counts, assign, costs, None)

    def layer(self, layer: int, tokens: Ints, assign: str, costs: ExpertCosts, tally: MixtureTally | None) -> Process:
        """By tokens [E]; tally: of the step, where it is one of decoding."""
        live = np.flatnonzero(tokens).astype(np.int32)
        resident = self._planner.resident(layer)[live]
        room = len(live) if self._moves or self._system.offload_from is not None else 0
        made = ASSIGN[assign](Asked(experts=live, tokens=tokens[live], resident=resident, room=room), costs)
        hot, cold, streamed = live[made.on_gpu & resident], live[~made.on_gpu], live[made.fetch]
        if len(hot):
            self._lanes.experts("hot", tokens[hot])
        ended = Signal()
        if self._system.order.overlaps:
            self._lanes.simulation.start(self._stream(tokens[streamed], ended))
        else:
            yield from self._stream(tokens[streamed], ended)
        if len(cold):
            yield self._lanes.cold(tokens[cold])
        yield ended
        if tally is not None:
            there, sides = np.concatenate((hot, streamed)), self._lanes.sides
            tally.moved["streamed"] += len(streamed)
            tally.hot_pairs += int(tokens[there].sum())
            tally.device_s += float(sides.device_s(tokens[there]).sum())
            tally.host_s += float(sides.host_s(tokens[cold]).sum())

    def _stream(self, tokens: Ints, ended: Signal) -> Process:
        """Experts with so many tokens [n], one after the other: while one buffer is read the other is filled."""
        arriving: list[Work] = []
        for index in range(len(tokens)):
            if index >= BUFFERS:
                yield arriving[index - BUFFERS]
                yield self._lanes.experts("streamed", tokens[[index - BUFFERS]])
            arriving.append(self._lanes.transfer())
        for index in range(max(0, len(tokens) - BUFFERS), len(tokens)):
            yield arriving[index]
            self._lanes.experts("streamed", tokens[[index]])
        self._lanes.simulation.tell(ended)
