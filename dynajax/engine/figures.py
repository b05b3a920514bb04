"""Counts of live and computed units, from wherever an engine keeps them, as the figures of a Result and of stats()."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.engine.opening import Parts
from dynajax.engine.plans import Plans
from dynajax.engine.result import Units, ratio


def units_of(parts: Parts) -> Units:
    """Shares weighted by counts over layers and decoded tokens."""
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
    """From the ledger; what is live in predicted mode from the sampled exact checks."""
    scheduler, books, spec = plans.runner.scheduler, plans.runner.ledger.books, parts.prepared.spec
    assert scheduler is not None, "no scheduler was started"
    scheduler.settle()
    moves, live, hot = scheduler.moves, books.seen_live, books.seen_hot
    computed = _total(books.hot_computed) + _total(books.cold_computed)
    skips = parts.prepared.strategy.skips
    used, rows = (computed, _total(books.rows)) if skips else (_total(live), _total(books.seen_rows))
    return Units(
        kind="neuron",
        live_per_token=_scaled(live, books.seen_rows, spec.layers),
        hot_share=ratio(_total(hot), _total(live)),
        hot_share_layers_ge_1=ratio(_total(hot[1:]), _total(live[1:])),
        computed_hot_share=ratio(_total(books.hot_computed), computed),
        migrated=_total(moves.migrated),
        migrated_bytes=_total(moves.migrated_bytes),
        late_plans=_total(moves.late),
        density=ratio(used, rows * spec.ffn),
        recall=ratio(_total(books.seen_computed), _total(live)) if skips else None,
    )


def layers_of(parts: Parts) -> list[dict[str, Any]]:
    """One record a layer of what `stats` tells of decoding, of the last generation."""
    plans = parts.plans
    if plans is None or plans.runner.scheduler is None:
        return []
    scheduler, books = plans.runner.scheduler, plans.runner.ledger.books
    scheduler.settle()
    moves, slots = scheduler.moves, parts.pool.slots
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
            }
        )
    return records


def _total(counts: npt.NDArray[np.int64]) -> int:
    return int(counts.sum())


def _scaled(counts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], layers: int) -> float | None:
    """Units a token over all layers, each layer's from the rows that were looked at."""
    if not rows.all():
        return None
    return float((counts / rows).sum())
