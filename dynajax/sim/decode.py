"""Decoding in threads mode, in simulated time: the engine's planner and cost estimates, its order of work, its waits.

main       dispatch attend(i), score | plan in time? dispatch hot(i) | cold(i) | next layer
device              attend(i) score(i) score(i + lead)  hot(i)
scheduler                    plan(i + lead): gather, transfer, update      | books of layer i
host                                                              cold(i)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.config import PolicyConfig
from dynajax.plan import LayerPlan, Placement
from dynajax.policy.costs import LOW_S, CostEstimator, CostName, Costs
from dynajax.policy.planner import NeuronPlanner
from dynajax.sim.activity import Activity, Run
from dynajax.sim.events import Process, Signal, Simulation, Work
from dynajax.sim.hardware import PROGRAMS, Hardware
from dynajax.sim.records import Load, System, Tally

PATIENCE, SHORTEST_WAIT_S, KEPT = 0.25, 1e-4, 0.9  # as engine/planned.py waits for plans
UPDATE = "update"
MOST_BACKLOG = 4  # tasks a layer that may wait for the scheduler after a token, as in the engine
Bools = npt.NDArray[np.bool_]
OnPlan = Callable[[int, LayerPlan], None]


@dataclass(slots=True, eq=False)
class _Layer:
    """What a layer does for a token. Masks [F] of the activity's neurons."""

    layer: int
    slots: int
    live: Bools
    there: Bools  # computed on the device
    here: Bools  # on the host
    hot: Work | None = None
    cold: Work | None = None

    @property
    def on_device(self) -> int:
        return int(np.count_nonzero(self.there))

    @property
    def on_host(self) -> int:
        return int(np.count_nonzero(self.here))


@dataclass(slots=True)
class _Token:
    """The layers that have run."""

    layers: list[_Layer] = field(default_factory=list)

    @property
    def hot_s(self) -> float:
        return sum(done.hot.seconds for done in self.layers if done.hot is not None)

    @property
    def cold_s(self) -> float:
        return sum(done.cold.seconds for done in self.layers if done.cold is not None)

    @property
    def on_host(self) -> int:
        return sum(done.on_host for done in self.layers)


@dataclass(slots=True, eq=False)
class _Answer:
    """To a request: the plan, once it is carried out."""

    signal: Signal = field(default_factory=Signal)
    plan: LayerPlan | None = None


def first_costs(load: Load, hardware: Hardware, system: System, stride: int) -> Costs:
    """What a planner goes by before it has seen anything, for a neuron that stands for `stride`."""
    host_unit, alone = load.host_unit * stride, system.copies == "units"
    return Costs(
        t0_s=hardware.t0_s,
        t_gather_s=LOW_S if alone else host_unit / hardware.gather_bps,
        t_trans_s=host_unit / hardware.link_bps + (hardware.t0_s * stride if alone else 0.0),
        t_gpu_s=load.unit * stride / hardware.device_bps,
        t_cpu_s=host_unit / hardware.host_rate(load.dtype),
        t_sync_s=hardware.sync_s + hardware.call_s,
    )


def decode(
    load: Load,
    hardware: Hardware,
    system: System,
    activity: Activity,
    placement: Placement,
    *,
    costs: Costs | None = None,  # that never change; None: learned, as the engine does
    on_plan: OnPlan | None = None,
) -> Tally:
    """All runs of the activity, one after the other; pools go on as they are."""
    simulated = _Decoding(load, hardware, system, activity, placement, costs)
    simulated.on_plan = on_plan
    simulated.simulation.start(simulated.main())
    simulated.simulation.start(simulated.scheduler())
    simulated.simulation.run()
    simulated.planner.check()
    simulated.tally.busy_s = simulated.simulation.busy_s
    return simulated.tally


def drawn_config(config: PolicyConfig, stride: int) -> PolicyConfig:
    """The constants for neurons that stand for `stride` each."""
    if config.window_units is None or stride == 1:
        return config
    return replace(config, window_units=config.window_units // stride)


class _Decoding:
    """The processes of `decode`, and what they share."""

    def __init__(
        self,
        load: Load,
        hardware: Hardware,
        system: System,
        activity: Activity,
        placement: Placement,
        costs: Costs | None,
    ) -> None:
        self.load, self.hardware, self.system, self.activity = load, hardware, system, activity
        capacity = {"memory": hardware.host_bps, "cores": float(hardware.cores), "interpreter": 1.0}
        self.simulation = Simulation(capacity)
        config = drawn_config(system.config, activity.stride)
        self.planner = NeuronPlanner(placement, activity.frequency, system.policy, config, activity.mass)
        known = costs or first_costs(load, hardware, system, activity.stride)
        self.estimator, self.learns = CostEstimator(known, system.config.safety), costs is None
        self.tally, self.on_plan = Tally(), None
        self._moves = system.policy not in ("static", "none") and any(placement.slots)
        self._lead = min(system.config.lead, load.layers - 1)
        self._theta = int(np.rint(system.config.theta * 255))
        self._inbox: deque[Process] = deque()
        self._news, self._progress, self._closed = Signal(), Signal(), False
        self._asked: list[_Answer | None] = [None] * load.layers  # the newest, until it was used
        self._newest = list(self._asked)
        self._layer_s = 0.0
        self._token = _Token()
        self._rate = hardware.host_rate(load.dtype)
        self._resident = np.zeros(activity.shape, np.bool_)  # as of the layer's last run
        self._own = {"cores": 1.0, "interpreter": 1.0}
        self._programs = {kind: hardware.program(kind) for kind in (*PROGRAMS, UPDATE)}

    # --- the main thread ---

    def main(self) -> Process:
        """Every token of every run."""
        for run in self.activity.runs:
            self._tell(self._start(run))
            yield from self._settle(0)
            self._asked = [None] * self.load.layers
            for token in range(run.tokens):
                begin, self._token = self.simulation.now, _Token()
                yield self._python("main", self.hardware.token_s)
                for layer in range(self.load.layers):
                    yield from self._layer(run, token, layer)
                yield self._device("head", self.load.head)
                self._end_token(self.simulation.now - begin)
                yield from self._settle(MOST_BACKLOG * self.load.layers)
        self._closed = True
        self.simulation.tell(self._news)

    def _layer(self, run: Run, token: int, layer: int) -> Process:
        """Both halves of a layer."""
        load, hardware, system = self.load, self.hardware, self.system
        context = load.prefix(run.prompt_tokens + token + 1, bucketed=system.bucketed)
        yield self._python("main", hardware.layer_s + hardware.dispatch_s * (2 + load.scores))
        known = attend = self._device("attend", load.attention + context * load.kv_token)
        for _ in range(load.scores):
            known = self._device("rank" if load.ranks else "score", load.score / load.scores)
        plan = None
        if self._moves:
            self._request(run, token, (layer + self._lead) % load.layers, known)
            plan = yield from self._wait(layer)
        done = self._split(run, token, layer, plan)
        done.hot = self._hot(done)
        yield known if system.skips else attend
        yield self.simulation.give("hand-over", "h", hardware.sync_s * system.merges)
        done.cold = self._cold(done)
        if done.cold is not None:
            yield done.cold
        self._token.layers.append(done)
        self._tell(self._observe(done))

    def _split(self, run: Run, token: int, layer: int, plan: LayerPlan | None) -> _Layer:
        """Who computes what: every neuron that reaches the threshold of its side, once."""
        resident, live = self._resident[layer], run.live[token, layer]
        resident[:] = False
        bucket = self.planner.bucket(layer)
        resident[bucket] = True
        if not self.system.skips or run.skip is None:
            there, here = resident.copy(), ~resident
        else:
            scores = run.skip[token, layer]
            theta_g = theta_c = np.uint8(self._theta)
            if plan is not None and plan.theta == theta_g:
                theta_g, theta_c = plan.theta_g, plan.theta_c
            there, here = resident & (scores >= theta_g), ~resident & (scores >= theta_c)
        tally = self.tally
        tally.live += int(np.count_nonzero(live))
        tally.hot_live += int(np.count_nonzero(live & resident))
        return _Layer(layer, len(bucket), live, there, here)

    def _hot(self, done: _Layer) -> Work | None:
        """The device's half."""
        if not done.slots:
            return None
        rows = self.system.device_reads == "rows"
        count = done.on_device if rows else done.slots
        size = count * self.load.unit * self.activity.stride
        return self._device("hot", size, self.system.rows_s if rows else 0.0)

    def _cold(self, done: _Layer) -> Work | None:
        """The host's half."""
        if not done.on_host:
            return None
        rows = done.on_host * self.load.parts
        if self.system.gate_first:
            rows = done.on_host + int(np.count_nonzero(done.live & done.here)) * (self.load.parts - 1)
        size = rows * self.load.host_unit * self.activity.stride / self.load.parts
        asks = {"memory": self._rate, "cores": float(self.hardware.cores)}
        return self.simulation.give("host", "cold", self.hardware.call_s, size / self._rate, asks)

    def _wait(self, layer: int) -> Generator[Any, bool, LayerPlan | None]:
        """The plan that was asked for last, carried out; None: there is none, or it is late."""
        answer, self._asked[layer] = self._asked[layer], None
        if answer is None:
            return None
        limit_s = max(SHORTEST_WAIT_S, PATIENCE * self._layer_s)
        came = yield answer.signal if self.system.waits else (answer.signal, limit_s)
        self.tally.late += not came
        return answer.plan if came else None

    def _end_token(self, spent_s: float) -> None:
        """Everything of the token has run."""
        token, tally = self._token, self.tally
        layer_s = spent_s / self.load.layers
        self._layer_s = KEPT * self._layer_s + (1 - KEPT) * layer_s if self._layer_s else layer_s
        hot_s, cold_s = token.hot_s, token.cold_s
        tally.tokens += 1
        tally.seconds += spent_s
        tally.token_s.append(spent_s)
        tally.hot_s += hot_s
        tally.cold_s += cold_s
        for done in token.layers:
            tally.on_device += done.on_device
            tally.on_host += done.on_host
            tally.missed += int(np.count_nonzero(done.live & ~done.there & ~done.here))
        if self.learns:
            rows = self.system.device_reads == "rows"
            device = sum(done.on_device if rows else done.slots for done in token.layers)
            for name, count, seconds in (("t_gpu_s", device, hot_s), ("t_cpu_s", token.on_host, cold_s)):
                if count:
                    self._tell(self._learn(name, count, seconds))

    # --- the scheduler's thread ---

    def scheduler(self) -> Process:
        """What it was told, in that order."""
        while not self._closed:
            if self._inbox:
                yield from self._inbox[0]
                self._inbox.popleft()
                self.simulation.tell(self._progress)
            else:
                self._news = Signal()
                yield self._news

    def _settle(self, left: int) -> Process:
        """Wait until at most `left` tasks are open."""
        while len(self._inbox) > left:
            self._progress = Signal()
            yield self._progress

    def _tell(self, task: Process) -> None:
        self._inbox.append(task)
        self.simulation.tell(self._news)

    def _start(self, run: Run) -> Process:
        self.planner.start_sequence(run.prompt_counts, run.prompt_tokens)
        return
        yield

    def _learn(self, name: CostName, count: float, seconds: float) -> Process:
        self.estimator.observe(name, count, seconds)
        return
        yield

    def _observe(self, done: _Layer) -> Process:
        """The books of a layer that has run."""
        if self._moves:
            yield self._python("scheduler", self.hardware.plan_s / 2)
            self.planner.observe(done.layer, done.live & (done.there | done.here))

    def _request(self, run: Run, token: int, layer: int, known: Work) -> None:
        answer = self._asked[layer] = self._newest[layer] = _Answer()
        scores = run.place[token, layer] if run.place is not None and run.placed[token, layer] else None
        self._tell(self._plan(layer, scores, known, answer))

    def _plan(self, layer: int, scores: npt.NDArray[np.uint8] | None, known: Work, answer: _Answer) -> Process:
        """Swaps and thresholds, and the swaps carried out."""
        hardware = self.hardware
        if self.learns and self._newest[layer] is not answer:  # nobody needs this one any more
            return
        yield known
        spent_s = hardware.plan_s + self.load.neurons * hardware.plan_unit_s
        yield self._python("scheduler", spent_s + (hardware.balance_s if self.system.policy == "dynamic" else 0.0))
        plan = self.planner.plan(layer, scores, None, self.estimator.costs())
        if self.on_plan is not None:
            self.on_plan(layer, plan)
        if len(plan.units):
            yield from self._move(len(plan.units))
            self.planner.applied(layer, plan)
            self.tally.migrated += len(plan.units)
        answer.plan = plan
        self.simulation.tell(answer.signal)

    def _move(self, units: int) -> Process:
        """Gather, transfer, update."""
        hardware, simulation = self.hardware, self.simulation
        count = units * self.activity.stride
        alone = self.system.copies == "units"
        pieces = count if alone else -(-count // self.load.piece)
        size = count * self.load.host_unit
        if not alone:
            lane = "host" if self.system.one_pool else "gather"
            asks = {"memory": 2 * hardware.gather_bps, "cores": 1.0}
            gather = simulation.give(lane, "gather", pieces * hardware.call_s, size / hardware.gather_bps, asks)
            yield gather
            self._saw("t_gather_s", units, gather.seconds)
        asks = {"memory": hardware.link_bps * (2 if hardware.shared else 1)}  # the device's memory may be the same
        if hardware.shared and hardware.link_bps > hardware.host_bps:  # nothing is copied
            asks = {}
        link = simulation.give("link", "transfer", pieces * hardware.t0_s, size / hardware.link_bps, asks)
        yield link
        costs = self.estimator.costs()
        if units == 1:
            self._saw("t0_s", 1, max(0.0, link.seconds - costs.t_trans_s))
        else:
            starts = 1 if alone else pieces  # a neuron's own copy has its start in t_trans_s
            self._saw("t_trans_s", units, max(0.0, link.seconds - starts * costs.t0_s))
        if not alone:  # else they went straight to their slots
            yield self._python("scheduler", pieces * hardware.dispatch_s)
            self._device(UPDATE, 2 * count * self.load.unit, (pieces - 1) * hardware.launch_s)

    def _saw(self, name: CostName, quantity: float, seconds: float) -> None:
        if self.learns:
            self.estimator.observe(name, quantity, seconds)

    # --- works ---

    def _device(self, kind: str, size: float, fixed_s: float = 0.0) -> Work:
        """A program that reads `size` bytes."""
        seconds, asks = self._programs[kind].at(size), {}
        if self.hardware.shared:
            asks = {"memory": size / seconds, "cores": float(self.hardware.cores)}
        return self.simulation.give("device", kind, fixed_s, seconds, asks)

    def _python(self, lane: str, seconds: float) -> Work:
        return self.simulation.give(lane, "python", 0.0, seconds, self._own)
