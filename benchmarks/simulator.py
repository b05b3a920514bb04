"""Does the simulator predict the engine? Decoding speed of both, on the machine that this runs on.

    python -m benchmarks.simulator --synthetic runs/synth-1.1b
    python -m benchmarks.simulator --models tiny-relullama --hardware runs/here.json

Each model's turn begins with a profile of the machine (or one is given), whose speed drifts where others use it. Then
for every budget engines of several policies decode the same prompt in predicted mode, in rounds that alternate between
them. The simulator gets the profile, the placement and the activity of one recorded run, and nothing of the measured
times. Compared is the faster quartile of all tokens, which is what the profile measures too; the median's error stands
beside it. An order of two policies counts as known where the quartiles of their tokens do not overlap. Ends in one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from dynajax.benching.machine import machine
from dynajax.config import NeuronPolicy
from dynajax.errors import ModelError
from dynajax.profiling import FULL, profile_machine
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
    median: float
    low: float  # the slower quartile
    high: float
    simulated: float

    @property
    def error(self) -> float:
        """Against the faster quartile."""
        return self.simulated / self.high - 1

    @property
    def median_error(self) -> float:
        return self.simulated / self.median - 1


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
            assert engine._parts is not None, "the engine is open"
            speed = 1 / simulated_s(engine._parts.prepared, activity, hardware)
            yield Point(model=model, share=share, policy=policy, median=1 / median, low=1 / slow, high=1 / quick,
                        simulated=speed)  # fmt: skip


def profiled() -> Hardware:
    """This machine as it is now."""
    return profile_machine(None, FULL, "now", lambda stage, done, total: None)


def ids(seed: int, count: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, count).tolist()


def orders(points: Sequence[Point]) -> tuple[int, int]:
    """(pairs of policies whose order is known, those that the simulator puts in that order)."""
    known = right = 0
    for a, b in combinations(points, 2):
        if (a.model, a.share) == (b.model, b.share) and (a.low > b.high or b.low > a.high):
            known += 1
            right += int((a.median - b.median) * (a.simulated - b.simulated) > 0)
    return known, right


def show(point: Point) -> None:
    print(
        f"{Path(point.model).name:16} {point.share:4.0%} {point.policy:8} measured {point.median:7.1f} tok/s "
        f"({point.low:.1f} to {point.high:.1f})  simulated {point.simulated:7.1f}  {point.error:+6.1%} of the faster "
        f"quartile, {point.median_error:+6.1%} of the median",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="file that profile_machine.py wrote here; default: a profile for each model")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--synthetic", help="folder of a generated checkpoint, measured too")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    points: list[Point] = []
    for model in [*args.models, *([args.synthetic] if args.synthetic else [])]:
        hardware = load_hardware(args.hardware) if args.hardware else profiled()
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
    figures = {
        "points": len(points),
        "median_error": round(float(np.median([abs(point.error) for point in points])), 3),
        "median_error_of_medians": round(float(np.median([abs(point.median_error) for point in points])), 3),
        "known_orders": known,
        "right_orders": right,
    }
    rows = [
        {"model": Path(point.model).name, "share": point.share, "policy": point.policy,
         "tok_s": [round(speed, 2) for speed in (point.low, point.median, point.high)],
         "simulated": round(point.simulated, 2), "error": round(point.error, 3)}
        for point in points
    ]  # fmt: skip
    print(json.dumps({"machine": machine(), **figures, "rows": rows}))


if __name__ == "__main__":
    main()
