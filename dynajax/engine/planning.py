"""From a model and the user's wishes to what will run: types, shapes, memory plan, placement. Loads no weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from dynajax import budget
from dynajax.budget import MemoryPlan
from dynajax.checkpoint import Checkpoint, Statistics, read_contributions, read_spec, read_stats, stats_path
from dynajax.checkpoint.generation import GENERATION_NAME, read_generation_config
from dynajax.config import DTYPE_BYTES, GROUP, EngineConfig, ModelSpec, is_packed
from dynajax.engine.hosts import Host, offload_mode
from dynajax.engine.layout import Layout, fixed_bytes, try_layout
from dynajax.engine.mixture.planning import host_extra, predictor_bytes, with_buffers
from dynajax.engine.mixture.strategy import MixtureStrategy, resolve_mixture
from dynajax.engine.prediction import NONE, Prediction, choose
from dynajax.engine.strategy import Strategy, resolve
from dynajax.engine.target import Target
from dynajax.errors import ModelError, StorageError, UsageError
from dynajax.model_folder import model_folder
from dynajax.plan import Placement
from dynajax.policy.experts.presets import place_experts
from dynajax.policy.placement import place_equal, place_static, staged_units
from dynajax.programs import Programs, Shapes
from dynajax.programs.shapes import round_ctx
from dynajax.staging import open_staging
from dynajax.transfer import RING, fill_piece
from hostcompute import ffi

log = logging.getLogger(__name__)

DEFAULT_CTX = 4096
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Everything that is decided before the first weight is read."""

    model: str
    folder: Path
    spec: ModelSpec
    advice: dict[str, Any]  # generation_config.json
    bos_id: int | None
    eos_ids: tuple[int, ...]
    host_dtype: str
    ctx: int  # tokens a sequence may have; the cache may hold a few more
    strategy: Strategy | MixtureStrategy
    prediction: Prediction
    staged: int  # units sent at a time while decoding; 0 where nothing moves
    programs: Programs
    memory: MemoryPlan
    placement: Placement
    fill_piece: int  # units moved at a time when the pool is filled
    host_mode: str
    host: Host | None  # of whole-token programs; None in threads mode


def prepare(
    model: str,
    config: EngineConfig,
    *,
    folder: Path | None = None,
    fingerprint: str | None = None,
    progress: Progress | None = None,
    device: Target | None = None,
) -> Prepared:
    """Resolve every `auto`, size the pool and place the units; `fingerprint` guards the statistics if given.

    Without `folder` the model is looked up, and of a model on the hub only its config is downloaded. Without `device`
    it is jax's own; of another one only programs' temporaries are not known, and are taken to be as large as here.
    """
    progress = progress or _silent
    if folder is None:
        folder = model_folder(model, offline=config.offline, config_only=True, progress=progress)
    spec = read_spec(folder)
    device = device or jax.local_devices()[0]
    dtype, host_dtype = resolve_dtypes(config, spec, device.platform)
    strategy = resolve_any(config, spec, folder, fingerprint, device.platform)
    shapes = shapes_of(config, spec, dtype, device.platform, skip_zeros=strategy.sparsity != "dense")
    check_staging(config, strategy)
    layout = lay_out(config, strategy, shapes, device, progress, fingerprint)
    strategy = settled(strategy, layout, spec)
    unit, host_unit = budget.unit_bytes(spec, dtype), budget.unit_bytes(spec, host_dtype)
    frequency = load_frequency(config.stats, folder, spec, fingerprint)
    host, prediction = budget.host_bytes(spec, host_dtype, resident=layout.mode == "resident"), layout.prediction
    staged = 0
    if isinstance(strategy, MixtureStrategy):
        predictors = predictor_bytes(strategy, spec, config, folder, fingerprint)
        layout = with_buffers(layout, strategy, host_dtype, predictors)
        placement = place_experts(strategy.parts.placement, frequency, unit, layout.pool_bytes)
        host |= host_extra(strategy, spec)
    else:
        if strategy.planned:
            layout, prediction, staged = add_plans(layout, strategy, host_unit, fingerprint)
        place = place_equal if strategy.planned else place_static  # two pool sizes, where each has more programs
        placement = place(frequency, unit, 0 if strategy.policy == "none" else layout.pool_bytes)
        host |= plan_host_bytes(strategy, prediction, spec, RING * staged * host_unit)
    if config.stats == "auto":
        warn_of_blindness(frequency, placement, folder, spec)
    return Prepared(
        model=model,
        folder=folder,
        spec=spec,
        **generation(folder, spec),
        host_dtype=host_dtype,
        ctx=resolve_ctx(config, spec),
        strategy=strategy,
        prediction=prediction,
        staged=staged,
        programs=layout.programs,
        memory=memory_plan(model, layout, placement, unit, host),
        placement=placement,
        fill_piece=fill_piece(spec.ffn, host_unit, unit, layout.temporaries),
        host_mode=layout.mode,
        host=layout.host,
    )


def shapes_of(config: EngineConfig, spec: ModelSpec, dtype: str, platform: str, *, skip_zeros: bool) -> Shapes:
    """The shapes of every program of an engine of these settings."""
    return Shapes(
        spec=spec,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(dtype, platform),
        ctx=round_ctx(resolve_ctx(config, spec)),
        batch=config.batch,
        skip_zeros=skip_zeros,
    )


def check_staging(config: EngineConfig, strategy: Strategy | MixtureStrategy) -> None:
    """Refuse a way of sending units that there is not, before anything is loaded."""
    if strategy.moves and config.staging != "auto":
        open_staging(config.staging, jax.local_devices()[0], np.zeros((1, 16), np.float32))


def settled(strategy: Strategy | MixtureStrategy, layout: Layout, spec: ModelSpec) -> Strategy | MixtureStrategy:
    """What is left of a strategy once it is known whether every unit is on the device."""
    if layout.mode != "resident":
        return strategy
    if isinstance(strategy, MixtureStrategy):
        return strategy.resident(spec)
    return strategy.resident(spec, skips=layout.prediction is not NONE)


def warn_of_blindness(frequency: npt.NDArray[np.float32], placement: Placement, folder: Path, spec: ModelSpec) -> None:
    """One line where units are chosen and nothing is known of them."""
    if not frequency.any() and 0 < placement.resident < frequency.size:
        what = "neurons" if spec.experts is None else "experts"
        log.warning("no activation statistics in %s: %s are placed by their number", folder, what)


def resolve_any(
    config: EngineConfig, spec: ModelSpec, folder: Path, fingerprint: str | None, platform: str
) -> Strategy | MixtureStrategy:
    """Every `auto` of sparsity and placement filled."""
    if spec.experts is not None:
        return resolve_mixture(config, spec, platform)
    return resolve(config, spec, folder, fingerprint, platform)


def memory_plan(model: str, layout: Layout, placement: Placement, unit: int, host: dict[str, int]) -> MemoryPlan:
    """Where every byte goes; unit: device bytes of a neuron."""
    return MemoryPlan(
        model=model,
        budget_bytes=layout.budget_bytes,
        pool=placement.resident * unit,
        margin=budget.margin_bytes(layout.budget_bytes, gpu=layout.gpu),
        smallest_budget_bytes=budget.smallest_budget(sum(layout.fixed.values()), gpu=layout.gpu),
        host=host,
        units_total=len(placement.buckets) * placement.units,
        units_resident=placement.resident,
        **layout.fixed,
    )


def lay_out(
    config: EngineConfig,
    strategy: Strategy | MixtureStrategy,
    shapes: Shapes,
    device: Target,
    progress: Progress,
    fingerprint: str | None,
) -> Layout:
    """Resident if the mode is `auto` and every unit fits beside the resident programs; else the offload mode.

    The CPU's own kernels take wider chunks of a prompt, if those fit too.

    Who asks for skipping gets it, wherever the units are: resident with the host's kernels, which leave a row out.
    """
    skips = config.sparsity == "predicted"
    can = not skips or (device.platform == "cpu" and ffi.unavailable() is None)
    if config.host_mode == "auto" and strategy.policy != "none" and can:
        prediction = NONE
        if skips:
            assert isinstance(strategy, Strategy), "experts are never skipped"
            prediction = choose(shapes.spec, strategy.knobs, strategy.trained, fingerprint, skips=True, places=False)
        cheap = replace(shapes, cheap_chunks=True)
        by_kernels = device.platform == "cpu" and ffi.unavailable() is None and shapes.spec.experts is None
        for wanted in [cheap, shapes] if by_kernels else [shapes]:
            layout = try_layout(config, "resident", wanted, device, progress, prediction)
            if layout is not None:
                return layout
    return lay_out_offloaded(config, strategy, shapes, device, progress)


def lay_out_offloaded(
    config: EngineConfig, strategy: Strategy | MixtureStrategy, shapes: Shapes, device: Target, progress: Progress
) -> Layout:
    """With units on both sides."""
    # A library is not called from inside a program.
    between = strategy.planned or (config.host_mode == "auto" and config.host_dense != "own")
    mode = "threads" if between else offload_mode(config.host_mode, device.platform)
    if config.host_mode == "auto" and mode == "threads" and device.platform == "cpu" and not between:
        log.warning("host mode threads, which is slower than ffi: %s", ffi.unavailable())
    layout = try_layout(config, "planned" if strategy.planned else mode, shapes, device, progress)
    assert layout is not None
    return replace(layout, mode=mode)


def add_plans(
    layout: Layout, strategy: Strategy, host_unit: int, fingerprint: str | None
) -> tuple[Layout, Prediction, int]:
    """The layout with what plans need beside the pool -> that, the predictors, and units sent at a time."""
    shapes, programs = layout.programs.shapes, layout.programs
    staged = staged_units(shapes.spec.ffn) if strategy.moves else 0
    staging = {"staging": RING * staged * host_unit}
    prediction = choose(
        shapes.spec, strategy.knobs, strategy.trained, fingerprint, skips=strategy.skips, places=strategy.places
    )
    for place in prediction.entries:
        programs.forms[prediction.scoring(place).name] = prediction.scoring(place)
    scores = [("score", shapes.batch, name) for name in programs.forms]
    temporaries = max([layout.temporaries, *(programs.temp_bytes(*key) for key in scores)])
    kept = shapes.batch * shapes.spec.ffn * (1 + len(prediction.entries))  # scores [B, F]
    fixed = fixed_bytes(shapes, temporaries + kept) | staging | {"predictors": prediction.bytes}
    total = layout.budget_bytes
    if layout.unlimited:
        total += sum(fixed.values()) - sum(layout.fixed.values())
    grown = replace(
        layout,
        temporaries=temporaries,
        fixed=fixed,
        budget_bytes=total,
        pool_bytes=budget.pool_budget(total, sum(fixed.values()), gpu=layout.gpu),
    )
    return grown, prediction, staged


def plan_host_bytes(strategy: Strategy, prediction: Prediction, spec: ModelSpec, staging: int) -> dict[str, int]:
    """What plans keep in host memory: staging, and by neuron frequencies, masses, places and the newest scores."""
    if not strategy.planned:
        return {"staging": 0, "statistics": 0}
    by_neuron = (4 + 4 + 4 + 8 + 4 + 1 + len(prediction.entries) // max(1, spec.layers)) * spec.layers * spec.ffn
    return {"staging": staging, "statistics": by_neuron}


def plan_for(model: str, config: EngineConfig) -> MemoryPlan:
    """The memory plan an engine would have; see `foresee`."""
    return foresee(model, config).memory


def foresee(model: str, config: EngineConfig, device: Target | None = None) -> Prepared:
    """What an engine would decide; reads config.json, statistics and predictors, of weights only what names them, if
    they are there.

    Its smallest budget is that of the mode an engine with such a budget would have: where this one is resident, other
    programs are compiled to know it.
    """
    folder = model_folder(model, offline=config.offline, config_only=True, progress=_silent)
    fingerprint, device = fingerprint_of(folder), device or jax.local_devices()[0]
    prepared = prepare(model, config, folder=folder, fingerprint=fingerprint, device=device)
    if prepared.host_mode != "resident":
        return prepared
    shapes, spec = replace(prepared.programs.shapes, cheap_chunks=False), prepared.spec
    strategy = resolve_any(config, spec, folder, fingerprint, device.platform)
    layout = lay_out_offloaded(config, strategy, shapes, device, _silent)
    if isinstance(strategy, MixtureStrategy):
        predictors = predictor_bytes(strategy, spec, config, folder, fingerprint)
        layout = with_buffers(layout, strategy, prepared.host_dtype, predictors)
    elif strategy.planned:
        layout = add_plans(layout, strategy, budget.unit_bytes(spec, prepared.host_dtype), fingerprint)[0]
    least = budget.smallest_budget(sum(layout.fixed.values()), gpu=layout.gpu)
    return replace(prepared, memory=replace(prepared.memory, smallest_budget_bytes=least))


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


def fingerprint_of(folder: Path) -> str | None:
    """Of the weights, if they are there: by it predictors and statistics are known. None: there is only a config."""
    try:
        return Checkpoint.open(folder).fingerprint()
    except (ModelError, StorageError):
        return None


def generation(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """advice, bos_id and eos_ids: config.json's, and what generation_config.json adds. ModelError for ids without a
    row in the embedding."""
    advice = read_generation_config(folder) if folder.is_dir() else {}
    bos, eos = advice.get("bos_token_id"), advice.get("eos_token_id", [])
    if outside := [token for token in [*eos, *([] if bos is None else [bos])] if token >= spec.vocab]:
        raise ModelError(f"{folder}/{GENERATION_NAME} names token {outside[0]}, the model has {spec.vocab}")
    ids = tuple(dict.fromkeys([*spec.eos_ids, *eos]))
    return {"advice": advice, "bos_id": spec.bos_id if bos is None else bos, "eos_ids": ids}


def resolve_dtypes(config: EngineConfig, spec: ModelSpec, platform: str) -> tuple[str, str]:
    """(device, host) types. `auto` is the checkpoint's; on the CPU backend float32 where its own products are too slow
    without the host's kernels, or where host memory is to have a type that fills no other pool."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = config.host_dtype if is_packed(config.host_dtype) else spec.dtype
        if platform == "cpu" and dtype != "float32" and (reason := ffi.unavailable()) is not None:
            log.warning("weights become float32, the kernels for %s are missing: %s", dtype, reason)
            dtype = "float32"
        elif platform == "cpu" and config.host_dtype not in ("auto", dtype):
            dtype = "float32"
    elif platform == "cpu" and dtype != "float32" and (reason := ffi.unavailable()) is not None:
        log.warning(
            "--dtype %s is many times slower than float32 here, the kernels for it are missing: %s", dtype, reason
        )
    host_dtype = config.host_dtype
    if host_dtype == "auto":
        host_dtype = spec.dtype if dtype == "float32" else dtype
    if host_dtype != dtype and not (dtype == "float32" and DTYPE_BYTES.get(host_dtype) == 2):
        raise UsageError(
            f"--host-dtype {host_dtype} cannot fill a {dtype} pool: the two must be equal, "
            "or the host 16-bit and the device float32"
        )
    check_packable(config, spec, dtype)
    return dtype, host_dtype


def check_packable(config: EngineConfig, spec: ModelSpec, dtype: str) -> None:
    """UsageError if matrices of this model, or for this host, cannot be packed."""
    if not is_packed(dtype):
        return
    if odd := sorted(width for width in {*spec.row_widths, spec.unit_width} if width % GROUP):
        raise UsageError(f"--dtype {dtype} needs rows of a multiple of {GROUP}, this model has some of {odd[0]}")
    if config.host_dense != "own":
        raise UsageError(f"--host-dense {config.host_dense} multiplies no {dtype} weights: use own")


def resolve_kv_dtype(dtype: str, platform: str) -> str:
    """The type of keys and values: the weights', beside packed ones float16, on the CPU backend float32."""
    if not is_packed(dtype):
        return dtype
    return "float32" if platform == "cpu" else "float16"


def resolve_ctx(config: EngineConfig, spec: ModelSpec) -> int:
    """KV rows per sequence: what was asked for, else the model's maximum up to 4,096."""
    if config.ctx is not None and config.ctx > spec.max_positions:
        raise UsageError(f"--ctx must be at most the model's {spec.max_positions} positions, got {config.ctx}")
    return config.ctx if config.ctx is not None else min(spec.max_positions, DEFAULT_CTX)


def load_statistics(stats: str, folder: Path, spec: ModelSpec, fingerprint: str | None) -> Statistics:
    """All there are."""
    frequency = load_frequency(stats, folder, spec, fingerprint)
    path = stats_path(folder) if stats == "auto" else Path(stats)
    if stats == "none" or not path.exists():
        return Statistics(frequency)
    return Statistics(frequency, *read_contributions(path, spec))


def load_frequency(
    stats: str, folder: Path, spec: ModelSpec, fingerprint: str | None
) -> npt.NDArray[np.float32]:  # [L, F]
    """Activation frequencies from a file or the model folder; all zero where there are none."""
    path = stats_path(folder) if stats == "auto" else Path(stats)
    if stats == "none" or (stats == "auto" and not path.exists()):
        return np.zeros((len(spec.unit_layers), spec.units), np.float32)
    return read_stats(path, spec, fingerprint)
