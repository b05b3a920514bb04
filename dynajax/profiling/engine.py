"""What the engine's own programs and Python take: engines of random models decode, and the simulator has to agree.

Three models, half of whose neurons are on the host: two that differ in depth alone and have almost nothing to compute,
and a wide one that does not fit the caches. The wide and a narrow one give every kind of program its line, fixed
seconds and bytes a second. What a token of the narrow ones takes beyond its programs and kernels, by the simulator's
own account, is the main thread's: a share for each layer, and one for the token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dynajax.config import EngineConfig, ModelSpec
from dynajax.engine import Engine, plan_for
from dynajax.engine.planning import Prepared
from dynajax.engine.prediction import knobs_of
from dynajax.profiling.pace import Line
from dynajax.sim.activity import Activity, from_trace
from dynajax.sim.decode import Load, System, decode
from dynajax.sim.hardware import PROGRAMS, Hardware, Program
from dynajax.sim.models import Weights
from dynajax.testing import make_checkpoint
from dynajax.timeline import Timeline
from dynajax.trace import Recorder, read_trace

CTX = 256
PROMPT = (1, 2, 3)
TRACED = 32  # tokens
LEAST_S, MOST_BPS = 1e-7, 1e13  # of what is left after a subtraction; of a line that does not rise
MOST_PLAN_S, HALVINGS = 1e-2, 12
NARROW = ModelSpec(layers=4, hidden=64, ffn=192, heads=4, kv_heads=4, head_dim=16, vocab=128, max_positions=CTX)
DEEP = replace(NARROW, layers=20)
WIDE = replace(NARROW, layers=6, hidden=1024, ffn=3072, heads=8, kv_heads=8, head_dim=128, vocab=8192)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """An engine that was watched."""

    prepared: Prepared
    activity: Activity
    token_s: float
    programs: Mapping[str, tuple[float, float]]  # kind: bytes, seconds
    cold_s: float  # of the host, a layer


def opened(model: str, policy: str, pool_share: float = 0.5, **settings: Any) -> Engine:
    """An engine that skips by its predictors, with that share of the neurons on the device."""
    wanted: dict[str, Any] = {"ctx": CTX, "sparsity": "predicted", "policy": policy, "offline": True, **settings}
    plan = plan_for(model, EngineConfig(**wanted))
    return Engine.from_pretrained(model, vram_budget=plan.smallest_budget_bytes + int(pool_share * plan.pool), **wanted)


def token_times(engine: Engine, prompt: list[int], tokens: int) -> list[float]:
    """Seconds of each token but the first, which waits for the prompt."""
    times, before = [], time.perf_counter()
    for _ in engine.stream(prompt, max_new_tokens=tokens, seed=0, ignore_eos=True):
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times[1:]


def recorded(engine: Engine, prompt: list[int], tokens: int) -> Activity:
    """What an engine that keeps scores does, with the frequencies and masses that it goes by."""
    with TemporaryDirectory(prefix="dynajax-profile-") as folder:
        recorder, path = Recorder(), Path(folder) / "run.npz"
        engine.record(recorder)
        engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
        engine.record(None)
        recorder.write(path)
        activity = from_trace(read_trace(path), "recorded")
    plans = engine._parts.plans
    assert plans is not None, "only an engine that plans can be recorded for this"
    return replace(activity, frequency=plans.statistics.frequency, mass=plans.statistics.mass)


def load_of(prepared: Prepared) -> Load:
    """The bytes that a token meets in an engine's model."""
    prediction, dtype = prepared.prediction, prepared.programs.shapes.dtype
    weights = Weights(spec=prepared.spec, dtype=dtype, host_dtype=prepared.host_dtype, kv_dtype=dtype)
    places, layers = prediction.entries, prepared.spec.layers
    copies = max(1, len({layer for _, layer in places}))  # a layer's predictors of all leads share one
    scores = round(len(places) / layers)
    return weights.load(prepared.model, prediction.bytes / copies * scores, scores)


def simulated_s(prepared: Prepared, activity: Activity, hardware: Hardware) -> float:
    """Seconds of a token of what that engine would do on a machine."""
    knobs = knobs_of(prepared.strategy.knobs, prepared.prediction)
    system = System(name="engine", policy=prepared.strategy.policy, config=knobs, skips=prepared.strategy.skips)
    tally = decode(load_of(prepared), hardware, system, activity, prepared.placement)
    return tally.seconds / tally.tokens


def samples(threads: int, cases: Sequence[tuple[ModelSpec, str]], tokens: int, runs: int) -> list[Sample]:
    """One of each model and policy; engines take turns, so that a busy moment hits all."""
    times: dict[int, list[float]] = defaultdict(list)
    with TemporaryDirectory(prefix="dynajax-profile-") as folder, ExitStack() as stack:
        engines = []
        for i, (spec, policy) in enumerate(cases):
            model = str(make_checkpoint(Path(folder) / f"model-{i}", spec))
            kept = {"predictor": "gate", "stats": "none", "threads": threads, "set": {"record_scores": True}}
            engines.append(stack.enter_context(opened(model, policy, **kept)))
        for _ in range(runs):
            for i, engine in enumerate(engines):
                times[i] += token_times(engine, list(PROMPT), tokens)
        return [_sample(engine, float(np.median(times[i]))) for i, engine in enumerate(engines)]


def models(narrow: ModelSpec, deep: ModelSpec, wide: ModelSpec) -> tuple[tuple[ModelSpec, str], ...]:
    """What is decoded: the three models with nothing moving, then the deep one with plans of two kinds."""
    return (narrow, "static"), (deep, "static"), (wide, "static"), (deep, "lru"), (deep, "dynamic")


def program_lines(narrow: Sample, wide: Sample) -> dict[str, Program]:
    """Fixed seconds and bytes a second of every kind."""
    lines = {kind: Line.through(narrow.programs[kind], wide.programs[kind]) for kind in PROGRAMS}
    return {
        kind: Program(fixed_s=max(LEAST_S, line.intercept), bps=1 / max(1 / MOST_BPS, line.slope))
        for kind, line in lines.items()
    }


def own_work(shallow: Sample, deep: Sample, hardware: Hardware) -> tuple[float, float]:
    """(layer_s, token_s): what the tokens of two depths take beyond what the simulator says without either."""
    bare = replace(hardware, layer_s=LEAST_S, token_s=LEAST_S)
    rest = [(float(sample.prepared.spec.layers), sample.token_s - simulated_s(sample.prepared, sample.activity, bare))
            for sample in (shallow, deep)]  # fmt: skip
    line = Line.through(*rest)
    return max(LEAST_S, line.slope), max(LEAST_S, line.intercept)


def planning_s(sample: Sample, hardware: Hardware, figure: str) -> float:
    """The seconds of `plan_s` or `balance_s` with which the simulator gives the sample's time of a token."""
    low, high = LEAST_S, MOST_PLAN_S
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        slow = simulated_s(sample.prepared, sample.activity, replace(hardware, **{figure: middle})) > sample.token_s
        low, high = (low, middle) if slow else (middle, high)
    return low


def _sample(engine: Engine, token_s: float) -> Sample:
    activity = recorded(engine, list(PROMPT), TRACED)
    timeline = Timeline()
    engine.trace(timeline)
    engine.generate(list(PROMPT), max_new_tokens=TRACED, ignore_eos=True)
    engine.trace(None)
    prepared = engine._parts.prepared
    load, times = load_of(prepared), defaultdict(list)
    for lane, name, begin, end in timeline.spans():
        if lane in ("device", "host") and "," not in name:
            times[name.split()[0]].append(end - begin)
    slots = prepared.placement.resident / load.layers
    sizes = {
        "attend": load.attention + load.prefix(CTX, bucketed=True) * load.kv_token,
        "score": load.score / max(1, load.scores),
        "hot": slots * load.unit,
        "head": load.head,
    }
    programs = {kind: (size, float(np.median(times[kind]))) for kind, size in sizes.items()}
    cold_s = float(np.median(times["cold"]))
    return Sample(prepared=prepared, activity=activity, token_s=token_s, programs=programs, cold_s=cold_s)
