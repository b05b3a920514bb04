"""Expert caches and whole expert policies on routing traces: hits, loads, and the bounds of caches that load on demand.

python -m benchmarks.expert_cache --rows 1 8 16 --share 0.125 0.25 0.4 0.5
python -m benchmarks.expert_cache --trace routing.npz --share 0.25
python -m benchmarks.expert_cache --model tiny-moe --rows 1 8 16

Synthetic routing unless a trace is given: an .npz with `tokens` [steps, layers, experts], the tokens that each expert
had in each step; or a model, which reads the held-out texts: a row is a window of one of them, rows go side by side.
The first fifth of a trace gives the statistics that place experts. Times are modelled with the costs of one machine,
PCIe 25 GB/s, host memory 50 GB/s and 0.8 TFLOP/s, device 800 GB/s and 60 TFLOP/s, and experts of Qwen3-30B-A3B in 16
bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dynajax.benching.machine import machine
from dynajax.policy.experts.bounds import Bound, ceiling, lru_on_demand, min_bypass, weighted_bypass
from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.prefetch import CountPredictor
from dynajax.policy.experts.presets import PRESETS, ExpertPolicy, expert_policy
from dynajax.policy.experts.records import ExpertCosts
from dynajax.policy.experts.replay import replay
from dynajax.policy.experts.synthetic import RECIPES, draw_routing

TEXTS = Path(__file__).parents[1] / "tests" / "data" / "heldout"
WINDOW, MOST_WINDOWS, MOST_STEPS = 256, 48, 1536
EXPERT_BYTES = 3 * 2048 * 768 * 2
EXPERT_FLOP = 2 * 3 * 2048 * 768  # per token
COSTS = ExpertCosts(
    t0_s=1e-5,
    t_trans_s=EXPERT_BYTES / 25e9,
    gpu_s=EXPERT_BYTES / 800e9,
    gpu_token_s=EXPERT_FLOP / 60e12,
    cpu_s=EXPERT_BYTES / 50e9,
    cpu_token_s=EXPERT_FLOP / 0.8e12,
    t_sync_s=5e-5,
)
DENSE_S = 2e-4  # a layer's attention and norms
STATISTICS = 5  # the first 1/5 of a trace
ALONE = {"decayed alone": "decayed", "dali alone": "dali"}  # cache policies that move nothing on demand


def policies() -> dict[str, ExpertPolicy]:
    """By the name of their row: the presets, and caches by themselves with background swaps only."""
    alone = {name: expert_policy("scan", assign="resident", cache=cache) for name, cache in ALONE.items()}
    return {**{name: PRESETS[name] for name in PRESETS if name not in ("layer-split", "none")}, **alone}


def traces(args: argparse.Namespace) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """(name, rows, [steps, L, E])."""
    if args.trace:
        with np.load(args.trace) as file:
            yield args.trace, None, np.asarray(file["tokens"], np.int64)
        return
    if args.model:
        live = routing_of(args.model)
        for rows in args.rows:
            yield args.model, rows, side_by_side(live, rows)
        return
    for recipe in args.recipe:
        for rows in args.rows:
            rng = np.random.default_rng(args.seed)
            yield (
                recipe,
                rows,
                draw_routing(RECIPES[recipe], args.steps, args.layers, args.experts, args.top_k, rows, rng),
            )


def routing_of(model: str) -> np.ndarray:
    """Which experts every token of every window of the held-out texts goes to [windows, WINDOW, M, E], texts mixed."""
    from dynajax import Engine

    seen: list[np.ndarray] = []
    with Engine.from_pretrained(model, ctx=WINDOW + 1, offline=True) as engine:
        parts = engine._open_parts()
        windows = []
        for path in sorted(TEXTS.glob("*.txt")):
            ids = parts.encode(path.read_text(encoding="utf-8"))
            windows += [ids[at : at + WINDOW + 1] for at in range(0, len(ids) - WINDOW, WINDOW)]
        order = np.random.default_rng(0).permutation(len(windows))[:MOST_WINDOWS]
        engine.watch(lambda told: seen.append(told.live))
        for number in order:
            engine.score(windows[number])
    layers = len(seen) // len(order)
    return np.stack([np.stack(seen[at : at + layers], axis=1) for at in range(0, len(seen), layers)])


def side_by_side(live: np.ndarray, rows: int) -> np.ndarray:
    """[steps, M, E] tokens of every expert where so many windows are read together, one group after the other."""
    groups = [live[at : at + rows].sum(axis=0, dtype=np.int64) for at in range(0, len(live) - rows + 1, rows)]
    return np.concatenate(groups[: max(1, MOST_STEPS // live.shape[1])])


def bounds_of(trace: np.ndarray, buckets: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """Rows of what needs no planner."""
    layers = range(trace.shape[1])
    live, tokens, layer_steps = np.count_nonzero(trace), trace.sum(), trace.shape[0] * trace.shape[1]

    def row(found: Sequence[Bound]) -> dict[str, float]:
        hits, hit_tokens, loads = (sum(getattr(b, name) for b in found) for name in ("hits", "tokens", "loads"))
        return {"hits": hits / live, "weighted_hits": hit_tokens / tokens, "loads": loads / layer_steps}

    kinds = {"lru on demand": lru_on_demand, "MIN, bypass": min_bypass, "bound, weighted": weighted_bypass}
    rows = {
        name: row([kind(trace[:, layer], buckets[layer], len(buckets[layer])) for layer in layers])
        for name, kind in kinds.items()
    }
    best = [ceiling(trace[:, layer], len(buckets[layer])) for layer in layers]
    rows["ceiling"] = {"hits": sum(b[0] for b in best) / live, "weighted_hits": sum(b[1] for b in best) / tokens}
    return rows


def measure(trace: np.ndarray, share: float, transit: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """{name: figures} for slots for `share` of the experts in every layer."""
    first = max(1, len(trace) // STATISTICS)
    statistics, trace = trace[:first].sum(axis=0), trace[first:]
    _, layers, experts = trace.shape
    slots = max(1, round(share * experts))
    buckets = [np.argsort(-row, kind="stable")[:slots].astype(np.int32) for row in statistics]
    frequency = statistics / first
    rows = bounds_of(trace, buckets)
    for name in names:
        policy, config = policies()[name], ExpertConfig()
        planner = ExpertPlanner(layers, experts, policy, config, buckets, frequency)
        predict = None
        if policy.prefetch == "count":
            predict = counted(trace, config.count_decay)
        tally = replay(trace, planner, COSTS, dense_s=DENSE_S, transit=transit, predict=predict)
        rows[name] = {key: float(value) for key, value in tally.figures(EXPERT_BYTES).items()}
    return rows


def counted(trace: np.ndarray, decay: float):
    """The `count` predictor over a trace: before a step of a layer it has seen all steps before."""
    predictor = CountPredictor(trace.shape[1], trace.shape[2], decay)
    seen = [0] * trace.shape[1]

    def predict(step: int, layer: int) -> np.ndarray:
        while seen[layer] < step:
            predictor.observe(layer, trace[seen[layer], layer])
            seen[layer] += 1
        return predictor.predict(layer)

    return predict


def targets(results: Sequence[dict]) -> dict[str, float | None]:
    """How the default cache stands against LRU on demand, over all traces and shares, in points; None: not run."""
    gains, loads, closed = {1: [], 16: [], 0: []}, [], []
    for result in results:
        rows, policies = result["rows"], result["policies"]
        names = "lru on demand", "decayed alone", "bound, weighted"
        lru, ours, most = (policies[name]["weighted_hits"] for name in names)
        gains[1 if rows == 1 else 0].append(100 * (ours - lru))
        if rows == 1:
            closed.append((ours - lru) / (most - lru) if most > lru else 1.0)
        if rows == 16 and result["share"] == 0.25:
            gains[16].append(100 * (ours - lru))
            loads.append(policies["decayed alone"]["loads"])
    return {
        "least_gain_rows_1": min(gains[1], default=None),
        "least_gain_more_rows": min(gains[0], default=None),
        "least_gain_rows_16_share_25": min(gains[16], default=None),
        "most_loads_rows_16_share_25": max(loads, default=None),
        "closed_to_bound_rows_1": float(np.mean(closed)) if closed else None,
    }


COLUMNS = {  # of the table: heading, factor, format
    "hits": ("hits", 1, "6.3f"),
    "weighted_hits": ("weighted", 1, "8.3f"),
    "fetched": ("fetched", 1, "7.2f"),
    "prefetched": ("ahead", 1, "5.2f"),
    "swapped": ("swapped", 1, "7.2f"),
    "loads": ("loads", 1, "6.2f"),
    "layer_s": ("us", 1e6, "7.1f"),
    "over_best": ("/best", 1, "6.3f"),
}


def show(result: dict) -> None:
    """One table."""
    print(f"\n{result['trace']}, {result['rows']} rows, slots for {result['share']:.1%} of the experts")
    print(" " * 15, *(title.rjust(int(float(form[:-1]))) for title, _, form in COLUMNS.values()))
    for name, row in result["policies"].items():
        cells = []
        for key, (_, factor, form) in COLUMNS.items():
            width = int(float(form[:-1]))
            cells.append(format(factor * row[key], form) if key in row else "-".rjust(width))
        print(f"{name:15}", *cells)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help=".npz with tokens [steps, layers, experts]")
    parser.add_argument("--model", help="one whose routing of the held-out texts is replayed")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--share", type=float, nargs="+", default=[0.125, 0.25, 0.4, 0.5])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--policy", nargs="+", choices=policies(), default=list(policies()))
    parser.add_argument("--transit", type=int, default=0, help="slots for fetched experts that are not kept")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    results = []
    for name, rows, trace in traces(args):
        for share in args.share:
            figures = measure(trace, share, args.transit, args.policy)
            result = {"trace": name, "rows": rows, "share": share, "layers": trace.shape[1], "policies": figures}
            results.append(result)
            show(result)
    summary = targets(results) if "decayed alone" in args.policy else {}
    print(
        json.dumps(
            {"machine": machine(), "synthetic": not (args.trace or args.model), "targets": summary, "results": results}
        )
    )


if __name__ == "__main__":
    main()
