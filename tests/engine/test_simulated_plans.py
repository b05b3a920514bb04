"""Equal trace, equal plans: the simulator drives the planner as the engine does."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.config import PolicyConfig
from dynajax.plan import Placement
from dynajax.policy.costs import Costs
from dynajax.sim.activity import from_trace
from dynajax.sim.decode import decode
from dynajax.sim.hardware import load_hardware
from dynajax.sim.models import Weights
from dynajax.sim.records import System
from dynajax.trace import Recorder, read_trace
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import FORCED, MOVING, opened, watch_plans

SCORES = FORCED | {"record_scores": True}
RUNS = [[PROMPT], [PROMPT[3:9]]]


@pytest.fixture(scope="module")
def recorded(models, tmp_path_factory):
    """Of a policy and a sparsity: the trace of an engine, the statistics it went by, and its plans."""
    found = {}

    def of(policy: str, sparsity: str = "exact"):
        if (policy, sparsity) not in found:
            path = tmp_path_factory.mktemp("trace") / "run.npz"
            with opened(models["relu"], policy=policy, sparsity=sparsity, set=SCORES) as engine:
                with pytest.MonkeyPatch.context() as patch:
                    plans, recorder = watch_plans(engine._parts, patch), Recorder()
                    engine.record(recorder)
                    for prompts in RUNS:
                        engine.generate(list(prompts), max_new_tokens=10)
                    engine.record(None)
                statistics = engine._parts.plans.statistics
            recorder.write(path)
            found[policy, sparsity] = read_trace(path), statistics, plans
        return found[policy, sparsity]

    return of


def simulated(trace, statistics, policy: str) -> list[tuple]:
    """The plans that a simulated run of a recording makes, on a machine that the engine never saw."""
    layers, made = trace.head.layers, []
    buckets = tuple(np.flatnonzero(trace.resident_of(layer)[0]).astype(np.int32) for layer in range(layers))
    activity = replace(from_trace(trace, "run"), frequency=statistics.frequency, mass=statistics.mass)
    weights = Weights(spec=SPECS["relu"], dtype="float16", host_dtype="float16")
    config = PolicyConfig(**trace.head.settings["knobs"])
    skips = trace.head.settings["sparsity"] == "predicted"
    system = System(policy=policy, config=config, skips=skips, waits=True)

    def keep(layer, plan):
        thetas = (int(plan.theta), int(plan.theta_g), int(plan.theta_c), plan.n_gpu, plan.n_cpu)
        made.append((layer, plan.units.tolist(), plan.slots.tolist(), *thetas))

    machine, placement = load_hardware("pc-high"), Placement(buckets, trace.head.width)
    decode(weights.load(0.0, 1), machine, system, activity, placement, costs=Costs(**trace.costs), on_plan=keep)
    return made


@pytest.mark.parametrize(("policy", "sparsity"), [*((name, "exact") for name in MOVING), ("dynamic", "predicted")])
def test_the_simulator_makes_the_engines_plans(recorded, policy, sparsity):
    trace, statistics, plans = recorded(policy, sparsity)
    made = simulated(trace, statistics, policy)
    assert sum(len(plan[1]) for plan in plans) > 50
    assert made == plans


def test_the_comparison_can_fail(recorded):
    trace, statistics, plans = recorded("dynamic")
    assert simulated(replace(trace, score=255 - trace.score), statistics, "dynamic") != plans
    assert simulated(trace, statistics, "macro") != plans


@pytest.mark.parametrize("policy", ["static", "none"])
def test_policies_that_move_nothing_plan_nothing(recorded, policy):
    trace, statistics, _ = recorded("dynamic")
    assert simulated(trace, statistics, policy) == []
