"""Timelines and recordings of a running engine: what they hold is what happened, and they change no answer."""

import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dynajax import Engine
from dynajax.config import PolicyConfig
from dynajax.engine.figures import promised_recall
from dynajax.errors import EngineError, UsageError
from dynajax.plan import Placement
from dynajax.policy.costs import Costs
from dynajax.policy.planner import NeuronPlanner
from dynajax.timeline import Timeline
from dynajax.trace import DECODE, PREFILL, Recorder, read_trace
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import FORCED, opened, watch_plans

NEW, LAYERS = 8, SPECS["relu"].layers
SCORES = FORCED | {"record_scores": True}


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dynajax-timeline"]


def spans_of(timeline: Timeline, lane: str) -> list[tuple[str, str, float, float]]:
    return [span for span in timeline.spans() if span[0] == lane]


# --- timelines ---


def test_a_planned_engine_shows_its_three_lanes(models):
    with opened(models["relu"], policy="dynamic", sparsity="predicted") as engine:
        plain = engine.generate(PROMPT[:1], max_new_tokens=NEW).token_ids
        engine._parts.plans.restart()
        timeline = Timeline()
        engine.trace(timeline)
        traced = engine.generate(PROMPT[:1], max_new_tokens=NEW)
        engine.trace(None)
        assert watchers() == [] and len(timeline.spans()) > 10 * NEW
        before = len(timeline.spans())
        engine.generate(PROMPT, max_new_tokens=2)
        assert len(timeline.spans()) == before
    assert traced.token_ids == plain
    assert traced.memory["peak_bytes"] <= traced.memory["budget_bytes"]
    names = [name for _, name, _, _ in spans_of(timeline, "device")]
    shown = ", ".join(names).split(", ")
    for layer in range(LAYERS):
        assert [shown.count(f"{kind} {layer}") for kind in ("attend", "hot")] == [NEW, NEW]
        assert shown.count(f"score {layer}") == (1 if layer == 0 else 2) * NEW  # to skip, and to place
        assert sum(name == f"cold {layer}" for _, name, _, _ in spans_of(timeline, "host")) <= NEW
    assert shown.count("head") == NEW and shown[-1] == "head"
    device, copy = spans_of(timeline, "device"), spans_of(timeline, "copy")
    assert all(first[3] <= second[2] for first, second in pairwise(device))
    assert all(begin <= end for _, _, begin, end in timeline.spans())
    assert {name.split()[0] for _, name, _, _ in copy} == {"gather", "transfer"}


def test_a_failed_step_ends_no_timeline(models, monkeypatch):
    with opened(models["relu"], policy="dynamic", sparsity="exact") as engine:
        timeline = Timeline()
        engine.trace(timeline)
        with monkeypatch.context() as patch:
            patch.setattr(NeuronPlanner, "plan", lambda *_: 1 / 0)
            with pytest.raises(EngineError):
                engine.generate(PROMPT, max_new_tokens=NEW)
        before = len(spans_of(timeline, "copy"))
        engine.generate(PROMPT, max_new_tokens=NEW)
        assert len(spans_of(timeline, "copy")) > before  # of the new scheduler
        assert len(watchers()) == 1
    assert watchers() == []


@pytest.mark.parametrize(("mode", "shown"), [("threads", "attend 0"), ("ffi", "token")])
def test_engines_without_plans_have_timelines_too(models, mode, shown):
    with opened(models["relu"], host_mode=mode, deterministic=False, set=()) as engine:
        timeline = Timeline()
        engine.trace(timeline)
        engine.generate(PROMPT, max_new_tokens=NEW)
    device = ", ".join(name for _, name, _, _ in spans_of(timeline, "device"))
    assert device.split(", ").count(shown) == NEW + (
        5 if mode == "threads" else 0
    )  # a prompt of 36 tokens has 5 chunks
    assert spans_of(timeline, "host") and spans_of(timeline, "copy") == []
    assert "hot 1" in device  # of the prompt


# --- recordings ---


def record(engine: Engine, path, prompts, **settings):
    """Generate each list of prompts while recording -> trace, results."""
    recorder = Recorder()
    engine.record(recorder)
    results = [engine.generate(list(several), **settings) for several in prompts]
    engine.record(None)
    recorder.write(path / "run.npz")
    return read_trace(path / "run.npz", engine._parts.fingerprint), results


def truth(folder, ids) -> np.ndarray:
    """[T, L, F] by observing an engine that reads the ids as a prompt."""
    seen = {}
    with Engine.from_pretrained(str(folder), ctx=256, host_mode="threads") as engine:
        engine.observe(lambda layer, hidden, live: seen.setdefault(layer, live))
        engine.generate([*ids, 5], max_new_tokens=0)
    return np.stack([seen[layer] for layer in range(LAYERS)], axis=1)


CASES = [
    ("relu", {"policy": "dynamic", "sparsity": "exact", "set": SCORES}),
    ("relu", {"policy": "static", "sparsity": "exact", "host_mode": "ffi", "deterministic": False, "set": ()}),
    ("relu", {"policy": "static", "sparsity": "exact", "host_mode": "threads", "deterministic": False, "set": ()}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_what_is_recorded_is_what_was_live(models, tmp_path, name, settings):
    with opened(models[name], **settings) as engine:
        plain = engine.generate(PROMPT, max_new_tokens=NEW)
    with opened(models[name], **settings) as engine:
        trace, (result,) = record(engine, tmp_path, [[PROMPT]], max_new_tokens=NEW)
        moving = engine._parts.plans is not None
    assert result[0].token_ids == plain.token_ids
    given = [*PROMPT, *result[0].token_ids[:-1]]
    assert trace.token_pos.tolist() == list(range(len(given)))
    assert trace.phase.tolist() == [PREFILL] * (len(PROMPT) - 1) + [DECODE] * NEW
    assert set(trace.row) == {0} and set(trace.generation) == {1}
    expected = truth(models[name], given)
    found = np.stack([trace.live_of(layer) for layer in range(LAYERS)], axis=1)
    assert (found != expected).mean() < 1e-3 and 0.2 < expected.mean() < 0.8  # the order of summation may differ
    resident = np.stack([trace.resident_of(layer) for layer in range(LAYERS)], axis=1)
    assert (resident.sum(axis=2) == engine_slots(resident)).all()
    decoded = trace.phase == DECODE
    assert result[0].units.hot_share == (found & resident)[decoded].sum() / found[decoded].sum()
    changes = (resident[1:] != resident[:-1]).any(axis=(1, 2))
    assert changes[: len(PROMPT) - 2].sum() == 0 and (changes.sum() >= NEW - 2) == moving
    assert (trace.score is not None) == moving and (trace.costs is not None) == moving


def engine_slots(resident: np.ndarray) -> np.ndarray:
    """[L] of the first token."""
    return resident[0].sum(axis=1)


def test_predicted_mode_records_what_was_skipped_too(models, tmp_path):
    settings = {"policy": "dynamic", "sparsity": "predicted", "set": FORCED}
    with opened(models["relu"], **settings) as engine:
        plain = engine.generate(PROMPT, max_new_tokens=NEW).token_ids
    with opened(models["relu"], **settings) as engine:
        trace, (result,) = record(engine, tmp_path, [[PROMPT]], max_new_tokens=NEW)
        books = engine._parts.plans.runner.ledger.books
        assert books.seen_rows.tolist() == [NEW] * LAYERS
        engine.generate(PROMPT, max_new_tokens=NEW)
        assert books is not engine._parts.plans.runner.ledger.books
        assert engine._parts.plans.runner.ledger.books.seen_rows.max() < NEW  # samples again
    assert result[0].token_ids == plain and trace.score is None
    live = np.stack([trace.live_of(layer) for layer in range(LAYERS)])[:, trace.phase == DECODE]
    assert live.sum() == books.seen_live.sum() > books.seen_computed.sum()


@pytest.mark.parametrize(
    ("policy", "sparsity"),
    [("dynamic", "predicted"), pytest.param("static", "dense", marks=pytest.mark.slow)],
)
def test_of_silu_the_wanted_neurons_are_recorded(models, tmp_path, policy, sparsity):
    with opened(models["silu"], policy=policy, sparsity=sparsity) as engine:
        trace, _ = record(engine, tmp_path, [[PROMPT]], max_new_tokens=2)
    assert set(trace.live_of(1).sum(axis=1)) == {48}


def replayed(trace, frequency, policy) -> list[tuple]:
    """The plans that a fresh planner makes of a recording: layer, units, slots."""
    settings, layers = trace.head.settings, trace.head.layers
    buckets = [np.flatnonzero(trace.resident_of(layer)[0]).astype(np.int32) for layer in range(layers)]
    placement = Placement(tuple(buckets), trace.head.width)
    planner = NeuronPlanner(placement, frequency, policy, PolicyConfig(**settings["knobs"]))
    costs, made = Costs(**trace.costs), []
    live = np.stack([trace.live_of(layer) for layer in range(layers)], axis=1)
    for generation in np.unique(trace.generation):
        mine = trace.generation == generation
        prompt = live[mine & (trace.phase == PREFILL)]
        planner.start_sequence(prompt.sum(axis=0) if len(prompt) else None, len(prompt))
        for step in np.unique(trace.step[mine & (trace.phase == DECODE)]):
            rows = np.flatnonzero(trace.step == step)
            for layer in range(layers):
                target = (layer + settings["lead"]) % layers
                scores = trace.score[rows, target] if trace.scored[rows[0], target] else None
                plan = planner.plan(target, scores, None, costs)
                planner.applied(target, plan)
                planner.observe(layer, live[rows, layer])
                made.append((target, plan.units.tolist(), plan.slots.tolist()))
    return made


@pytest.mark.parametrize("policy", ["dynamic", "lru"])
def test_a_replay_makes_the_engines_plans(models, tmp_path, monkeypatch, policy):
    with opened(models["relu"], policy=policy, sparsity="exact", batch=2, set=SCORES) as engine:
        plans = watch_plans(engine._parts, monkeypatch)
        given = [[PROMPT, PROMPT[5:20]], [PROMPT[:1]], [PROMPT[3:9]]]
        trace, results = record(engine, tmp_path, given, max_new_tokens=12)
        frequency = engine._parts.plans.statistics.frequency
    assert sum(result.units.migrated for (result, *_) in results) > 100
    made = replayed(trace, frequency, policy)
    assert made == [plan[:3] for plan in plans]
    other = replace(trace, score=255 - trace.score)
    assert replayed(other, frequency, policy) != made  # the comparison can fail


def test_recording_goes_on_after_a_failure(models, tmp_path, monkeypatch):
    recorder = Recorder()
    with opened(models["relu"], policy="dynamic", sparsity="exact", set=SCORES) as engine:
        engine.record(recorder)
        engine.generate(PROMPT, max_new_tokens=3)
        plan, calls = NeuronPlanner.plan, []

        def fail_later(*args):
            calls.append(args)
            if len(calls) > 4:  # in the middle of a token
                raise OSError("the disk is on fire")
            return plan(*args)

        with monkeypatch.context() as patch:
            patch.setattr(NeuronPlanner, "plan", fail_later)
            with pytest.raises(EngineError, match="on fire"):
                engine.generate(PROMPT, max_new_tokens=3)
        engine.generate(PROMPT, max_new_tokens=3)
    recorder.write(tmp_path / "run.npz")  # closing the engine ended it
    trace = read_trace(tmp_path / "run.npz")
    assert trace.costs is not None
    assert np.bincount(trace.generation).tolist()[1] == np.bincount(trace.generation).tolist()[3] == 39
    assert 36 <= np.bincount(trace.generation)[2] < 39


def test_scoring_is_not_recorded_and_two_observers_are_one_too_many(models):
    with opened(models["relu"], host_mode="ffi", deterministic=False, set=()) as engine:
        recorder = Recorder()
        engine.observe(lambda *_: None)
        with pytest.raises(UsageError, match="observes this engine"):
            engine.record(recorder)
        engine.observe(None)
        engine.record(recorder)
        with pytest.raises(UsageError, match="is recorded"):
            engine.observe(None)
        engine.score(list(PROMPT))
        assert recorder.tokens == 0
        engine.record(None)
        engine.observe(lambda *_: None)
        with pytest.raises(UsageError, match="nothing was recorded"):
            Recorder().write(None)


@pytest.mark.slow
def test_a_silu_model_that_is_all_on_the_device_cannot_be_recorded(models):
    with Engine.from_pretrained(str(models["silu"]), ctx=256) as engine:
        with pytest.raises(UsageError, match="lower --vram-budget"):
            engine.record(Recorder())
        assert engine._parts.recorder is None
        engine.generate(PROMPT, max_new_tokens=1)


# --- what predictors promise ---


def test_predictors_that_find_less_than_they_promise_are_named_once(models, caplog):
    with opened(models["relu"], policy="static", sparsity="predicted", set={"theta": 0.97}) as engine:
        plans = engine._parts.plans
        entries = plans.runner.predictors.prediction.entries
        for layer, promised in enumerate((0.05, 1.0, 1.0)):
            factors = {"1.0": promised, "2.0": promised}
            entries[0, layer] = replace(entries[0, layer], metrics={"density": 0.01, "recall": factors})
        plans.runner.looks_always = True
        for _ in range(2):
            engine.generate(PROMPT, max_new_tokens=NEW * 2)
        assert [layer["alarm"] for layer in engine.stats()["layers"]] == [False, True, True]
        said = [line.message for line in caplog.records if "promise" in line.message]
        recalls = [layer["recall"] for layer in engine.stats()["layers"]]
        worst = 1 + int(recalls[2] < recalls[1])
    assert len(said) == 1
    assert said[0].startswith(
        f"the predictors of 2 of 3 layers find fewer live neurons than they promise, of layer {worst} "
    )
    assert f" {100 * recalls[worst]:.0f}% instead of 100%" in said[0]


def test_what_a_manifest_promises():
    metrics = {"density": 0.1, "recall": {"1.0": 0.8, "2.0": 1.0}}
    assert promised_recall(metrics, 0.15) == pytest.approx(0.9)
    assert promised_recall(metrics, 0.05) == pytest.approx(0.4)
    assert promised_recall(metrics, 0.7) == 1.0
    for other in ({}, {"density": "x", "recall": {"1": 1}}, {"density": 0.1, "recall": None}):
        assert promised_recall(other, 0.1) is None
