"""A host mode with its programs, and where the budget goes."""

from __future__ import annotations

from dataclasses import dataclass

from dynajax import budget
from dynajax.config import EngineConfig
from dynajax.engine.hosts import Host, make_host
from dynajax.engine.largest import Progress, largest_temporary
from dynajax.engine.prediction import NONE, Prediction
from dynajax.engine.target import Target, budget_limit
from dynajax.programs import Programs, Shapes, make_programs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A host mode with its programs, and what the budget holds besides the pool."""

    mode: str
    host: Host | None
    programs: Programs
    temporaries: int  # bytes, of the program that needs most
    fixed: dict[str, int]
    budget_bytes: int
    pool_bytes: int  # what is left
    unlimited: bool  # the budget is whatever is needed
    gpu: bool
    prediction: Prediction = NONE  # by which resident neurons are skipped


def try_layout(
    config: EngineConfig,
    mode: str,
    shapes: Shapes,
    device: Target,
    progress: Progress,
    prediction: Prediction = NONE,  # of resident neurons
) -> Layout | None:
    """The layout of a mode. None if `mode` is resident and the units do not fit; nothing is compiled if that is sure.

    FitError if what every mode needs does not fit.
    """
    spec, gpu = shapes.spec, device.platform != "cpu"
    everything = len(spec.unit_layers) * spec.units * budget.unit_bytes(spec, shapes.dtype)
    limit = budget_limit(config, device)
    fixed = fixed_bytes(shapes, 0) | {"predictors": prediction.bytes}
    if mode == "resident" and limit is not None and sum(fixed.values()) + everything > limit:
        return None
    host, programs, temporaries = compiled_for(mode, shapes, progress, prediction)
    fixed = fixed_bytes(shapes, temporaries) | {"predictors": prediction.bytes}
    needed = sum(fixed.values())
    total = needed + everything if limit is None else limit
    left = total - budget.margin_bytes(total, gpu=gpu) - needed
    if mode == "resident" and left < everything:
        return None
    return Layout(
        mode=mode,
        host=host,
        programs=programs,
        temporaries=temporaries,
        fixed=fixed,
        budget_bytes=total,
        pool_bytes=budget.pool_budget(total, needed, gpu=gpu),
        unlimited=limit is None,
        gpu=gpu,
        prediction=prediction,
    )


def compiled_for(
    mode: str, shapes: Shapes, progress: Progress, prediction: Prediction = NONE
) -> tuple[Host | None, Programs, int]:
    """The host of a mode, its programs, and the bytes of temporaries that none of them exceeds."""
    host = make_host(mode, shapes.spec)
    programs = make_programs(shapes, None if host is None else host.call)
    if prediction is NONE:
        return host, programs, largest_temporary(programs, mode, progress)
    for place in prediction.entries:
        programs.forms[prediction.scoring(place).name] = prediction.scoring(place)
    keys: list[tuple] = [("score", shapes.chunks[-1], name) for name in programs.forms]
    keys.append(("token_skipping_rows", shapes.prefixes[-1], *prediction.foretold(shapes.spec.layers)))
    return host, programs, largest_temporary(programs, "skipping", progress, keys)


def fixed_bytes(shapes: Shapes, temporaries: int) -> dict[str, int]:
    """dense, kv and scratch: what must be on the device whatever the pool holds."""
    spec = shapes.spec
    workspace = budget.workspace_bytes(spec, shapes.ctx, shapes.batch, shapes.chunks[-1])
    return {
        "dense": budget.dense_bytes(spec, shapes.dtype),
        "kv": budget.kv_bytes(spec, shapes.kv_name, shapes.ctx, shapes.batch),
        "scratch": workspace + temporaries,
    }
