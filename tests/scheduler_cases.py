"""A scheduler among fakes: a planner and a transfer that write down what they are asked, wait, fail or hang."""

import threading
import time
from collections.abc import Callable, Generator
from types import SimpleNamespace

import numpy as np

from dynajax.plan import LayerPlan
from dynajax.policy.costs import CostEstimator, Costs
from dynajax.programs.bodies import LIVE
from dynajax.scheduler import Ran, Scheduler, Sizes

COSTS = Costs(t0_s=1e-6, t_gather_s=1e-6, t_trans_s=1e-6, t_gpu_s=1e-6, t_cpu_s=1e-6, t_sync_s=1e-6)
LAYERS, FFN, UNIT_BYTES = 3, 12, 100
ROW, NOTHING = np.ones(1, np.bool_), np.zeros(0, np.int32)
SOON = 20.0  # seconds that no test should ever need


def plan_of(units=(), slots=(), theta=128) -> LayerPlan:
    ids = np.array(units, np.int32), np.array(slots, np.int32)
    return LayerPlan(*ids, np.uint8(theta), np.uint8(theta - 1), np.uint8(theta + 1), 0, 0)


class Planner:
    """Writes down what it is asked, plans what it is told, and waits, fails or hangs on demand."""

    def __init__(self):
        self.events, self.plans, self.fault = [], {}, None
        self.gate = threading.Event()  # closed: the thread stands in `plan` of layer 0
        self.gate.set()
        self.entered = threading.Event()

    def plan(self, layer, scores, window_units, costs):
        if layer == 0:
            self.entered.set()
            assert self.gate.wait(SOON)
        if self.fault is not None:
            raise self.fault
        self.events.append(("plan", layer, None if scores is None else scores.tolist()))
        return self.plans.get(layer, plan_of())

    def applied(self, layer, plan):
        self.events.append(("applied", layer, plan.units.tolist()))

    def observe(self, layer, live):
        self.events.append(("observe", layer, np.flatnonzero(live).tolist()))

    def start_sequence(self, counts, tokens):
        self.events.append(("start", counts, tokens))


class Mover:
    """A transfer that moves nothing, which takes a moment: who does not wait for it comes too early."""

    count = 8

    def __init__(self, events):
        self.events, self.closed, self.fault = events, 0, None

    def load(self, layer, units):
        if self.fault is not None:
            raise self.fault
        time.sleep(2e-3)
        self.events.append(("load", layer, units.tolist()))
        return SimpleNamespace(gather_s=2e-3 * len(units), transfer_s=3e-3 * len(units) + 1e-6)

    def apply(self, layer, block, units, slots):
        self.events.append(("apply", units.tolist(), slots.tolist()))

    def close(self):
        self.closed += 1


class Made:
    """A scheduler of fakes."""

    def __init__(self, live_mark=LIVE, **options):
        self.planner, self.told = Planner(), []
        self.transfer = Mover(self.planner.events)
        options = {"on_ran": lambda ran, marks: self.told.append((ran, marks)), **options}
        sizes = Sizes(layers=LAYERS, units=FFN, unit_bytes=UNIT_BYTES, live_mark=live_mark)
        self.scheduler = Scheduler(self.planner, self.transfer, CostEstimator(COSTS), sizes, **options)

    def stop_at_the_gate(self) -> None:
        """From now on the thread stands, at the head of a plan for layer 0."""
        self.planner.gate.clear()
        self.planner.entered.clear()
        self.scheduler.request(0, None, ROW)
        assert self.planner.entered.wait(SOON)

    @property
    def names(self) -> list:
        return [event[:2] for event in self.planner.events]


def schedulers() -> Generator[Callable[..., Made]]:
    """For a fixture: make(**options) -> Made. All are closed at the end, and no thread is left."""
    made: list[Made] = []

    def make(**options) -> Made:
        made.append(Made(**options))
        return made[-1]

    yield make
    for each in made:
        each.planner.gate.set()
        each.scheduler.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dynajax-scheduler"]


def ran(layer, **changes) -> Ran:
    base = {"layer": layer, "rows": ROW, "bucket": NOTHING, "marks": None, "cold_units": NOTHING}
    return Ran(**base | {"cold_live": np.zeros((1, 0), np.uint8)} | changes)
