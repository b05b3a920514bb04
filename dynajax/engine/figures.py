"""Counts of live and computed units, from wherever an engine keeps them, as the figures of a Result and of stats()."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.config import ModelSpec
from dynajax.engine.ledger import Books
from dynajax.engine.mixture.figures import experts_of, mixture_layers_of
from dynajax.engine.opening import Parts
from dynajax.engine.plans import Plans
from dynajax.engine.prediction import Prediction
from dynajax.engine.result import Units, ratio
from dynajax.engine.skipping import SkippingRunner
from dynajax.scheduler import Moves

log = logging.getLogger(__name__)

ALARM_GAP = 0.1  # of recall, below what a predictor's manifest promises
ALARM_UNITS = 200  # live neurons that must have been looked for


def units_of(parts: Parts) -> Units:
    """Shares weighted by counts over layers and decoded tokens."""
    if parts.prepared.spec.experts is not None:
        return experts_of(parts)
    if isinstance(parts.runner, SkippingRunner):
        _warn(parts.runner, parts.runner.predictors.prediction, parts.runner.books, parts.prepared.spec)
        return _booked(parts.runner.books, parts.prepared.spec, None, skips=True)
    return _counted(parts) if parts.plans is None else _planned(parts, parts.plans)


def _counted(parts: Parts) -> Units:
    """Where nothing is skipped or moved."""
    spec, counters, rows = parts.prepared.spec, parts.cold.counters, parts.stepper.rows
    hot_live = parts.stepper.live_slots()
    hot, live = int(hot_live.sum()), int(hot_live.sum()) + counters.live
    later_hot = hot - int(hot_live[0])
    later_live = live - int(hot_live[0]) - counters.live_first_layer
    hot_computed = sum(parts.pool.slots) * rows
    return Units(
        kind="neuron",
        live_per_token=ratio(live, rows),
        hot_share=ratio(hot, live),
        hot_share_layers_ge_1=ratio(later_hot, later_live),
        computed_hot_share=ratio(hot_computed, hot_computed + counters.computed),
        migrated=0,
        migrated_bytes=0,
        late_plans=0,
        density=ratio(live, rows * spec.layers * spec.ffn),
        recall=None,
    )


def _planned(parts: Parts, plans: Plans) -> Units:
    scheduler, books, spec = plans.runner.scheduler, plans.runner.ledger.books, parts.prepared.spec
    assert scheduler is not None, "no scheduler was started"
    scheduler.settle()
    if plans.runner.predictors is not None and plans.runner.wishes.skips:
        _warn(plans, plans.runner.predictors.prediction, books, spec)
    return _booked(books, spec, scheduler.moves, skips=parts.prepared.strategy.skips)


def _booked(books: Books, spec: ModelSpec, moves: Moves | None, *, skips: bool) -> Units:
    """What is live in predicted mode is from the sampled exact checks. moves None: nothing can."""
    live, hot = books.seen_live, books.seen_hot
    computed = _total(books.hot_computed) + _total(books.cold_computed)
    used, rows = (computed, _total(books.rows)) if skips else (_total(live), _total(books.seen_rows))
    return Units(
        kind="neuron",
        live_per_token=_scaled(live, books.seen_rows, spec.layers),
        hot_share=ratio(_total(hot), _total(live)),
        hot_share_layers_ge_1=ratio(_total(hot[1:]), _total(live[1:])),
        computed_hot_share=ratio(_total(books.hot_computed), computed),
        migrated=0 if moves is None else _total(moves.migrated),
        migrated_bytes=0 if moves is None else _total(moves.migrated_bytes),
        late_plans=0 if moves is None else _total(moves.late),
        density=ratio(used, rows * spec.ffn),
        recall=ratio(_total(books.seen_computed), _total(live)) if skips else None,
    )


def layers_of(parts: Parts) -> list[dict[str, Any]]:
    """One record a layer of what `stats` tells of decoding, of the last generation."""
    plans = parts.plans
    if parts.mixture is not None:
        return mixture_layers_of(parts.mixture)
    if plans is None or plans.runner.scheduler is None:
        return []
    scheduler, books = plans.runner.scheduler, plans.runner.ledger.books
    scheduler.settle()
    moves, slots = scheduler.moves, parts.pool.slots
    alarms = {}
    if plans.runner.predictors is not None and plans.runner.wishes.skips:
        alarms = alarms_of(plans.runner.predictors.prediction, books, parts.prepared.spec)
    records = []
    for layer, last in enumerate(scheduler.last):
        live = int(books.seen_live[layer])
        records.append(
            {
                "layer": layer,
                "slots": slots[layer],
                "hot_share": ratio(int(books.seen_hot[layer]), live),
                "recall": ratio(int(books.seen_computed[layer]), live),
                "live_per_token": ratio(live, int(books.seen_rows[layer])),
                "computed_per_token": ratio(
                    int(books.hot_computed[layer] + books.cold_computed[layer]), int(books.rows[layer])
                ),
                "plans": int(moves.plans[layer]),
                "late_plans": int(moves.late[layer]),
                "migrated": int(moves.migrated[layer]),
                "migrated_bytes": int(moves.migrated_bytes[layer]),
                "plan_us": ratio(1e6 * float(moves.plan_s[layer]), int(moves.plans[layer])),
                "theta_g": None if last is None else int(last.theta_g) / 255,
                "theta_c": None if last is None else int(last.theta_c) / 255,
                "alarm": layer in alarms,
            }
        )
    return records


def alarms_of(prediction: Prediction, books: Books, spec: ModelSpec) -> dict[int, tuple[float, float]]:
    """{layer: (recall, what its predictor's manifest promises at this density)}, of the last generation; only where the
    first is clearly lower, and enough was looked at."""
    found = {}
    computed = books.hot_computed + books.cold_computed
    for layer, live in enumerate(books.seen_live.tolist()):
        place = prediction.skipping(layer)
        metrics = None if place is None else prediction.entries[place].metrics
        if metrics is None or live < ALARM_UNITS:
            continue
        promised = promised_recall(metrics, float(computed[layer] / (books.rows[layer] * spec.ffn)))
        recall = float(books.seen_computed[layer] / live)
        if promised is not None and recall < promised - ALARM_GAP:
            found[layer] = recall, promised
    return found


def promised_recall(metrics: Mapping[str, Any], density: float) -> float | None:
    """Of a manifest entry, at a share of neurons computed; None if it does not say. Straight lines between what it
    knows: recall {"1.0": 0.8, "2.0": 1.0} at density 0.1 gives 0.9 for 0.15, and 0.4 for 0.05."""
    try:
        known = sorted(
            (float(factor) * metrics["density"], float(recall)) for factor, recall in metrics["recall"].items()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    shares, recalls = zip((0.0, 0.0), *known, strict=True)
    return float(np.interp(density, shares, recalls))


def _warn(once: Plans | SkippingRunner, prediction: Prediction, books: Books, spec: ModelSpec) -> None:
    """Once an engine: the predictors do worse here than where they were trained."""
    alarms = {} if once.alarmed else alarms_of(prediction, books, spec)
    if alarms:
        once.alarmed = True
        layer = min(alarms, key=lambda layer: alarms[layer][0] - alarms[layer][1])
        found, promised = (100 * share for share in alarms[layer])
        log.warning("the predictors of %d of %d layers find fewer live neurons than they promise, of layer %d %.0f%% "
                    "instead of %.0f%%: train them on text like this", len(alarms), spec.layers, layer,
                    found, promised)  # fmt: skip


def _total(counts: npt.NDArray[np.int64]) -> int:
    return int(counts.sum())


def _scaled(counts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], layers: int) -> float | None:
    """Units a token over all layers, each layer's from the rows that were looked at."""
    if not rows.all():
        return None
    return float((counts / rows).sum())
