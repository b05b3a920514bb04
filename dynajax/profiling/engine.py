"""What the engine's own programs and Python take: engines of random models decode, and the simulator has to agree.

Every engine skips by its predictors and has half of its neurons on the host. Two that differ in depth alone and have
almost nothing to compute tell what the main thread takes for a layer and for a token; one each with large attention,
neurons or vocabulary tells at which rate those are read; and two that plan tell what a plan takes. Each figure in turn
is the one with which the simulator gives the time of a token that was measured.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dynajax.checkpoint import resolve_model
from dynajax.config import Activation, EngineConfig, ModelSpec
from dynajax.engine import Engine, plan_for
from dynajax.engine.planning import Prepared
from dynajax.engine.prediction import knobs_of
from dynajax.engine.strategy import Strategy
from dynajax.profiling.pace import Line, Pace
from dynajax.sim.activity import Activity, from_trace
from dynajax.sim.decode import decode
from dynajax.sim.hardware import Hardware, Program
from dynajax.sim.models import Weights
from dynajax.sim.records import Load
from dynajax.sim.systems import engine_system
from dynajax.testing import make_checkpoint
from dynajax.trace import Recorder, read_trace

CTX = 256
PROMPT = (1, 2, 3)
TOKENS, TRACED = 64, 32  # decoded in a run, recorded
QUICK_PERCENT = 25
LEAST_S, MOST_PLAN_S = 1e-7, 1e-2  # bounds of a figure
MOST_PROGRAM_S = 1.0
MOST_GAIN = 4  # times device_bps that a program may read: what is measured as more is noise
HALVINGS = 18  # of the range that it is looked for in
TEXT_MODEL = "tiny-relullama"  # whose tokenizer the models have: text is made while decoding
VOCAB = 8192  # of that
NARROW = ModelSpec(layers=4, hidden=64, ffn=192, heads=4, kv_heads=4, head_dim=16, vocab=VOCAB, max_positions=CTX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What is decoded: a smaller and a larger model for what has a line, fixed seconds and bytes a second."""

    narrow: ModelSpec
    deep: ModelSpec
    attention: tuple[ModelSpec, ModelSpec]
    neurons: tuple[ModelSpec, ModelSpec]
    vocabulary: ModelSpec
    ranked: ModelSpec  # whose scores rank the neurons of a token


def _wide(spec: ModelSpec, hidden: int, **changes: Any) -> ModelSpec:
    return replace(spec, hidden=hidden, heads=8, kv_heads=8, head_dim=hidden // 8, **changes)


LARGE = Models(  # what is to be read is larger than the caches
    narrow=NARROW,
    deep=replace(NARROW, layers=20),
    attention=(_wide(NARROW, 512, layers=12), _wide(NARROW, 1536)),
    neurons=(_wide(NARROW, 512, layers=8, ffn=1536), _wide(NARROW, 512, ffn=8192)),
    vocabulary=replace(NARROW, layers=2, hidden=256, vocab=65536),
    ranked=_wide(NARROW, 512, layers=8, ffn=1536, activation=Activation(kind="silu")),
)
SMALL = Models(
    narrow=NARROW,
    deep=replace(NARROW, layers=8),
    attention=(_wide(NARROW, 128), _wide(NARROW, 256)),
    neurons=(replace(NARROW, ffn=384), replace(NARROW, ffn=1536)),
    vocabulary=replace(NARROW, hidden=128),
    ranked=replace(NARROW, activation=Activation(kind="silu")),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """An engine that was watched."""

    prepared: Prepared
    activity: Activity
    token_s: float


def opened(model: str, policy: str, pool_share: float = 0.5, **settings: Any) -> Engine:
    """An engine that skips by its predictors, with that share of the neurons on the device."""
    wanted: dict[str, Any] = {
        "ctx": CTX,
        "sparsity": "predicted",
        "policy": policy,
        "offline": True,
        "host_mode": "threads",
        **settings,
    }
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
    parts = engine._parts
    assert parts is not None and parts.plans is not None, "only an open engine that plans can be recorded for this"
    plans = parts.plans
    return replace(activity, frequency=plans.statistics.frequency, mass=plans.statistics.mass)


def load_of(prepared: Prepared) -> Load:
    """The bytes that a token meets in an engine's model."""
    prediction, dtype = prepared.prediction, prepared.programs.shapes.dtype
    weights = Weights(
        spec=prepared.spec, dtype=dtype, host_dtype=prepared.host_dtype, kv_dtype=prepared.programs.shapes.kv_name
    )
    layers = prepared.spec.layers
    load = weights.load(prediction.read_bytes(prepared.spec) / layers, round(len(prediction.entries) / layers))
    return replace(load, ranks=prediction.density is not None)


def simulated_s(prepared: Prepared, activity: Activity, hardware: Hardware) -> float:
    """Seconds of a token of what that engine would do on a machine."""
    strategy = prepared.strategy
    assert isinstance(strategy, Strategy), "a machine is measured with neurons"
    knobs = knobs_of(strategy.knobs, prepared.prediction)
    dense = strategy.sparsity == "dense"
    system = engine_system(strategy.policy, knobs, prepared.spec.activation, skips=strategy.skips, dense=dense)
    tally = decode(load_of(prepared), hardware, system, activity, prepared.placement)
    return tally.seconds / tally.tokens


def sample(spec: ModelSpec, policy: str, threads: int, pace: Pace) -> Sample:
    """Of a random model: the time of a token, by its faster quartile, for others may use the machine; what it does."""
    with TemporaryDirectory(prefix="dynajax-profile-") as folder:
        model = str(make_checkpoint(Path(folder) / "model", spec))
        for file in resolve_model(TEXT_MODEL).glob("tokenizer*"):
            shutil.copy(file, model)
        kept: dict[str, Any] = {"predictor": "gate", "stats": "none", "threads": threads}
        kept["set"] = {"record_scores": True}
        with opened(model, policy, **kept) as engine:
            times = pace.samples(lambda: token_times(engine, list(PROMPT), TOKENS))
            activity, parts = recorded(engine, list(PROMPT), TRACED), engine._parts
    assert parts is not None, "the engine was open"
    return Sample(prepared=parts.prepared, activity=activity, token_s=quick_s(times))


def quick_s(times: Sequence[Sequence[float]]) -> float:
    """The faster quartile of the tokens of all runs."""
    return float(np.percentile(np.concatenate(times), QUICK_PERCENT))


def with_engine_figures(
    hardware: Hardware, models: Models, threads: int, pace: Pace, on_step: Callable[[], None]
) -> Hardware:
    """The machine with layer_s, token_s, programs, plan_s and balance_s as engines show them."""

    def watched(spec: ModelSpec, policy: str = "static") -> Sample:
        found = sample(spec, policy, threads, pace)
        on_step()
        return found

    narrow = watched(models.narrow)
    layer_s, token_s = own_work(narrow, watched(models.deep), hardware)
    hardware = replace(hardware, layer_s=layer_s, token_s=token_s)
    for kind, pair in (("attend", models.attention), ("hot", models.neurons), ("head", (models.vocabulary,))):
        hardware = with_curve(hardware, kind, narrow, [watched(spec) for spec in pair])
    sizes, seconds = hardware.program("hot").sizes[-2:], hardware.program("hot").seconds[-2:]
    bps = (sizes[1] - sizes[0]) / (seconds[1] - seconds[0])
    hardware = with_program(hardware, "score", Program.plain(hardware.launch_s, bps))
    hardware = with_curve(hardware, "rank", narrow, [watched(models.ranked)])
    for figure, policy in (("plan_s", "lru"), ("balance_s", "dynamic")):
        seen = watched(models.deep, policy)
        hardware = with_plans(hardware, figure, seen)
    return hardware


def own_work(shallow: Sample, deep: Sample, hardware: Hardware) -> tuple[float, float]:
    """(layer_s, token_s): what the tokens of two depths take beyond what the simulator says without either."""
    bare = replace(hardware, layer_s=LEAST_S, token_s=LEAST_S)
    rest = [(float(seen.prepared.spec.layers), seen.token_s - simulated_s(seen.prepared, seen.activity, bare))
            for seen in (shallow, deep)]  # fmt: skip
    line = Line.through(*rest)
    return max(LEAST_S, line.slope), max(LEAST_S, line.intercept)


def with_program(hardware: Hardware, kind: str, program: Program) -> Hardware:
    """The machine with what a kind of program takes."""
    return replace(hardware, programs={**hardware.programs, kind: program})


def with_curve(hardware: Hardware, kind: str, narrow: Sample, larger: Sequence[Sample]) -> Hardware:
    """The machine with the seconds of a kind of program that the samples' times ask for.

    At the narrow model's size it takes what it was taken to when `layer_s` was told: the curve begins there.
    """
    size = bytes_of(kind, narrow)
    sizes, seconds = [size], [hardware.launch_s + size / hardware.device_bps]
    for seen in larger:
        sizes.append(bytes_of(kind, seen))
        least_s = (sizes[-1] - sizes[-2]) / (MOST_GAIN * hardware.device_bps)
        seconds.append(max(seconds[-1] + least_s, _alone_s(hardware, kind, seen)))
    return with_program(hardware, kind, Program(sizes=tuple(sizes), seconds=tuple(seconds)))


def _alone_s(hardware: Hardware, kind: str, seen: Sample) -> float:
    """The seconds of a program of that kind, whatever its size, with which the sample takes as long as it did."""
    return solved(
        lambda value: with_program(hardware, kind, Program(sizes=(0.0, 1.0), seconds=(value, value))),
        seen, LEAST_S, MOST_PROGRAM_S,
    )  # fmt: skip


def bytes_of(kind: str, seen: Sample) -> float:
    """Of one program."""
    load = load_of(seen.prepared)
    return {
        "attend": load.attention + load.prefix(CTX, bucketed=True) * load.kv_token,
        "hot": seen.prepared.placement.resident / load.layers * load.unit,
        "head": load.head,
        "rank": load.score / max(1, load.scores),
    }[kind]


def with_plans(hardware: Hardware, figure: str, seen: Sample) -> Hardware:
    """The machine with `plan_s` or `balance_s` as the sample tells."""
    seconds = solved(lambda value: replace(hardware, **{figure: value}), seen, LEAST_S, MOST_PLAN_S)
    return replace(hardware, **{figure: seconds})


def solved(machine_of: Callable[[float], Hardware], seen: Sample, low: float, high: float) -> float:
    """The figure with which the simulator gives the sample's time: the larger, the longer a token takes."""
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        slow = simulated_s(seen.prepared, seen.activity, machine_of(middle)) > seen.token_s
        low, high = (low, middle) if slow else (middle, high)
    return low
