"""Does the simulator predict the engine? Decoding speed of both, on the machine that this runs on.

    python scripts/profile_machine.py --out runs/here.json
    python -m benchmarks.simulator --hardware runs/here.json --synthetic runs/synth-1.1b

For each model, budget and policy an engine decodes the same prompt in predicted mode, in rounds that alternate between
policies; tokens of all rounds together give the median and the quartiles. The simulator gets the hardware file, the
placement and the activity of one recorded run, and nothing of the measured times. An order of two policies counts as
known where the quartiles of their tokens do not overlap. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.bandwidth import machine
from dynajax.config import NeuronPolicy
from dynajax.errors import ModelError
from dynajax.profiling.engine import opened, recorded, simulated_s, token_times
from dynajax.sim.activity import Activity
from dynajax.sim.hardware import Hardware, load_hardware

POLICIES: tuple[NeuronPolicy, ...] = ("static", "lru", "dynamic")
SHARES = (0.2, 0.5, 0.8)  # of the neurons on the device
MODELS = ("tiny-relullama", "smollm2-135m")
PROMPT = 32  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One policy at one budget: tokens a second, measured with quartiles, and simulated."""

    model: str
    share: float
    policy: str
    measured: float
    low: float
    high: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def measure(
    model: str, share: float, hardware: Hardware, activity: Activity, args: argparse.Namespace
) -> Iterator[Point]:
    """A point for each policy."""
    prompt = ids(args.seed, PROMPT, 2000)
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(opened(model, policy, share)) for policy in args.policies}
        times: dict[str, list[float]] = {policy: [] for policy in args.policies}
        for round_ in range(args.rounds + 1):
            for policy, engine in engines.items():
                found = token_times(engine, prompt, args.tokens)
                times[policy] += found if round_ else []  # the first compiles
        for policy, engine in engines.items():
            quick, median, slow = np.percentile(times[policy], [25, 50, 75])
            speed = 1 / simulated_s(engine._parts.prepared, activity, hardware)
            yield Point(model=model, share=share, policy=policy, measured=1 / median, low=1 / slow, high=1 / quick,
                        simulated=speed)  # fmt: skip


def ids(seed: int, count: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, count).tolist()


def orders(points: Sequence[Point]) -> tuple[int, int]:
    """(pairs of policies whose order is known, those that the simulator puts in that order)."""
    known = right = 0
    for a, b in combinations(points, 2):
        if (a.model, a.share) == (b.model, b.share) and (a.low > b.high or b.low > a.high):
            known += 1
            right += int((a.measured > b.measured) == (a.simulated > b.simulated))
    return known, right


def show(point: Point) -> None:
    print(
        f"{point.model:16} {point.share:4.0%} {point.policy:12} measured {point.measured:7.1f} tok/s "
        f"({point.low:.1f} to {point.high:.1f})  simulated {point.simulated:7.1f}  {point.error:+6.1%}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True, help="file that profile_machine.py wrote here")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--synthetic", help="folder of a generated checkpoint, measured too")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    hardware, points = load_hardware(args.hardware), []
    for model in [*args.models, *([args.synthetic] if args.synthetic else [])]:
        try:
            with opened(model, "lru", set={"record_scores": True}) as engine:
                activity = recorded(engine, ids(args.seed, PROMPT, 2000), args.tokens)
        except ModelError as error:
            print(f"{model}: left out: {error}")
            continue
        for share in args.shares:
            for point in measure(model, share, hardware, activity, args):
                points.append(point)
                show(point)
    known, right = orders(points)
    median = float(np.median([abs(point.error) for point in points]))
    figures = {"points": len(points), "median_error": round(median, 3), "known_orders": known, "right_orders": right}
    rows = [{"model": p.model, "share": p.share, "policy": p.policy, "measured": round(p.measured, 2),
             "simulated": round(p.simulated, 2), "error": round(p.error, 3)} for p in points]  # fmt: skip
    print(json.dumps({"machine": machine(), **figures, "rows": rows}))


if __name__ == "__main__":
    main()
