"""Recordings of mixtures: what they hold is where tokens went and where experts were, they change no answer, and the
simulator makes the engine's plans of them."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import read_spec
from dynajax.config import EngineConfig, PolicyConfig
from dynajax.engine import plan_for
from dynajax.engine.mixture.planning import buffers_of
from dynajax.errors import UsageError
from dynajax.plan import Placement
from dynajax.policy.experts.config import expert_config
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.presets import expert_policy
from dynajax.policy.experts.records import ExpertCosts
from dynajax.routing_trace import RoutingTrace, read_routing, weighed
from dynajax.sim.experts.activity import from_routing
from dynajax.sim.experts.decode import simulate
from dynajax.sim.experts.shapes import MixtureWeights
from dynajax.sim.experts.systems import MixtureSystem, as_engine
from dynajax.sim.hardware import load_hardware
from dynajax.trace import DECODE, PREFILL, Recorder
from predictors.routing import expected_tokens
from tests.engine.mixture.zoo import FAMILIES, TOKENS, folder_unit_bytes

PROMPT, NEW, CTX = TOKENS[:20].tolist(), 6, 144
FAMILY = "qwen3_moe"
BATCH = [[PROMPT, PROMPT[5:14]], [PROMPT[:1]], [PROMPT[3:9]]]


@contextmanager
def opened(folder: Path, share: float, **settings):
    """An open engine with that share of the experts on the device."""
    settings = {"ctx": CTX, **settings}
    plan = plan_for(str(folder), EngineConfig(**{"vram_budget": "64GiB", "policy": "none", **settings}))
    budget = plan.smallest_budget_bytes + int(share * plan.units_total + 3) * folder_unit_bytes(folder)
    with Engine.from_pretrained(str(folder), vram_budget=budget, **settings) as engine:
        yield engine


def record(engine: Engine, path: Path, prompts) -> tuple[RoutingTrace, list]:
    recorder = Recorder()
    engine.record(recorder)
    results = [engine.generate(list(several), max_new_tokens=NEW) for several in prompts]
    engine.record(None)
    recorder.write(path / "run.npz")
    return read_routing(path / "run.npz", engine._parts.fingerprint), results


def truth(folder: Path, ids) -> np.ndarray:
    """[T, M, E] by observing an engine that reads the ids as a prompt."""
    seen = {}
    with Engine.from_pretrained(str(folder), ctx=CTX) as engine:
        engine.observe(lambda layer, hidden, live: seen.setdefault(layer, live))
        engine.generate([*ids, 5], max_new_tokens=0)
    return np.stack([seen[layer] for layer in sorted(seen)], axis=1)


def live_of(trace: RoutingTrace) -> np.ndarray:
    """[T, M, E]."""
    live = np.zeros((*trace.experts.shape[:2], trace.head.width), np.bool_)
    np.put_along_axis(live, trace.experts.astype(np.int64), True, axis=2)
    return live


@pytest.mark.parametrize("settings", [{"policy": "scan", "deterministic": True}, {"policy": "static"}])
def test_what_is_recorded_is_where_tokens_went(zoo, tmp_path, settings):
    folder = zoo.folder(FAMILY)
    with opened(folder, 0.4, **settings) as engine:
        plain = engine.generate([PROMPT], max_new_tokens=NEW)
    with opened(folder, 0.4, **settings) as engine:
        trace, (results,) = record(engine, tmp_path, [[PROMPT]])
        parts, planned = engine._parts, engine._parts.mixture is not None
        assert parts.layers.watch is None and parts.stepper.on_tokens is None and parts.recorder is None
        assert not planned or parts.runner.on_step is None
        slots = parts.pool.slots
    assert results[0].token_ids == plain[0].token_ids
    given = [*PROMPT, *results[0].token_ids[:-1]]
    assert trace.token_pos.tolist() == list(range(len(given)))
    assert trace.phase.tolist() == [PREFILL] * (len(PROMPT) - 1) + [DECODE] * NEW
    assert trace.step.tolist() == [0] * (len(PROMPT) - 1) + list(range(1, NEW + 1))
    expected = truth(folder, given)
    assert (live_of(trace) != expected).mean() < 1e-3  # the order of summation may differ
    assert np.array_equal(trace.workload()[1:], live_of(trace)[len(PROMPT) - 1 :])
    resident = np.stack([trace.resident_of(m) for m in range(trace.head.layers)], axis=1)
    assert (resident[0].sum(axis=1) == slots).all() and tuple(trace.slots) == slots
    steps = trace.workload()[1:]
    if planned:  # else decoding in one program counts, and it does not run while somebody looks on
        assert results[0].units.hot_share == pytest.approx(steps[resident[1:]].sum() / steps.sum())
    assert (trace.costs is not None) == planned and (len(trace.moves) > 0) == planned
    assert trace.head.settings["policy"] == settings["policy"] and trace.predicted is None


def test_rows_of_a_batch_share_a_step(zoo, tmp_path):
    with opened(zoo.folder(FAMILY), 0.4, policy="scan", batch=2) as engine:
        trace, _ = record(engine, tmp_path, BATCH[:1])
    decoded = trace.phase == DECODE
    assert trace.row[decoded].tolist() == [0, 1] * NEW
    assert trace.step[decoded].tolist() == [2 + i // 2 for i in range(2 * NEW)]
    assert trace.row[~decoded].tolist() == [0] * 19 + [1] * 8


def test_what_the_engine_foretells_is_recorded(zoo, tmp_path):
    settings = {"policy": "scan", "prefetch": "gate", "set": {"record_scores": True}, "batch": 2}
    with opened(zoo.folder(FAMILY), 0.4, deterministic=True, **settings) as engine:
        trace, _ = record(engine, tmp_path, BATCH[1:])
        books = engine._parts.runner.moves.books
    assert (trace.predicted[:, 0] == trace.head.width).all() and (trace.predicted[:, 1:] < trace.head.width).all()
    last = (trace.generation == 2) & (trace.phase == DECODE)
    hits = (trace.predicted[last][..., None] == trace.experts[last][:, :, None]).any(axis=3)
    assert hits.sum(axis=(0, 2)).tolist() == books.foretold_hits.tolist()


def test_other_observers_and_recorders_are_refused(zoo):
    with opened(zoo.folder(FAMILY), 0.4, policy="scan") as engine:
        recorder = Recorder()
        engine.observe(lambda *_: None)
        with pytest.raises(UsageError, match="observes this engine"):
            engine.record(recorder)
        engine.observe(None)
        engine.record(recorder)
        with pytest.raises(UsageError, match="is recorded"):
            engine.observe(None)
        engine.score(PROMPT)
        assert recorder.tokens == 0
        engine.generate(PROMPT, max_new_tokens=2)
        assert recorder.tokens == len(PROMPT) + 1
    assert recorder.taken.costs is not None  # closing the engine ended it


def test_recording_goes_on_after_a_failure(zoo, tmp_path, monkeypatch):
    recorder, plan, calls = Recorder(), ExpertPlanner.plan_step, []

    def fail_later(*args, **settings):
        calls.append(args)
        if len(calls) > 4:  # in the middle of a token
            raise OSError("the disk is on fire")
        return plan(*args, **settings)

    with opened(zoo.folder(FAMILY), 0.4, policy="scan", deterministic=True) as engine:
        engine.record(recorder)
        with monkeypatch.context() as patch:
            patch.setattr(ExpertPlanner, "plan_step", fail_later)
            with pytest.raises(OSError, match="on fire"):
                engine.generate(PROMPT, max_new_tokens=3)
        engine.generate(PROMPT, max_new_tokens=3)
    recorder.write(tmp_path / "run.npz")
    trace = read_routing(tmp_path / "run.npz")
    tokens = np.bincount(trace.generation).tolist()
    assert tokens[2] == len(PROMPT) + 2 and len(PROMPT) - 1 <= tokens[1] < len(PROMPT) + 2
    resident = trace.resident_of(0)
    assert (resident.sum(axis=1) == trace.slots[0]).all()


# --- equal trace, equal plans ---

POLICIES = ("scan", "dali", "lru", "hybrimoe", "bandwidth-split", "auto")


def planned_by(patch: pytest.MonkeyPatch) -> list[tuple]:
    """From now on the plans of every planner are kept: layer, on the device, units, slots."""
    plan, kept = ExpertPlanner.plan_step, []

    def keep(self, layer, *args, **settings):
        made = plan(self, layer, *args, **settings)
        kept.append((layer, made.hot.tolist(), made.units.tolist(), made.slots.tolist()))
        return made

    patch.setattr(ExpertPlanner, "plan_step", keep)
    return kept


def simulated(trace: RoutingTrace, spec, frequency: np.ndarray) -> list[tuple]:
    """The plans of a simulated run on a machine whose link takes no time: the engine waits for every move."""
    told, made = trace.head.settings, []
    buckets = tuple(trace.start[m, : trace.slots[m]] for m in range(trace.head.layers))
    policy = expert_policy("scan", **{part: told[part] for part in ("assign", "cache", "prefetch", "placement")})
    config = expert_config(PolicyConfig(**told["knobs"]))
    system = as_engine(MixtureSystem(policy=policy, config=config, lead=told["lead"]), spec)
    machine = replace(load_hardware("dali-pc"), link_bps=1e18, t0_s=1e-15)
    load = MixtureWeights(spec=spec, dtype="float32", host_dtype="float32").mixture_load()
    simulate(
        load,
        machine,
        system,
        replace(from_routing(trace, "run"), frequency=frequency),
        Placement(buckets, trace.head.width),
        costs=ExpertCosts(**trace.costs),
        on_plan=lambda m, plan: made.append((m, plan.hot.tolist(), plan.units.tolist(), plan.slots.tolist())),
    )
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulator_makes_the_engines_plans(zoo, tmp_path, policy):
    prefetch = "gate" if policy in ("auto", "dali") else "auto"
    settings = {"policy": "scan" if policy == "auto" else policy, "prefetch": prefetch, "batch": 2}
    scores = {"record_scores": True, "move_price": 0.0, "prefetch_price": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        plans = planned_by(patch)
        with opened(zoo.folder(FAMILY), 0.4, deterministic=True, set=scores, **settings) as engine:
            trace, _ = record(engine, tmp_path, BATCH)
            spec, books = engine._parts.prepared.spec, engine._parts.runner.moves.books
            frequency = engine._parts.mixture.frequency
    assert (books.fetched + books.swapped + books.prefetched + books.passed).sum() > 0
    made = simulated(trace, spec, frequency)
    assert len(made) == 3 * NEW * trace.head.layers and made == plans
    other = replace(trace, experts=(trace.experts + 1) % trace.head.width)
    assert simulated(other, spec, frequency) != plans  # the comparison can fail


@pytest.mark.parametrize("family", FAMILIES)
def test_the_simulator_has_the_engines_buffers(zoo, family):
    spec = read_spec(zoo.folder(family))
    for layers in (spec.unit_layers, tuple(range(100))):
        other = replace(spec, layers=100, experts=replace(spec.experts, layers=layers))
        assert as_engine(MixtureSystem(policy=expert_policy("scan")), other).transit == buffers_of(other)


def test_the_simulator_weighs_choices_as_the_engine_does():
    ids = np.array([[[3, 1, 2]], [[1, 0, 4]]])
    told = weighed(ids, np.zeros(2, np.int32), 1, 5)[0, 0]
    assert told == pytest.approx(expected_tokens(ids[:, 0], 5)) and told[3] == 1
