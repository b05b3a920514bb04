"""Runs a model every way it can be run here, and says which ways agree with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np

from dynajax.checkpoint import Checkpoint
from dynajax.config import DTYPE_BYTES, EngineConfig, ModelSpec, is_packed
from dynajax.engine.failures import translated_errors
from dynajax.engine.hosts import offload_mode
from dynajax.engine.opening import Parts, load_parts
from dynajax.engine.planning import Prepared, prepare, resolve_dtypes
from dynajax.engine.probe import trace
from dynajax.errors import FitError, MismatchError, NumericalError, UsageError
from dynajax.model_folder import model_folder
from dynajax.plan import Placement
from dynajax.text import load_tokenizer
from dynajax.verify.comparing import (
    Expected,
    allowed_error,
    cosines,
    expected,
    hidden_errors,
    jumps,
    logits_error,
)
from dynajax.verify.files import broken_checksums
from dynajax.verify.weights import Difference, differences

Progress = Callable[[str, int, int], None]  # stage, done, total; may raise
TEXT = (
    "The lighthouse keeper counted the ships that passed in the night, and wrote their number into a book that nobody "
    "else had opened for thirty years. When the fog came, he rang the bell and waited for an answer."
)
TOKENS, DECODED = 48, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to verify: `against` is another copy of the same weights, the model itself if None."""

    model: str
    config: EngineConfig
    against: str | None = None
    tolerance: float | None = None  # with `against`: relative error of a weight that still counts as the same

    def __post_init__(self) -> None:
        if self.tolerance is not None and self.against is None:
            raise UsageError("--tolerance goes with --against: a copy of the file itself has no errors")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise UsageError(f"--tolerance must be above 0 and below 1, got {self.tolerance}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of running, and how it compares. None: not measured in this way of running."""

    placement: str  # host, half (every second unit of every layer on the device) or device
    dtype: str
    host_dtype: str
    host_mode: str
    skipped: str | None = None  # why it was not run
    allowed: float | None = None  # the largest hidden or logits error of a run that passes
    hidden_error: float | None = None  # of what units read, the largest of all layers; position: see `jumps`
    cosine: float | None = None  # of the same, the smallest of all layers and positions
    logits_error: float | None = None
    same_tokens: float | None = None  # share of positions with the same most likely token
    first_layer: int | None = None  # the first that is off, by its FFN's input or by a weight
    tensors: tuple[Difference, ...] = ()  # weights that are off, first layer first
    passed: bool | None = None  # None: it was not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found."""

    model: str
    against: str
    tokens: int
    layers: int
    checksums: tuple[str, ...] | None  # tensors whose bytes changed; None without checksums.json
    runs: tuple[Run, ...]

    @property
    def ran(self) -> list[Run]:
        """The runs that were not skipped."""
        return [run for run in self.runs if run.skipped is None]

    @property
    def passed(self) -> bool:
        """Whether nothing is off, and something was run."""
        return bool(self.ran) and all(run.passed for run in self.ran) and not self.checksums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Case:
    """What every run is compared with."""

    settings: Settings
    model: Checkpoint
    reference: Checkpoint  # the model itself, or the other copy
    ids: list[int]
    wanted: Expected


def verify(settings: Settings, progress: Progress, on_run: Callable[[Run], None]) -> Report:
    """Compare every placement, type and host mode; `on_run` is told each as it is done.

    One engine is open at a time, none while `on_run` is called; both callbacks may raise.
    """
    if settings.config.sparsity == "predicted":
        raise UsageError("only what computes every live neuron can be verified: leave --sparsity predicted out")
    config = settings.config
    if is_packed(config.dtype) or is_packed(config.host_dtype):
        raise UsageError("weights of few bits equal no checkpoint's: verify with --dtype float32, float16 or bfloat16")
    model = Checkpoint.open(model_folder(settings.model, offline=config.offline, progress=progress))
    if model.spec.encoder is not None:
        raise UsageError("models with an encoder cannot be verified yet: tests compare them with the float64 forward")
    reference = model
    if settings.against is not None:
        reference = Checkpoint.open(model_folder(settings.against, offline=config.offline, progress=progress))
        _check_same_shape(model, reference)
    ways = _ways(config, model.spec, jax.local_devices()[0].platform)
    checksums = broken_checksums(model, lambda done, total: progress("checksums", done, total))
    ids = _tokens(model, config.ctx)
    wanted = expected(reference, ids, lambda done, total: progress("reference", done, total))
    case = _Case(settings=settings, model=model, reference=reference, ids=ids, wanted=wanted)
    runs: list[Run] = []
    for way in ways:
        runs.append(_run(way, case, lambda *_: progress("verify", len(runs), len(ways))))
        on_run(runs[-1])
    return Report(
        model=settings.model,
        against=settings.against or settings.model,
        tokens=len(ids),
        layers=model.spec.layers,
        checksums=checksums,
        runs=tuple(runs),
    )


def _check_same_shape(one: Checkpoint, other: Checkpoint) -> None:
    """Copies may differ in the type they are meant for, in special tokens and, if positions rotate, in length."""
    ignored = {"dtype": "float32", "bos_id": None, "eos_ids": ()}
    if not one.spec.learned_positions:
        ignored["max_positions"] = 1
    if replace(one.spec, **ignored) != replace(other.spec, **ignored):
        raise MismatchError("the two models differ in shape: --against takes another copy of the same model")


def _tokens(checkpoint: Checkpoint, ctx: int | None) -> list[int]:
    """A text in the model's own tokens, or random ids without a tokenizer; at most what its context holds."""
    count = min(TOKENS, checkpoint.spec.max_positions, ctx or TOKENS)
    tokenizer = load_tokenizer(checkpoint.folder)
    ids = [] if tokenizer is None else tokenizer.encode(TEXT)
    if len(ids) < 2 or max(ids) >= checkpoint.spec.vocab:
        ids = np.random.default_rng(0).integers(0, checkpoint.spec.vocab, count).tolist()
    return ids[:count]


def _ways(config: EngineConfig, spec: ModelSpec, platform: str) -> list[Run]:
    """Both extremes of placement in every type; in the first also half, and the first as one program a token.

    What the user chose is not varied.
    """
    offload = offload_mode(config.host_mode, platform)
    dtypes = [config.dtype]
    if config.dtype == "auto":  # a 16-bit host type fills a pool of its own type or of float32
        dtypes = [name for name in DTYPE_BYTES if config.host_dtype in ("auto", name) or name == "float32"]
    varied, first = config.host_mode == "auto", dtypes[0]
    mode = "threads" if varied else offload
    ways = [
        (placement, dtype, mode)
        for dtype in dtypes
        for placement in ("host", "half", "device")
        if placement != "half" or dtype == first
    ]
    if varied:
        ways += [("half", first, mode) for mode in dict.fromkeys((offload, "callback")) if mode != "threads"]
        ways.append(("device", first, "resident"))
    return [
        Run(
            placement=placement,
            dtype=dtype,
            host_dtype=resolve_dtypes(replace(config, dtype=dtype), spec, platform)[1],
            host_mode=mode,
        )
        for placement, dtype, mode in ways
        if placement == "host" or config.policy != "none"
    ]


def _run(way: Run, case: _Case, on_step: Progress) -> Run:
    """Open, compare, close. What does not fit, or overflows the type, was not run."""
    try:
        with translated_errors():
            prepared, config = _prepared(way, case, on_step)
            parts = load_parts(case.model, prepared, config, on_step)
            try:
                return _compare(way, parts, case)
            finally:
                parts.close()
    except (FitError, NumericalError) as error:
        return replace(way, skipped=str(error))


def _prepared(way: Run, case: _Case, on_step: Progress) -> tuple[Prepared, EngineConfig]:
    """The plan of a run; FitError if the budget does not hold its units."""
    config = replace(
        case.settings.config,
        ctx=len(case.ids),
        dtype=way.dtype,
        host_dtype=way.host_dtype,
        host_mode="auto" if way.host_mode == "resident" else way.host_mode,
        policy="none" if way.placement == "host" else "static",
        predictor="none",
        stats="none",
    )
    prepared = prepare(case.settings.model, config, folder=case.model.folder, progress=on_step)
    spec, fitting, layers = prepared.spec, prepared.placement.resident, len(prepared.placement.buckets)
    half = Placement((np.arange(0, spec.units, 2, dtype=np.int32),) * layers, spec.units)
    needed = {"host": 0, "half": half.resident, "device": layers * spec.units}[way.placement]
    if fitting < needed or (way.host_mode == "resident") != (prepared.host_mode == "resident"):
        what = "neurons" if spec.experts is None else "experts"
        held = f"holds {fitting} {what} beside the rest, and this takes {needed} at once"
        raise FitError(f"a budget of {prepared.memory.budget_bytes} bytes {held}: raise --vram-budget")
    return (replace(prepared, placement=half) if way.placement == "half" else prepared), config


def _compare(way: Run, parts: Parts, case: _Case) -> Run:
    """NumericalError if float16 was too small for what right weights gave."""
    got = trace(parts, case.ids, min(DECODED, len(case.ids)))
    tensors = tuple(differences(parts, case.model, case.reference, case.settings.tolerance))
    if way.dtype == "float16" and not tensors and not np.isfinite(got.logits).all():
        raise NumericalError("a number on the way is beyond float16's 65504: use bfloat16 or float32")
    allowed = allowed_error(way.dtype, way.host_dtype, case.model, case.reference, case.settings.tolerance)
    middle, layers = jumps(case.model.spec, allowed), sorted(got.hidden)
    hidden = [got.hidden[layer] for layer in layers], [case.wanted.hidden[layer] for layer in layers]
    errors = hidden_errors(*hidden, middle=middle)
    off = [layer for layer, error in zip(layers, errors, strict=True) if error > allowed]
    off += [difference.layer for difference in tensors if difference.layer is not None]
    truth = case.wanted.logits[-len(got.logits) :]
    error = logits_error(got.logits, truth, middle=middle)
    return replace(
        way,
        allowed=allowed,
        hidden_error=max(errors, default=None),
        cosine=min(cosines(*hidden), default=None),
        logits_error=error,
        same_tokens=float((got.logits.argmax(axis=1) == truth.argmax(axis=1)).mean()),
        first_layer=min(off, default=None),
        tensors=tensors,
        passed=not off and not tensors and error <= allowed,
    )
