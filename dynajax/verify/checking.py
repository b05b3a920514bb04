"""Runs a model every way it can be run here, and says which ways agree with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynajax.budget import MARGIN_SHARE, unit_bytes
from dynajax.checkpoint import Checkpoint
from dynajax.config import DTYPE_BYTES, EngineConfig, ModelSpec, parse_budget
from dynajax.engine import plan_for
from dynajax.engine.hosts import offload_mode
from dynajax.engine.opening import Parts, open_parts
from dynajax.engine.probe import trace, weight_errors
from dynajax.errors import FitError, MismatchError, NumericalError
from dynajax.model_folder import model_folder
from dynajax.text import load_tokenizer
from dynajax.verify.comparing import TOLERANCES, Expected, broken_checksums, cosines, expected, logits_error

Progress = Callable[[str, int, int], None]
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
    tolerance: float = 0.02  # relative error of a weight that still counts as the same, with `against`


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of running, and how it compares. None: not measured in this way of running."""

    placement: str  # host, half or device
    dtype: str
    host_dtype: str
    host_mode: str
    skipped: str | None = None  # why it was not run
    cosine: float | None = None  # the worst of all layers and positions
    first_layer: int | None = None  # the first that is off
    logits_error: float | None = None
    same_tokens: float | None = None  # share of positions with the same most likely token
    tensors: tuple[str, ...] = ()  # weights that differ from the reference's, first layer first
    passed: bool = True


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
    def passed(self) -> bool:
        """Whether nothing is off, and something was run."""
        ran = [run for run in self.runs if run.skipped is None]
        return bool(ran) and all(run.passed for run in ran) and not self.checksums


def verify(settings: Settings, progress: Progress, on_run: Callable[[Run], None]) -> Report:
    """Compare every placement, type and host mode; `on_run` is told each as it is done."""
    config = settings.config
    checkpoint = Checkpoint.open(model_folder(settings.model, offline=config.offline, progress=progress))
    other = settings.against
    reference = checkpoint
    if other is not None:
        reference = Checkpoint.open(model_folder(other, offline=config.offline, progress=progress))
        _check_same_shape(checkpoint, reference)
    checksums = broken_checksums(checkpoint)
    ids = _tokens(checkpoint)
    wanted = expected(reference, ids)
    runs = []
    for run, changed in _ways(settings):
        run = _measure(run, settings, changed, reference, wanted, ids)
        on_run(run)
        runs.append(run)
    return Report(
        model=settings.model,
        against=other or settings.model,
        tokens=len(ids),
        layers=checkpoint.spec.layers,
        checksums=None if checksums is None else tuple(checksums),
        runs=tuple(runs),
    )


def _check_same_shape(one: Checkpoint, other: Checkpoint) -> None:
    ignored = {"dtype": "float32", "max_positions": 1, "bos_id": None, "eos_ids": ()}
    if replace(one.spec, **ignored) != replace(other.spec, **ignored):
        raise MismatchError("the two models differ in shape: --against takes another copy of the same model")


def _tokens(checkpoint: Checkpoint) -> list[int]:
    """A text in the model's own tokens, or random ids without a tokenizer; at most what its context holds."""
    count = min(TOKENS, checkpoint.spec.max_positions)
    tokenizer = load_tokenizer(checkpoint.folder)
    ids = [] if tokenizer is None else tokenizer.encode(TEXT)
    if len(ids) < 2 or max(ids) >= checkpoint.spec.vocab:
        ids = np.random.default_rng(0).integers(0, checkpoint.spec.vocab, count).tolist()
    return ids[:count]


def _ways(settings: Settings) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Both extremes of placement in every type, half in the first, and the first as one program a token."""
    config = settings.config
    dtypes = [config.dtype] if config.dtype != "auto" else list(DTYPE_BYTES)
    for index, dtype in enumerate(dtypes):
        host = config.host_dtype if config.host_dtype != "auto" or dtype == "float32" else dtype
        for placement in ("host", "half", "device") if index == 0 else ("host", "device"):
            yield _way(placement, dtype, host, "threads")
    host = config.host_dtype
    offload = offload_mode("auto", _platform())
    if offload != "threads":
        yield _way("half", dtypes[0], host, offload)
    yield _way("half", dtypes[0], host, "callback")
    yield _way("device", dtypes[0], host, "resident")


def _platform() -> str:
    import jax

    return jax.local_devices()[0].platform


def _way(placement: str, dtype: str, host_dtype: str, mode: str) -> tuple[Run, dict[str, Any]]:
    changed = {
        "dtype": dtype,
        "host_dtype": host_dtype,
        "host_mode": "auto" if mode == "resident" else mode,
        "policy": "none" if placement == "host" else "static",
        "stats": "none",
    }
    return Run(placement=placement, dtype=dtype, host_dtype=host_dtype, host_mode=mode), changed


def _measure(
    run: Run,
    settings: Settings,
    changed: dict[str, Any],
    reference: Checkpoint,
    wanted: Expected,
    ids: list[int],
) -> Run:
    try:
        config = _config(run, settings, changed, reference.spec, len(ids))
        parts = open_parts(settings.model, config, lambda stage, done, total: None, lambda plan: None)
    except (FitError, NumericalError) as error:
        return replace(run, skipped=str(error))
    try:
        run = replace(run, host_mode=parts.prepared.host_mode, host_dtype=parts.prepared.host_dtype)
        limit = 0.0 if settings.against is None else settings.tolerance
        return _compare(run, parts, reference, wanted, ids, limit)
    finally:
        parts.close()


def _compare(run: Run, parts: Parts, reference: Checkpoint, wanted: Expected, ids: list[int], limit: float) -> Run:
    got = trace(parts, ids, min(DECODED, len(ids) - 1))
    allowed = TOLERANCES[run.dtype]
    by_layer = cosines(got.hidden, wanted.hidden) if got.hidden else []
    off = [layer for layer, cosine in enumerate(by_layer) if cosine < allowed.cosine]
    truth = wanted.logits[-len(got.logits) :]
    error = logits_error(got.logits, truth)
    tensors = tuple(name for _, name, differs in weight_errors(parts, reference) if differs > limit)
    return replace(
        run,
        cosine=min(by_layer, default=None),
        first_layer=off[0] if off else None,
        logits_error=error,
        same_tokens=float((got.logits.argmax(axis=1) == truth.argmax(axis=1)).mean()),
        tensors=tensors,
        passed=not off and not tensors and error <= allowed.logits,
    )


def _config(run: Run, settings: Settings, changed: dict[str, Any], spec: ModelSpec, tokens: int) -> EngineConfig:
    """The settings of a run: its budget holds none, half or all of the units. FitError if that is above the user's."""
    config = replace(settings.config, ctx=tokens, batch=1, **changed)
    smallest = plan_for(settings.model, replace(config, policy="none", vram_budget="auto")).smallest_budget_bytes
    units = {"host": 0, "half": spec.layers * spec.ffn // 2, "device": spec.layers * spec.ffn}[run.placement]
    needed = smallest + math.ceil(units * unit_bytes(spec, run.dtype) / (1 - MARGIN_SHARE))
    limit = parse_budget(settings.config.vram_budget)
    if isinstance(limit, int) and needed > limit:
        raise FitError(f"needs a budget of {needed} bytes, above {limit}")
    return replace(config, vram_budget=needed)
