"""A mixture of experts decodes in simulated time: the engine's planner, its cost estimates, its lanes.

main     attend(i), route | ids: plan(i) | hot | cold experts | next layer
device   attend(i)  always(i) foretell   | hot experts, fetched experts as they come | attend(i+1)
link                                     | fetched experts, then one for later ------^
host                                     | cold experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dynajax.plan import Placement
from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.planner import ExpertPlanner, LayerSwaps, StepPlan
from dynajax.policy.experts.records import ExpertCosts, Ints, makespan
from dynajax.policy.experts.records import Work as Asked
from dynajax.sim.events import Process, Signal, Work
from dynajax.sim.experts.activity import MixtureActivity, MixtureRun, Prompt
from dynajax.sim.experts.foresight import Foresight, foresights
from dynajax.sim.experts.lanes import Lanes
from dynajax.sim.experts.shapes import MixtureLoad
from dynajax.sim.experts.sides import Sides
from dynajax.sim.experts.systems import MixtureSystem
from dynajax.sim.experts.tally import MixtureTally
from dynajax.sim.hardware import Hardware

I32 = npt.NDArray[np.int32]
OnPlan = Callable[[int, StepPlan], None]  # number of the layer, its plan

TIMED_EVERY = 16  # steps: how often the engine waits for the device to time it
SAFETY = 0.8  # percentile of recent transfers that a plan goes by
BUFFERS = 2  # experts of a prompt that are on their way through the device
KEPT = 0.9  # of the mean time of a layer outside its experts


@dataclass(slots=True, eq=False)
class _Move:
    """An expert on its way."""

    unit: int
    slot: int
    why: str  # fetched, prefetched, swapped
    work: Work


@dataclass(slots=True, eq=False)
class _Step:
    """A layer-step that is under way."""

    layer: int  # among those that have experts
    number: int  # of the step in its run
    tokens: Ints  # [E]
    plan: StepPlan
    ends_s: float  # when it will be done, as far as the planner knows
    hot: Work | None = None
    cold: Work | None = None
    fetched: list[Work] = field(default_factory=list)
    dispatched: Signal = field(default_factory=Signal)  # all that was fetched is given to the device


def simulate(
    load: MixtureLoad,
    hardware: Hardware,
    system: MixtureSystem,
    activity: MixtureActivity,
    placement: Placement,
    *,
    recall: float | None = None,  # of what is foretold; see foresight.py
    lead: int = 1,  # layers between a prediction and its use
    costs: ExpertCosts | None = None,  # that never change; None: learned, as the engine does
    on_plan: OnPlan | None = None,
) -> MixtureTally:
    """All runs of the activity, prompts and decoding, one after the other; pools go on as they are."""
    told = foresights(activity, system.policy.prefetch, recall, system.config.count_decay)
    lanes = Lanes(load, hardware, Sides.of(load, hardware))
    run = MixtureSimulation(lanes, system, activity, placement, costs)
    run.lead, run.on_plan = lead, on_plan
    lanes.simulation.start(run.main(told))
    lanes.simulation.run()
    run.planner.check()
    return run.tally


class MixtureSimulation:
    """The processes of `simulate`, and what they share."""

    def __init__(
        self,
        lanes: Lanes,
        system: MixtureSystem,
        activity: MixtureActivity,
        placement: Placement,
        costs: ExpertCosts | None,
    ) -> None:
        self.lanes, self.system, self.activity = lanes, system, activity
        self.load, self.hardware = lanes.load, lanes.hardware
        count, units = activity.frequency.shape
        buckets, policy = placement.buckets, system.policy
        self.planner = ExpertPlanner(count, units, policy, system.config, buckets, activity.frequency)
        usual = lanes.sides.fitted((1, *range(1, activity.batch + 1)))
        self.estimator = ExpertCostEstimator(costs or usual, SAFETY, fixed=costs is not None)
        self.tally, self.lead, self.on_plan = MixtureTally(), 1, None
        self._moves = system.moves and any(placement.slots)
        self._number = {layer: m for m, layer in enumerate(self.load.unit_layers)}
        self._open: list[list[_Move]] = [[] for _ in range(count)]
        self._brought: list[list[int]] = [[] for _ in range(count)]
        self._told: Foresight | None = None
        self._steps = 0
        self._between_s = 0.0  # a layer's time outside its experts

    # --- the main thread ---

    def main(self, told: list[Foresight | None]) -> Process:
        """Every run: its prompts, then its steps."""
        for run, foresight in zip(self.activity.runs, told, strict=True):
            self._told = foresight
            for prompt in run.prompts:
                yield from self._prompt(prompt)
            self.planner.start_sequence(run.prompt_counts if run.prompts else None)
            before = dict(self.lanes.simulation.busy_s)
            for step in range(len(run.steps)):
                yield from self._step(run, step)
            for name, seconds in self.lanes.simulation.busy_s.items():
                self.tally.busy_s[name] = self.tally.busy_s.get(name, 0.0) + seconds - before.get(name, 0.0)
            yield from self._settle()

    def _step(self, run: MixtureRun, step: int) -> Process:
        """One token in every row."""
        lanes, load, tally = self.lanes, self.load, self.tally
        begin, rows = lanes.simulation.now, int(run.rows[step])
        cached = rows * (run.context + step + 1) * load.kv_token
        yield lanes.python(self.hardware.token_s)
        for layer in range(load.layers):
            m = self._number.get(layer)
            at = lanes.simulation.now
            attend = self._attend(layer, rows, cached)
            if m is None:
                yield lanes.python(self.hardware.layer_s + 2 * self.hardware.dispatch_s)
                continue
            if self._asks(m):
                lanes.program("foretell", load.router, rows * load.router)
            yield lanes.python(self.hardware.layer_s + 3 * self.hardware.dispatch_s)
            yield attend
            yield lanes.hand_over()
            self._learn_between(lanes.simulation.now - at)
            yield from self._experts(m, step, run.steps[step, m], rows)
        yield lanes.program("head", load.head, rows * load.head_flops)
        spent = lanes.simulation.now - begin
        self._steps += 1
        tally.steps, tally.rows, tally.seconds = tally.steps + 1, tally.rows + rows, tally.seconds + spent
        tally.step_s.append(spent)

    def _attend(self, layer: int, rows: int, cached: float) -> Work:
        """Attention and router, and behind them what every token computes."""
        load, lanes = self.load, self.lanes
        attend = lanes.program("attend", load.attend + cached, rows * load.attend_flops)
        if load.always[layer]:
            lanes.program("always", load.always[layer], rows * load.always_flops[layer])
        return attend

    def _asks(self, m: int) -> bool:
        """Whether a later layer's router is asked with this one's input."""
        return self._moves and self.system.policy.prefetch not in ("none", "count") and m + self.lead < len(self._open)

    def _learn_between(self, seconds: float) -> None:
        self._between_s = KEPT * self._between_s + (1 - KEPT) * seconds if self._between_s else seconds

    # --- the experts of a layer ---

    def _experts(self, m: int, step: int, tokens: Ints, rows: int) -> Process:
        """Both sides of a layer."""
        self._land(m)
        if self.system.offload_from is not None and rows >= self.system.offload_from:
            self.tally.found(tokens, self.planner.resident(m))
            yield from self._through(m, tokens, "fetch-all", self.estimator.costs(), count=True)
            return
        if self.system.moves:
            yield self.lanes.python(self.hardware.plan_s)
            self._land(m)
        done = self._planned(m, step, tokens)
        order = self.system.order
        moves = [self._send(m, u, s, "fetched") for u, s in _pairs(done.plan.units, done.plan.slots)]
        if len(done.plan.hot):
            done.hot = self.lanes.experts("hot", tokens[done.plan.hot])
        if len(done.plan.cold):
            done.cold = self.lanes.cold(tokens[done.plan.cold])
        if order.pipelined:
            self.lanes.simulation.start(self._fetched(done, moves))
        if order.early:
            self._observe(done)
            self.lanes.simulation.start(self._ahead_early(done, moves))
        if done.cold is not None:
            yield done.cold
        if not order.pipelined:
            yield from self._fetched_together(done, moves)
        yield done.dispatched
        self._land(m)
        if not order.early:
            self._observe(done)
            self._ahead(done, None)
        self._account(done)

    def _planned(self, m: int, step: int, tokens: Ints) -> _Step:
        """The planner's decision, and the books of what it found."""
        planner, costs, tally = self.planner, self.estimator.costs(), self.tally
        resident, now = planner.resident(m), self.lanes.simulation.now
        tally.found(tokens, resident)
        self._look_back(m, step, tokens, resident)
        busy_s = self._unfinished() * costs.copy_s
        room = None if self._moves else 0
        plan = planner.plan_step(m, tokens, costs, room=room, copy_busy_s=busy_s)
        if self.on_plan is not None:
            self.on_plan(m, plan)
        tally.judge(plan, costs)
        return _Step(m, step, tokens, plan, now + float(makespan(plan.work, plan.on_gpu, costs)))

    def _fetched(self, done: _Step, moves: list[_Move]) -> Process:
        """Each expert is computed as soon as it is there."""
        for move in moves:
            yield move.work
            done.fetched.append(self.lanes.experts("fetched", done.tokens[[move.unit]]))
        self.lanes.simulation.tell(done.dispatched)

    def _fetched_together(self, done: _Step, moves: list[_Move]) -> Process:
        for move in moves:
            yield move.work
        if moves:
            done.fetched.append(self.lanes.experts("fetched", done.tokens[done.plan.units]))
        self.lanes.simulation.tell(done.dispatched)

    def _observe(self, done: _Step) -> None:
        self.planner.observe(done.layer, done.tokens)
        if self._told is not None:
            self._told.observe(done.layer, done.tokens)

    def _account(self, done: _Step) -> None:
        """What was computed where, and what the estimator sees of it."""
        tally, plan, tokens, sides = self.tally, done.plan, done.tokens, self.lanes.sides
        there = np.concatenate((plan.hot, plan.units))
        tally.hot_pairs += int(tokens[there].sum())
        tally.device_s += float(sides.device_s(tokens[there]).sum())
        if done.cold is not None:
            tally.host_s += float(sides.host_s(tokens[plan.cold]).sum())
            spent = done.cold.seconds - sides.sync_s
            self.estimator.observe("cpu", len(plan.cold), int(tokens[plan.cold].sum()), spent)
        if done.hot is not None and self._steps % TIMED_EVERY == 0 and done.hot.happened:
            self.estimator.observe("gpu", len(plan.hot), int(tokens[plan.hot].sum()), done.hot.seconds)

    # --- what moves ---

    def _send(self, m: int, unit: int, slot: int, why: str) -> _Move:
        move = _Move(unit, slot, why, self.lanes.transfer())
        self._open[m].append(move)
        setattr(self.tally, why, getattr(self.tally, why) + 1)
        return move

    def _land(self, m: int) -> None:
        """Tell the planner of the moves in a layer that are done."""
        for move in [move for move in self._open[m] if move.work.happened]:
            self._open[m].remove(move)
            self.planner.applied(m, *_one(move.unit, move.slot))
            self.estimator.observe_move(move.work.seconds)
            if move.why == "prefetched":
                self._brought[m].append(move.unit)

    def _unfinished(self) -> int:
        """Transfers that were asked for and are not done."""
        return sum(not move.work.happened for moves in self._open for move in moves)

    def _settle(self) -> Process:
        for m, moves in enumerate(self._open):
            for move in list(moves):
                yield move.work
            self._land(m)

    def _ahead_early(self, done: _Step, moves: list[_Move]) -> Process:
        """Once the link is idle, if that is before the layer ends: as much as arrives before the next one plans."""
        for move in moves:
            yield move.work
        left_s = done.ends_s + self._between_s - self.lanes.simulation.now
        self._ahead(done, left_s)

    def _ahead(self, done: _Step, left_s: float | None) -> None:
        """A prefetch for a later layer, else what the cache wants in this one; left_s None: whenever it arrives."""
        if not self._moves or self._unfinished():
            return
        costs, target = self.estimator.costs(), done.layer + self.lead
        expected = None
        if self._told is not None and target < len(self._open):
            expected = self._told.predict(done.number, target)
        if expected is not None and (left_s is None or costs.copy_s <= left_s + (self.lead - 1) * self._between_s):
            self._land(target)
            found = self.planner.prefetch(target, expected, costs)
            if found is not None:
                self._send_all(target, found, "prefetched")
                return
        window_s = costs.copy_s if left_s is None else left_s
        self._send_all(done.layer, self.planner.background(done.layer, costs, window_s), "swapped")

    def _send_all(self, m: int, swaps: LayerSwaps, why: str) -> None:
        for unit, slot in _pairs(swaps.units, swaps.slots):
            self._send(m, unit, slot, why)

    def _look_back(self, m: int, step: int, tokens: Ints, resident: npt.NDArray[np.bool_]) -> None:
        """What came of what was foretold, and of what was brought in for it."""
        tally = self.tally
        tally.useful += sum(bool(tokens[unit] > 0) for unit in self._brought[m])
        self._brought[m] = []
        tally.late += sum(move.why == "prefetched" and bool(tokens[move.unit] > 0) for move in self._open[m])
        if self._told is not None and self._moves and m >= self.lead:
            expected = self._told.predict(step, m)
            if expected is not None:
                tally.foretell(tokens, resident, expected)

    # --- a prompt ---

    def _prompt(self, prompt: Prompt) -> Process:
        """All of its tokens pass a layer before any passes the next. Nothing in the pool moves."""
        lanes, begin = self.lanes, self.lanes.simulation.now
        yield lanes.python(self.hardware.token_s)
        for layer in range(self.load.layers):
            attend = self._attend(layer, prompt.tokens, prompt.tokens * self.load.kv_token)
            yield lanes.python(self.hardware.layer_s + 3 * self.hardware.dispatch_s)
            if (m := self._number.get(layer)) is None:
                continue
            yield attend
            yield lanes.hand_over()
            if self.system.moves:
                yield lanes.python(self.hardware.plan_s)
            yield from self._prompt_experts(m, prompt)
        yield lanes.program("head", self.load.head, self.load.head_flops)
        self.tally.prompt_tokens += prompt.tokens
        self.tally.prompt_s += lanes.simulation.now - begin

    def _prompt_experts(self, m: int, prompt: Prompt) -> Process:
        counts, system = prompt.counts[m], self.system
        costs = self.lanes.sides.fitted(counts)
        streams = system.offload_from is not None and prompt.tokens >= system.offload_from
        assign = "fetch-all" if streams else system.policy.assign
        yield from self._through(m, counts, assign, costs, count=False)

    def _through(self, m: int, tokens: Ints, assign: str, costs: ExpertCosts, *, count: bool) -> Process:
        """A layer whose fetched experts pass through two buffers: while one is read the other is filled."""
        live = np.flatnonzero(tokens).astype(np.int32)
        resident = self.planner.resident(m)[live]
        room = len(live) if self._moves or self.system.offload_from is not None else 0
        work = Asked(experts=live, tokens=tokens[live], resident=resident, room=room)
        made = ASSIGN[assign](work, costs)
        hot, cold, streamed = live[made.on_gpu & resident], live[~made.on_gpu], live[made.fetch]
        if len(hot):
            self.lanes.experts("hot", tokens[hot])
        ended = Signal()
        if self.system.order.overlaps:
            self.lanes.simulation.start(self._stream(tokens[streamed], ended))
        else:
            yield from self._stream(tokens[streamed], ended)
        if len(cold):
            yield self.lanes.cold(tokens[cold])
        yield ended
        if count:
            tally = self.tally
            tally.streamed += len(streamed)
            tally.hot_pairs += int(tokens[hot].sum() + tokens[streamed].sum())
            tally.device_s += float(self.lanes.sides.device_s(tokens[np.concatenate((hot, streamed))]).sum())
            tally.host_s += float(self.lanes.sides.host_s(tokens[cold]).sum()) if len(cold) else 0.0

    def _stream(self, tokens: Ints, ended: Signal) -> Process:
        """Experts with so many tokens [n], one after the other."""
        computed: list[Work] = []
        arriving: list[Work] = []
        for index in range(len(tokens)):
            if index >= BUFFERS:
                yield arriving[index - BUFFERS]
                computed.append(self.lanes.experts("streamed", tokens[[index - BUFFERS]]))
                yield computed[-1]
            arriving.append(self.lanes.transfer())
        for index in range(max(0, len(tokens) - BUFFERS), len(tokens)):
            yield arriving[index]
            computed.append(self.lanes.experts("streamed", tokens[[index]]))
        self.lanes.simulation.tell(ended)


def _pairs(units: I32, slots: I32) -> list[tuple[int, int]]:
    return list(zip(units.tolist(), slots.tolist(), strict=True))


def _one(unit: int, slot: int) -> tuple[I32, I32]:
    return np.array([unit], np.int32), np.array([slot], np.int32)
