"""Puts a timeline or a recorder on an open engine, and takes it off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from dynajax.engine.checks import LiveCheck
from dynajax.engine.cold import ColdSide
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.mixture.recording import end_record_experts, record_experts
from dynajax.engine.observing import Observer, Seen
from dynajax.engine.opening import Parts
from dynajax.engine.plans import Plans
from dynajax.engine.prediction import SILU_DENSITY, knobs_of
from dynajax.engine.skipping import SkippingRunner
from dynajax.errors import UsageError
from dynajax.timeline import Lanes, Timeline
from dynajax.trace import PREFILL, Head, Recorder


def watch(parts: Parts, tell: Callable[[Seen], None] | None, *, streams: bool, values: bool) -> None:
    """See `Engine.watch`."""
    layers = parts.layers
    if isinstance(layers, MixtureLayers):
        if streams or values:
            raise UsageError("experts are seen without streams and values: watch with neither")
        layers.watch = tell
        return
    assert isinstance(parts.cold, ColdSide)
    made = (parts.prepared.programs, parts.stepper.weights, parts.pool, parts.cold)
    layers.observer = None if tell is None else Observer(tell, *made, streams=streams, values=values)


def trace(parts: Parts, timeline: Timeline | None) -> None:
    """See `Engine.trace`."""
    old, lanes = parts.lanes, None if timeline is None else Lanes(timeline)
    parts.lanes = parts.layers.lanes = parts.runner.lanes = lanes
    span = None if lanes is None else lanes.add
    if parts.mixture is not None:
        parts.mixture.tell(span)
    if parts.plans is not None:
        parts.plans.span = span
        parts.plans.tell_scheduler()
    if old is not None:
        old.close()


def record(parts: Parts, recorder: Recorder | None) -> None:
    """See `Engine.record`."""
    _end_record(parts)
    if recorder is None:
        return
    if parts.prepared.spec.encoder is not None:
        raise UsageError("a model with an encoder is not recorded: its layers do not all see the same tokens")
    spec, plans, prepared, layers = parts.prepared.spec, parts.plans, parts.prepared, parts.layers
    if isinstance(layers, MixtureLayers):
        record_experts(parts, recorder)
        return
    if isinstance(parts.runner, SkippingRunner):
        raise UsageError("one program that skips neurons is not recorded: open the engine with --host-mode threads")
    if layers.observer is not None:
        raise UsageError("somebody observes this engine: end that before recording, with observe(None)")
    strategy, lead = prepared.strategy, None if plans is None else plans.runner.wishes.lead
    told = {"sparsity": strategy.sparsity, "policy": strategy.policy, "predictor": prepared.prediction.kind}
    knobs = knobs_of(strategy.knobs, prepared.prediction)
    settings = {**told, "lead": lead, "knobs": asdict(knobs)}
    head = Head(fingerprint=parts.fingerprint, layers=spec.layers, width=spec.ffn, settings=settings)
    observer = _observer(parts, recorder) if plans is None else None
    recorder.open(head, scores=knobs.record_scores)
    parts.recorder, layers.observer = recorder, observer
    if plans is None:
        parts.stepper.on_tokens = recorder.begin
    else:
        _record_plans(parts, plans, recorder)


def unhook(parts: Parts) -> None:
    """Before the engine is closed: what was recorded and traced is whole, unless the engine failed."""
    plans = parts.plans
    if plans is None or (plans.runner.scheduler is not None and not plans.runner.scheduler.failed):
        record(parts, None)
    trace(parts, None)


def _observer(parts: Parts, recorder: Recorder) -> Observer:
    """Where no plans are made: tells the recorder of every layer."""
    has_zeros = parts.prepared.spec.activation.has_zeros
    if not has_zeros and not parts.store.arenas:
        raise UsageError("no activation of this model is zero and all is on the device: lower --vram-budget to record")
    assert isinstance(parts.cold, ColdSide)
    check = LiveCheck(parts.loaded, parts.cold, parts.prepared.prediction.density or SILU_DENSITY)
    return check.observer(lambda seen, live: recorder.add(seen.layer, live, parts.pool.bucket(seen.layer)))


def _record_plans(parts: Parts, plans: Plans, recorder: Recorder) -> None:
    """Where plans are made: prompts in the main thread, which is alone then; decoding in the scheduler's."""
    runner, prepared = plans.runner, parts.prepared

    def begin(position: npt.NDArray[np.int32], row: npt.NDArray[np.int32], phase: int) -> None:
        if phase == PREFILL:
            recorder.begin(position, row, phase)
        elif runner.scheduler is not None:
            runner.scheduler.note(lambda: recorder.begin(position, row, phase))

    parts.stepper.on_tokens = begin
    runner.on_prompt = lambda layer, live: recorder.add(layer, live, parts.pool.bucket(layer))
    ranks = not prepared.spec.activation.has_zeros and prepared.prediction.density is not None
    runner.looks_always = prepared.strategy.skips or ranks
    plans.recorder = recorder
    plans.tell_scheduler()


def _end_record(parts: Parts) -> None:
    recorder, plans, layers = parts.recorder, parts.plans, parts.layers
    if recorder is None:
        return
    if isinstance(layers, MixtureLayers):
        end_record_experts(parts)
        return
    parts.recorder = parts.stepper.on_tokens = None
    if plans is None:
        layers.observer = None
        return
    runner = plans.runner
    runner.on_prompt, runner.looks_always = None, False
    plans.tell_scheduler()  # all that was decoded is in it
    plans.recorder = None
    plans.tell_scheduler()
    if runner.scheduler is not None:
        recorder.costs = asdict(runner.scheduler.costs())
