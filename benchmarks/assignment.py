"""Assignments of live experts to device and host: how far from the optimum, and how long a decision takes.

python -m benchmarks.assignment
python -m benchmarks.assignment --cases 1000 --large 40 --repeat 200

Up to 12 live experts all choices are tried, beyond that HiGHS proves a lower bound. The random cases have tokens all
one, few, many or skewed, any share resident, any room, half of them a busy link, and costs over one to two and a half
powers of ten each, so that either side may be the slower one. Times: experts of Qwen3-30B-A3B, half of them resident.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from dynajax.benching.machine import machine
from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.presets import PRESETS
from dynajax.policy.experts.records import Bools, ExpertCosts, Ints, Work, makespan

# An expert of Qwen3-30B-A3B in 16 bits: PCIe 25 GB/s, host 50 GB/s and 0.8 TFLOP/s, device 800 GB/s and 60 TFLOP/s.
COSTS = ExpertCosts(
    t0_s=1e-5, t_trans_s=3.8e-4, gpu_s=1.2e-5, gpu_token_s=1.6e-7, cpu_s=1.9e-4, cpu_token_s=1.2e-5, t_sync_s=5e-5
)
SMALL = 12  # live experts, of which all choices are tried
LIVE = (1, 2, 4, 8, 16, 32, 64, 128)  # that decisions are timed for


def work_of(tokens: npt.ArrayLike, resident: npt.ArrayLike, room: int = 99, **more: Any) -> Work:
    """A Work of the experts 0, 1, ..."""
    tokens, resident = np.array(tokens), np.array(resident, np.bool_)
    return Work(experts=np.arange(len(tokens), dtype=np.int32), tokens=tokens, resident=resident, room=room, **more)


def draw_costs(rng: np.random.Generator) -> ExpertCosts:
    """Every cost over one to two and a half powers of ten."""
    powers = {
        "t0_s": (-6, -4),
        "t_trans_s": (-4, -2),
        "gpu_s": (-5, -3),
        "gpu_token_s": (-7, -4.5),
        "cpu_s": (-4.5, -3),
        "cpu_token_s": (-6, -3.5),
        "t_sync_s": (-6, -4),
    }
    return ExpertCosts(**{name: float(10 ** rng.uniform(low, high)) for name, (low, high) in powers.items()})


def draw_work(rng: np.random.Generator, live: int) -> Work:
    """Tokens all one, few, many or skewed; any share resident, any room; half a busy link, a quarter a busy host."""
    tokens = (
        np.ones(live, np.int64),
        rng.integers(1, 5, live),
        rng.integers(1, 200, live),
        np.maximum(1, rng.lognormal(1, 1.5, live).astype(np.int64)),
    )[rng.integers(4)]
    return work_of(
        tokens,
        rng.random(live) < rng.random(),
        room=int(rng.integers(0, live + 1)),
        copy_busy_s=float(10 ** rng.uniform(-4, -2)) if rng.random() < 0.5 else 0.0,
        host_busy_s=float(10 ** rng.uniform(-4, -2.5)) if rng.random() < 0.25 else 0.0,
    )


def all_choices(work: Work) -> Bools:
    """[n, A] every assignment that keeps to the room."""
    live = len(work.tokens)
    on_gpu = ((np.arange(2**live)[:, None] >> np.arange(live)) & 1).astype(np.bool_)
    return on_gpu[np.count_nonzero(on_gpu & ~work.resident, axis=1) <= work.room]


def optimum(work: Work, costs: ExpertCosts) -> float:
    """The least makespan of all choices."""
    return float(makespan(work, all_choices(work), costs).min())


class _Program:
    """Rows of an integer program; variables: n on the device, n used, any fetch, any on the host, makespan."""

    def __init__(self, count: Ints) -> None:
        self.count = count.astype(np.float64)
        self.rows: list[npt.NDArray[np.float64]] = []
        self.limits: list[float] = []

    def row(self, limit: float, x=0.0, used=0.0, *, fetch=0.0, on_host=0.0, span=0.0) -> None:
        """Sum of coefficients times variables <= limit."""
        n = len(self.count)
        self.rows.append(np.concatenate((np.zeros(n) + x, np.zeros(n) + used, [fetch, on_host, span])))
        self.limits.append(limit)

    def bound(self, gap: float, seconds: float) -> float:
        """A proven lower bound of the makespan."""
        n = len(self.count)
        found = milp(
            np.append(np.zeros(2 * n + 2), 1.0),
            constraints=LinearConstraint(np.array(self.rows), ub=np.array(self.limits)),
            integrality=np.append(np.ones(2 * n + 2), 0),
            bounds=Bounds(0, np.concatenate((self.count, np.ones(n + 2), [np.inf]))),
            options={"mip_rel_gap": gap, "time_limit": seconds},
        )
        assert found.mip_dual_bound is not None, found.message
        return found.mip_dual_bound


def milp_bound(work: Work, costs: ExpertCosts, gap: float = 1e-3, seconds: float = 5.0) -> float:
    """A proven lower bound of the least makespan, within `gap` of it if HiGHS has time enough.

    Experts of a class with equal tokens are one whole variable. Of the flow shop there is one row for each number of
    tokens w: busy + copy (fetched with >= w) + gpu(w) if one has w + gpu of the lighter ones <= makespan.
    """
    keys = np.stack((work.resident, -work.tokens), axis=1).astype(np.int64)
    keys, count = np.unique(keys, axis=0, return_counts=True)  # absent ones first, heaviest first
    absent, tokens = keys[:, 0] == 0, -keys[:, 1].astype(np.float64)
    unit = float(count @ costs.cpu(tokens)) + work.host_busy_s
    gpu, cpu = costs.gpu(tokens) / unit, costs.cpu(tokens) / unit
    copy, busy, host, sync = (s / unit for s in (costs.copy_s, work.copy_busy_s, work.host_busy_s, costs.t_sync_s))
    program = _Program(count)
    program.row(-float(count @ cpu) - host, -cpu, on_host=sync, span=-1)
    program.row(0, gpu, span=-1)
    program.row(work.room, absent)
    program.row(0, absent * gpu, fetch=busy + copy, span=-1)
    if work.host_busy_s:
        program.row(-1, on_host=-1)
    for i, one in enumerate(np.eye(len(count))):
        program.row(-1, -one / count[i], on_host=-1)  # on the host is somebody unless all are on the device
        if absent[i]:
            program.row(0, -one, one)
            program.row(0, one, -count[i] * one)
            program.row(0, 0, one, fetch=-1)
            heavier, lighter = absent & (np.arange(len(count)) <= i), absent & (np.arange(len(count)) > i)
            program.row(0, heavier * copy + lighter * gpu, one * gpu[i], fetch=busy, span=-1)
    return program.bound(gap, seconds) * unit


def quality(cases: Sequence[tuple[Work, ExpertCosts, float]], name: str) -> dict[str, float]:
    """Optimum, or its bound, over the makespan found: mean and worst."""
    found = np.array([best / makespan(work, ASSIGN[name](work, costs).on_gpu, costs) for work, costs, best in cases])
    return {"mean": round(float(found.mean()), 5), "worst": round(float(found.min()), 4)}


def median_us(run: Callable[[], object], repeat: int) -> float:
    """Of `repeat` calls, after some to warm up."""
    times_s = []
    for _ in range(repeat + 5):
        begin = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - begin)
    return round(1e6 * float(np.median(times_s[5:])), 1)


def drawn_tokens(rng: np.random.Generator, live: int) -> Ints:
    """One each for up to 8 live experts, as a single row has it."""
    return np.ones(live, np.int64) if live <= 8 else rng.integers(1, 9, live)


def assign_us(name: str, repeat: int) -> dict[int, float]:
    """{live experts: median of a decision}."""
    rng, found = np.random.default_rng(0), {}
    for live in LIVE:
        resident = rng.permutation(live) < live // 2
        work = work_of(drawn_tokens(rng, live), resident, last_used=rng.integers(0, 9, live))
        found[live] = median_us(lambda: ASSIGN[name](work, COSTS), repeat)
    return found


def step_us(repeat: int) -> dict[int, float]:
    """{live of 128 experts: median of all that `auto` does for a layer-step: plan, observe, background, books}."""
    rng, found = np.random.default_rng(0), {}
    for live in LIVE:
        planner = ExpertPlanner(1, 128, PRESETS["auto"], ExpertConfig(), [np.arange(64)])

        def step() -> None:
            tokens = np.zeros(128, np.int64)
            tokens[rng.permutation(128)[:live]] = drawn_tokens(rng, live)
            plan = planner.plan_step(0, tokens, COSTS)
            planner.observe(0, tokens)
            planner.applied(0, plan.units, plan.slots)
            swaps = planner.background(0, COSTS, 1e-3)
            planner.applied(0, swaps.units, swaps.slots)

        found[live] = median_us(step, repeat)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help=f"of up to {SMALL} live experts")
    parser.add_argument("--large", type=int, default=40, help="cases of 20 to 128 live experts")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    small, large = [], []
    for _ in range(args.cases):
        work, costs = draw_work(rng, int(rng.integers(1, SMALL + 1))), draw_costs(rng)
        small.append((work, costs, optimum(work, costs)))
    for _ in range(args.large):
        work, costs = draw_work(rng, int(rng.integers(20, 129))), draw_costs(rng)
        large.append((work, costs, milp_bound(work, costs)))
    print(f"{'':18} {'up to 12: mean':>14} {'worst':>6} {'20 to 128: mean':>15} {'worst':>6}   us at", *LIVE, "live")
    rows = []
    for name in ASSIGN:
        row = {"assign": name, "small": quality(small, name), "large": quality(large, name)}
        row["us"] = assign_us(name, args.repeat)
        rows.append(row)
        parts = (row["small"]["mean"], row["small"]["worst"], row["large"]["mean"], row["large"]["worst"])
        print(f"{name:18} {parts[0]:14.4f} {parts[1]:6.3f} {parts[2]:15.4f} {parts[3]:6.3f}  ", *row["us"].values())
    steps = step_us(args.repeat)
    print(f"{'a whole step':64}  ", *steps.values())
    figures = {"machine": machine(), "cases": args.cases, "large": args.large, "rows": rows, "step_us": steps}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
