"""From a mixture of experts and the user's wishes to what will run; see `engine.planning`. Loads no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dynajax import budget
from dynajax.config import EngineConfig, ModelSpec, stored_bytes
from dynajax.engine.layout import Layout
from dynajax.engine.mixture.foretelling import corrections_folder, foretelling_bytes
from dynajax.engine.mixture.strategy import MixtureStrategy
from dynajax.transfer import RING, piece_rows

MOST_BUFFERS = 8  # experts that can pass through the device at a time


def with_buffers(layout: Layout, strategy: MixtureStrategy, host_dtype: str, predictors: int) -> Layout:
    """The layout with what bringing experts in needs beside the pool: pieces on their way, buffers that experts pass
    through, and the bytes of what foretells them."""
    spec, shapes = layout.programs.shapes.spec, layout.programs.shapes
    pieces = RING * piece_bytes(spec, host_dtype)
    if not strategy.moves:  # the pool is filled before anything else needs the memory of temporaries
        return _grown(layout, {"scratch": layout.fixed["scratch"] + max(0, pieces - layout.temporaries)})
    staging = pieces + buffers_of(spec) * budget.unit_bytes(spec, shapes.dtype)
    return _grown(layout, {"staging": staging, "predictors": predictors})


def predictor_bytes(
    strategy: MixtureStrategy, spec: ModelSpec, config: EngineConfig, folder: Path, fingerprint: str | None
) -> int:
    """On the device; UsageError for predictors that were asked for and cannot be had."""
    kind = strategy.parts.prefetch
    if not strategy.moves or kind in ("none", "count"):
        return 0
    asked = config.prefetch != "auto"
    trained = corrections_folder(kind, folder, config.predictor, fingerprint, asked=asked, says=False)
    return foretelling_bytes(spec, kind, strategy.knobs.lead, trained, fingerprint)


def buffers_of(spec: ModelSpec) -> int:
    """Slots that experts pass through, of all layers: two that take turns, more where they are less than 1 % of all.

    Measured in replay (`benchmarks/expert_cache.py`): eight of them save a fifth of the time at 16 rows."""
    return max(2, min(MOST_BUFFERS, len(spec.unit_layers) * spec.units // 100))


def _grown(layout: Layout, more: dict[str, int]) -> Layout:
    fixed = layout.fixed | more
    total = layout.budget_bytes
    if layout.unlimited:
        total += sum(fixed.values()) - sum(layout.fixed.values())
    left = budget.pool_budget(total, sum(fixed.values()), gpu=layout.gpu)
    return replace(layout, fixed=fixed, budget_bytes=total, pool_bytes=left)


def piece_bytes(spec: ModelSpec, host_dtype: str) -> int:
    """Bytes of an expert that are sent at a time."""
    row = stored_bytes(spec.hidden, host_dtype)
    return piece_rows(spec.unit_rows, row) * row


def host_extra(strategy: MixtureStrategy, spec: ModelSpec) -> dict[str, int]:
    """What plans keep in host memory: by expert its place, workload and scores."""
    by_expert = 48 * len(spec.unit_layers) * spec.units
    return {"staging": 0, "statistics": by_expert if strategy.planned else 0}
