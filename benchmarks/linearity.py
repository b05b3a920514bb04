"""How the time of a token grows with length, layers and FFN width, and of a prompt with its length: a line, or not.

    python -m benchmarks.linearity
    python -m benchmarks.linearity --sweeps length prompt --repeat 40 --plot linearity.svg

Small random ReLU models with all on the device. All points of a sweep take turns; the best of each counts, so that a
busy moment hits them all and hides from none. A line is fitted by least squares; what is told of it is the largest
residual, as a share of the time there. length: a step with so many tokens before and including it (the cache is read
in prefixes of 256, 512, 1024, ...: a staircase). Ends in one line of JSON, which
`benchmarks.results_page` shows and draws; `--plot` needs matplotlib (dynajax[plot]).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.results_page import Run
from benchmarks.results_plots import draw
from dynajax.benching.bandwidth import seconds
from dynajax.benching.machine import machine
from dynajax.config import EngineConfig, ModelSpec
from dynajax.engine.opening import Parts, open_parts
from dynajax.testing import make_checkpoint
from hostcompute import default_threads

BASE = ModelSpec(
    layers=4, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64, vocab=4096, dtype="float16", max_positions=4096,
)  # fmt: skip
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
PROMPTS = LENGTHS[:-1]  # the longest takes longer than all others together
LAYERS = (2, 4, 8, 16)
WIDTHS = (1024, 2048, 4096, 8192)
SHORT_CTX = 256  # of models that are asked at position 0 only
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """seconds = slope * x + intercept."""

    slope_s: float
    intercept_s: float
    worst_residual: float  # the largest |measured - line| / measured
    r2: float  # share of the variance that the line explains


def fit_line(x: Sequence[float], times_s: Sequence[float]) -> Line:
    """Least squares. Example: x 1, 2, 3 and times 3, 5, 7 -> slope 2, intercept 1, residual 0."""
    if len(x) != len(times_s) or len(set(x)) < 2:
        raise ValueError(f"a line needs two different x and as many times, got {len(x)} and {len(times_s)}")
    measured = np.asarray(times_s, np.float64)
    slope, intercept = np.polyfit(np.asarray(x, np.float64), measured, 1)
    residual = measured - (slope * np.asarray(x) + intercept)
    variance = float(((measured - measured.mean()) ** 2).sum())
    return Line(
        slope_s=float(slope),
        intercept_s=float(intercept),
        worst_residual=float((np.abs(residual) / measured).max()),
        r2=1 - float((residual**2).sum()) / variance if variance else 1.0,
    )


def step(parts: Parts, position: int) -> None:
    """One token at a position; what the cache holds before it does not matter to the time."""
    parts.stepper.step(np.ones(1, np.int32), np.array([position], np.int32), np.ones(1, np.bool_))


def prompt(parts: Parts, length: int) -> None:
    parts.stepper.prefill(0, [1 + i % 1000 for i in range(length)], lambda done, total: None)


def best_of(calls: Sequence[Callable[[], None]], repeat: int) -> list[npt.NDArray[np.float64]]:
    """Seconds of every call, called in turn, after a warm-up which also compiles."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    rounds = [[seconds(call) for call in calls] for _ in range(repeat)]
    return list(np.array(rounds).T)


def points(sweep: str, open_model: Callable[[ModelSpec, int], Parts]) -> dict[int, Callable[[], None]]:
    """{x: what is timed there}."""
    if sweep in ("length", "prompt"):
        lengths, call = (LENGTHS, step) if sweep == "length" else (PROMPTS, prompt)
        parts = open_model(BASE, lengths[-1])
        return {length: partial(call, parts, length - (sweep == "length")) for length in lengths}
    specs = {x: replace(BASE, **{sweep: x}) for x in (LAYERS if sweep == "layers" else WIDTHS)}
    return {x: partial(step, open_model(spec, SHORT_CTX), 0) for x, spec in specs.items()}


def measure(sweep: str, repeat: int, threads: int, dtype: str) -> dict[str, Any]:
    """One sweep: its points and the line through their best times."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="linearity-")))

        def open_model(spec: ModelSpec, ctx: int) -> Parts:
            name = f"layers{spec.layers}-ffn{spec.ffn}"
            folder = make_checkpoint(root / name, spec, dtype=spec.dtype)
            config = EngineConfig(ctx=ctx, dtype=dtype, sparsity="dense", threads=threads)
            parts = open_parts(str(folder), config, lambda *_: None, lambda _: None)
            stack.callback(parts.close)
            return parts

        calls = points(sweep, open_model)
        times_s = best_of(list(calls.values()), repeat if sweep != "prompt" else max(2, repeat // 8))
    best = [float(spent.min()) for spent in times_s]
    line = fit_line(list(calls), best)
    rows = [
        {"x": x, "best_s": low, "median_s": float(np.median(spent))}
        for x, low, spent in zip(calls, best, times_s, strict=True)
    ]
    told = {name: getattr(line, name) for name in Line.__dataclass_fields__}
    return {"sweep": sweep, "rows": rows, "line": told}


def show(found: dict[str, Any]) -> None:
    line = found["line"]
    times = "  ".join(f"{row['x']}: {1e3 * row['best_s']:.2f}" for row in found["rows"])
    print(f"{found['sweep']:7} ms {times}")
    print(
        f"        {1e6 * line['slope_s']:.3f} us each + {1e3 * line['intercept_s']:.3f} ms, worst residual "
        f"{line['worst_residual']:.0%}, r2 {line['r2']:.4f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("length", "prompt", "layers", "ffn")
    parser.add_argument("--sweeps", nargs="+", choices=names, default=list(names))
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error(f"--repeat must be >= 1, got {args.repeat}")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install dynajax[plot]")
    sweeps = []
    for sweep in args.sweeps:
        sweeps.append(measure(sweep, args.repeat, args.threads, args.dtype))
        show(sweeps[-1])
    base = {name: getattr(BASE, name) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")}
    told = {**machine(), "threads": args.threads, "dtype": args.dtype, "base": base, "repeat": args.repeat,
            "sweeps": sweeps}  # fmt: skip
    if args.plot is not None:
        draw(Run("linearity", told), args.plot)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
