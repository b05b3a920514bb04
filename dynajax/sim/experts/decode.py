"""A mixture of experts decodes in simulated time: the engine's planner, its cost estimates, its lanes.

main     attend(i), route | ids: plan(i) | hot | cold experts | next layer
device   attend(i)  always(i) foretell   | hot experts, fetched experts as they come | attend(i+1)
link                                     | fetched experts, then one for later ------^
host                                     | cold experts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynajax.plan import Placement
from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.planner import ExpertPlanner, StepPlan
from dynajax.policy.experts.records import ExpertCosts, Ints, makespan
from dynajax.sim.events import Process, Signal, Work
from dynajax.sim.experts.activity import MixtureActivity, MixtureRun, Prompt
from dynajax.sim.experts.foresight import Foresight, foresights
from dynajax.sim.experts.lanes import Lanes
from dynajax.sim.experts.moving import Move, Moves
from dynajax.sim.experts.prompts import Passing
from dynajax.sim.experts.shapes import MixtureLoad
from dynajax.sim.experts.sides import Sides
from dynajax.sim.experts.systems import MixtureSystem
from dynajax.sim.experts.tally import MixtureTally
from dynajax.sim.hardware import Hardware

OnPlan = Callable[[int, StepPlan], None]  # number of the layer among those that have experts, its plan

TIMED_EVERY = 16  # steps: how often the engine waits for the device to time it
SAFETY = 0.8  # percentile of recent transfers that a plan goes by
KEPT = 0.9  # of the mean time of a layer outside its experts
# The planner's own time, NumPy: 20 us for 8 live experts, 110 us for 64 (measured on a Zen 5 core; ours is no GPU's).
PLAN_S, PLAN_LIVE_S = 1e-5, 1.5e-6


@dataclass(slots=True, eq=False)
class _Step:
    """A layer-step that is under way."""

    layer: int
    number: int  # of the step in its run
    tokens: Ints  # [E]
    plan: StepPlan
    ends_s: float  # when it will be done, as far as the planner knows
    cold: Work | None = None
    dispatched: Signal = field(default_factory=Signal)  # all that was fetched is given to the device


def simulate(
    load: MixtureLoad,
    hardware: Hardware,
    system: MixtureSystem,
    activity: MixtureActivity,
    placement: Placement,
    *,
    recall: float | None = None,  # of what is foretold; see foresight.py
    costs: ExpertCosts | None = None,  # that never change; None: learned, as the engine does
    on_plan: OnPlan | None = None,
) -> MixtureTally:
    """All runs of the activity, prompts and decoding, one after the other; pools go on as they are."""
    told = foresights(activity, system.policy.prefetch, recall, system.config.count_decay)
    lanes = Lanes(load, hardware, Sides.of(load, hardware))
    run = MixtureSimulation(lanes, system, activity, placement, costs)
    run.on_plan = on_plan
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
        self.planner = ExpertPlanner(count, units, system.policy, system.config, placement.buckets, activity.frequency)
        usual = lanes.sides.fitted(range(1, activity.batch + 1))
        self.estimator = ExpertCostEstimator(costs or usual, SAFETY, fixed=costs is not None)
        self.tally, self.on_plan = MixtureTally(), None
        self._whole = placement.resident == count * units  # nothing is left for the host: a token is one program
        allowed = system.moves and any(placement.slots) and not self._whole
        self.moves = Moves(
            lanes, self.planner, self.estimator, self.tally, layers=count, lead=system.lead, allowed=allowed
        )
        self.passing = Passing(lanes, self.planner, system, moves=allowed)
        self._number = {layer: m for m, layer in enumerate(self.load.unit_layers)}
        self._between_s = 0.0  # from the end of a layer's experts to the next plan

    # --- the main thread ---

    def main(self, told: Sequence[Foresight | None]) -> Process:
        """Every run: its prompts, then its steps."""
        for run, foresight in zip(self.activity.runs, told, strict=True):
            self.moves.told = foresight
            for prompt in run.prompts:
                yield from self._prompt(prompt)
            self.planner.start_sequence(self._prompt_counts(run))
            before = dict(self.lanes.simulation.busy_s)
            for step in range(len(run.steps)):
                yield from self._step(run, step)
            for name, seconds in self.lanes.simulation.busy_s.items():
                self.tally.busy_s[name] = self.tally.busy_s.get(name, 0.0) + seconds - before.get(name, 0.0)
            yield from self.moves.settle()

    def _prompt_counts(self, run: MixtureRun) -> Ints | None:
        """[M, E] tokens of the prompts, as far as layers were computed."""
        counts = run.prompt_counts if run.prompts else None
        if counts is not None and self._ends_early(self.load.unit_layers[-1]):
            counts[-1] = 0
        return counts

    def _ends_early(self, layer: int) -> bool:
        """Whether a prompt does not pass the experts of a layer."""
        return layer == self.load.layers - 1 and not self.system.order.whole

    def _prompt(self, prompt: Prompt) -> Process:
        """All of its tokens pass a layer before any passes the next."""
        lanes, begin = self.lanes, self.lanes.simulation.now
        yield lanes.python(self.hardware.token_s)
        for layer in range(self.load.layers):
            attend = self._attend(layer, prompt.tokens, prompt.tokens * self.load.kv_token)
            yield lanes.python(self.hardware.layer_s + 3 * self.hardware.dispatch_s)
            if (m := self._number.get(layer)) is not None and not self._ends_early(layer):
                yield attend
                yield from self._decide(prompt.counts[m])
                yield from self.passing.prompt_layer(m, prompt.counts[m], prompt.tokens)
        yield lanes.program("head", self.load.head, self.load.head_flops)
        self.tally.prompt_tokens += prompt.tokens
        self.tally.prompt_s += lanes.simulation.now - begin

    def _step(self, run: MixtureRun, step: int) -> Process:
        """One token in every row."""
        lanes, load, tally = self.lanes, self.load, self.tally
        begin, rows = lanes.simulation.now, int(run.rows[step])
        cached = rows * (run.context + step + 1) * load.kv_token
        yield lanes.python(self.hardware.token_s)
        for layer in range(load.layers):
            at, m = lanes.simulation.now, self._number.get(layer)
            attend = self._attend(layer, rows, cached)
            if self._whole:
                self._resident(m, run.steps[step])
                continue
            if m is not None and self.moves.asks(m):
                lanes.program("foretell", load.router, rows * load.router)
            yield lanes.python(self.hardware.layer_s + 3 * self.hardware.dispatch_s)
            if m is not None:
                yield attend
                yield from self._decide(run.steps[step, m])
                self._between_s = _mean(self._between_s, lanes.simulation.now - at)
                yield from self._experts(m, step, run.steps[step, m], rows)
        yield lanes.program("head", load.head, rows * load.head_flops)
        spent = lanes.simulation.now - begin
        tally.steps, tally.rows, tally.seconds = tally.steps + 1, tally.rows + rows, tally.seconds + spent
        tally.step_s.append(spent)

    def _resident(self, m: int | None, tokens: Ints) -> None:
        """A layer of a model that is all on the device; tokens [M, E]."""
        if m is None:
            return
        tally, live = self.tally, tokens[m][tokens[m] > 0]
        tally.found(tokens[m], self.planner.resident(m))
        self.lanes.experts("hot", live)
        tally.hot_pairs += int(live.sum())
        tally.device_s += float(self.lanes.sides.device_s(live).sum())

    def _attend(self, layer: int, tokens: int, cached: float) -> Work:
        """Attention and router, and behind them what every token computes."""
        load, lanes = self.load, self.lanes
        attend = lanes.program("attend", load.attend + cached, tokens * load.attend_flops)
        if load.always[layer]:
            lanes.program("always", load.always[layer], tokens * load.always_flops[layer])
        return attend

    def _decide(self, tokens: Ints) -> Process:
        """A layer's ids come to the host, and a plan is made if there is anything to decide."""
        yield self.lanes.hand_over()
        if self.moves.allowed:
            yield self.lanes.python(PLAN_S + PLAN_LIVE_S * np.count_nonzero(tokens))

    # --- the experts of a layer ---

    def _experts(self, m: int, step: int, tokens: Ints, rows: int) -> Process:
        """Both sides of a layer."""
        self.moves.land(m)
        if self.passing.offloads(rows):
            self.tally.found(tokens, self.planner.resident(m))
            yield from self.passing.layer(m, tokens, "fetch-all", self.estimator.costs(), self.tally)
            return
        done, order = self._planned(m, step, tokens), self.system.order
        plan = done.plan
        moves = self.moves.send(m, plan.units, plan.slots, "fetched")
        if len(plan.hot):
            self.lanes.experts("hot", tokens[plan.hot])
        if len(plan.cold):
            done.cold = self.lanes.cold(tokens[plan.cold])
        if order.pipelined:
            self.lanes.simulation.start(self._fetched(done, moves))
        if order.early:
            self._observe(done)
            self.lanes.simulation.start(self._ahead_early(done, moves))
        if done.cold is not None:
            yield done.cold
        if not order.pipelined:
            yield from self._fetched(done, moves)
        yield done.dispatched
        self._account(done)
        if not order.early:
            self._observe(done)
            self.moves.ahead(m, step, None)

    def _planned(self, m: int, step: int, tokens: Ints) -> _Step:
        """The planner's decision, and the books of what it found."""
        planner, costs, tally = self.planner, self.estimator.costs(), self.tally
        resident, now = planner.resident(m), self.lanes.simulation.now
        tally.found(tokens, resident)
        self.moves.look_back(m, step, tokens, resident)
        busy_s = self.moves.unfinished * costs.copy_s
        room = None if self.moves.allowed else 0
        transit = len(tokens) if self.system.transit is None else self.system.transit
        transit = transit if self.moves.allowed else 0
        plan = planner.plan_step(m, tokens, costs, room=room, transit=transit, copy_busy_s=busy_s)
        if self.on_plan is not None:
            self.on_plan(m, plan)
        tally.judge(plan, costs)
        return _Step(m, step, tokens, plan, now + float(makespan(plan.work, plan.on_gpu, costs)))

    def _fetched(self, done: _Step, moves: Sequence[Move]) -> Process:
        """Each expert is computed as soon as it is there."""
        for move in moves:
            yield move.work
            self.lanes.experts("fetched", done.tokens[[move.unit]])
        self.lanes.simulation.tell(done.dispatched)

    def _ahead_early(self, done: _Step, moves: Sequence[Move]) -> Process:
        """Once the link is idle, if that is before the layer ends: as much as arrives before the next one plans."""
        for move in moves:
            yield move.work
        self.moves.ahead(done.layer, done.number, done.ends_s + self._between_s - self.lanes.simulation.now)

    def _observe(self, done: _Step) -> None:
        self.planner.observe(done.layer, done.tokens)
        if self.moves.told is not None:
            self.moves.told.observe(done.layer, done.tokens)

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
        if len(plan.hot) and tally.steps % TIMED_EVERY == 0:
            spent = float(sides.device_s(tokens[plan.hot]).sum()) + self.lanes.launch_s
            self.estimator.observe("gpu", len(plan.hot), int(tokens[plan.hot].sum()), spent)


def _mean(old: float, new: float) -> float:
    return KEPT * old + (1 - KEPT) * new if old else new
