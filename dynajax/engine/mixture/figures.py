"""Counts of routed and computed experts as the figures of a Result and of stats()."""

from __future__ import annotations

from typing import Any

from dynajax.engine.mixture.books import Books
from dynajax.engine.mixture.mixture import Mixture
from dynajax.engine.opening import Parts
from dynajax.engine.result import Units, ratio


def experts_of(parts: Parts) -> Units:
    """Shares weighted by counts over layers and decoded tokens; live: a token and an expert that it goes to."""
    return _whole_tokens(parts) if parts.mixture is None else _planned(parts, parts.mixture)


def _whole_tokens(parts: Parts) -> Units:
    """Where a token is one program: residents there, the rest on the host, nothing moves."""
    spec, counters, rows = parts.prepared.spec, parts.cold.counters, parts.stepper.rows
    hot = parts.stepper.live_slots()
    units = spec.stepped_units
    live, first = int(hot.sum()) + counters.live, int(hot[spec.unit_layers[units[0]]]) if units else 0
    later = live - first - counters.live_first_layer
    return Units(
        kind="expert",
        live_per_token=ratio(live, rows),
        hot_share=ratio(int(hot.sum()), live),
        hot_share_layers_ge_1=ratio(int(hot.sum()) - first, later),
        computed_hot_share=ratio(int(hot.sum()), live),
        migrated=0,
        migrated_bytes=0,
        late_plans=0,
        density=ratio(live, rows * len(units) * spec.units),
        recall=None,
    )


def _planned(parts: Parts, mixture: Mixture) -> Units:
    mixture.runner.moves.settle()
    spec, books = parts.prepared.spec, mixture.runner.moves.books
    pairs, rows, units = int(books.pairs.sum()), parts.stepper.rows, spec.stepped_units
    later = slice(units.start + 1, None)
    return Units(
        kind="expert",
        live_per_token=ratio(pairs, rows),
        hot_share=ratio(int(books.hit_pairs.sum()), pairs),
        hot_share_layers_ge_1=ratio(int(books.hit_pairs[later].sum()), int(books.pairs[later].sum())),
        computed_hot_share=ratio(int(books.hot_pairs.sum()), pairs),
        migrated=int(books.loads.sum()),
        migrated_bytes=int(books.moved_bytes.sum()),
        late_plans=int(books.late.sum()),
        density=ratio(pairs, rows * len(units) * spec.units),
        recall=None,
    )


def mixture_layers_of(mixture: Mixture) -> list[dict[str, Any]]:
    """One record of every layer that has experts, of the last generation's decoding."""
    mixture.runner.moves.settle()
    layers, books = mixture.runner.layers, mixture.runner.moves.books
    return [_layer(books, m, layer, layers.pool.slots[m]) for m, layer in enumerate(layers.spec.unit_layers)]


def _layer(books: Books, m: int, layer: int, slots: int) -> dict[str, Any]:
    steps, pairs = int(books.steps[m]), int(books.pairs[m])
    moved = int(books.loads[m])
    host_s, device_s, makespan_s = (float(getattr(books, name)[m]) for name in ("cold_s", "device_s", "makespan_s"))
    return {
        "layer": layer,
        "slots": slots,
        "hit_share": ratio(int(books.hits[m]), int(books.live[m])),
        "weighted_hit_share": ratio(int(books.hit_pairs[m]), pairs),
        "computed_hot_share": ratio(int(books.hot_pairs[m]), pairs),
        "live_per_step": ratio(int(books.live[m]), steps),
        "fetched_per_step": ratio(int(books.fetched[m] + books.passed[m]), steps),
        "loads_per_step": ratio(moved, steps),
        "moved_bytes": int(books.moved_bytes[m]),
        "prefetched": int(books.prefetched[m]),
        "prefetch_used_share": ratio(int(books.useful[m]), int(books.prefetched[m])),
        "prefetch_recall": ratio(int(books.foretold_hits[m]), int(books.foretold[m])),
        "prefetch_top1": ratio(int(books.top1_hits[m]), int(books.top1[m])),
        "late": int(books.late[m]),
        "host_s": float(books.host_s[m]),
        "host_share": ratio(host_s, host_s + device_s),
        "host_idle_share": ratio(max(0.0, makespan_s - host_s), makespan_s),
        "device_idle_share": ratio(max(0.0, makespan_s - device_s), makespan_s),
        "makespan_over_best": ratio(makespan_s, float(books.best_s[m])),
    }
