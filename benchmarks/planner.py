"""Time of one layer's decision: window, swaps, thresholds, books and frequencies, as the scheduler thread pays for it.

python -m benchmarks.planner --units 13824 --pool 0.4 --repeat 300
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from dynajax.benching.machine import machine
from dynajax.config import PolicyConfig
from dynajax.plan import Placement
from dynajax.policy.costs import Costs
from dynajax.policy.planner import NeuronPlanner

LAYERS = 8  # planned in turn, so that a layer's arrays are not always in the nearest cache
COSTS = Costs(t0_s=2e-5, t_gather_s=7e-7, t_trans_s=1.4e-6, t_gpu_s=5e-8, t_cpu_s=7e-7, t_sync_s=1e-4)
WARM_UP = 5


def make_planner(units: int, pool: float, config: PolicyConfig, rng: np.random.Generator) -> NeuronPlanner:
    """Skewed frequencies, the most frequent units on the device, every unit with its own mass."""
    frequency = (rng.random((LAYERS, units)) ** 4).astype(np.float32)
    order = np.argsort(-frequency, axis=1, kind="stable")[:, : int(pool * units)]
    placement = Placement(tuple(np.sort(row).astype(np.int32) for row in order), units)
    mass = rng.random((LAYERS, units)).astype(np.float32)
    return NeuronPlanner(placement, frequency, "dynamic", config, mass)


def draw_scores(planner: NeuronPlanner, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, LAYERS, F] uint8: the frequency and some noise, so that every token wants other units."""
    frequency = np.stack([planner.frequency(layer) for layer in range(LAYERS)])
    noise = 0.3 * rng.standard_normal((count, *frequency.shape), dtype=np.float32)
    return (255 * np.clip(frequency + noise, 0, 1)).astype(np.uint8)


def measure(args: argparse.Namespace, rule: str) -> dict[str, object]:
    """Seconds of plan + applied + observe, layer by layer."""
    rng = np.random.default_rng(0)
    config = PolicyConfig(swap_rule=rule)  # ty: ignore[invalid-argument-type]
    planner = make_planner(args.units, args.pool, config, rng)
    scores = draw_scores(planner, 16, rng)
    live = scores >= 128
    window = int(args.window * live.mean() * args.units)
    times_s, moved = [], 0
    for step in range(WARM_UP + args.repeat):
        for layer in range(LAYERS):
            score, is_live = scores[step % 16, layer], live[step % 16, layer]
            begin = time.perf_counter()
            plan = planner.plan(layer, score, window, COSTS)
            planner.applied(layer, plan)
            planner.observe(layer, is_live)
            if step >= WARM_UP:
                times_s.append(time.perf_counter() - begin)
                moved += len(plan.units)
    planner.check()
    p10, median, p90 = (round(1e6 * float(np.percentile(times_s, q)), 1) for q in (10, 50, 90))
    return {"swap_rule": rule, "p10_us": p10, "median_us": median, "p90_us": p90, "moved": moved / len(times_s)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=13824)
    parser.add_argument("--pool", type=float, default=0.4)
    parser.add_argument("--window", type=float, default=0.25, help="swaps allowed, as a share of the live units")
    parser.add_argument("--repeat", type=int, default=300)
    args = parser.parse_args(argv)
    rows = [measure(args, rule) for rule in ("paper", "gain")]
    print(json.dumps({"machine": machine(), "units": args.units, "slots": int(args.pool * args.units), "rows": rows}))


if __name__ == "__main__":
    main()
