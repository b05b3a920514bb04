"""Decoding a mixture of experts by different policies in the same engine, over a link of a given machine: ratios.

The CPU backend plays the device; every transfer takes as long as the machine's link would take for it. One step of each
policy in turn, on the same tokens of a text, so that a noisy neighbour meets them all; the answers must agree.

python -m benchmarks.expert_engine --model tiny-moe --share 0.4 --hardware dali-pc --batches 1 8 32
"""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from dynajax import staging
from dynajax.benching.machine import machine
from dynajax.budget import unit_bytes
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.opening import Parts, open_parts
from dynajax.model_folder import model_folder
from dynajax.sim.hardware import Hardware, load_hardware
from dynajax.text import load_tokenizer

TEXTS = Path(__file__).parents[1] / "tests" / "data" / "heldout"
PROMPT, WARM_UP = 32, 16
DEFAULT = "default"
POLICIES: dict[str, dict[str, str]] = {
    DEFAULT: {"policy": "scan", "prefetch": "corrected"},  # what `auto` is on a GPU
    "static": {"policy": "static", "host_mode": "threads"},
    "lru": {"policy": "lru"},
    "hybrimoe": {"policy": "hybrimoe"},
    "bandwidth-split": {"policy": "bandwidth-split"},
}


class Throttled(staging.Plain):
    """Takes as long as a link of that machine would; the waiting costs no core."""

    hardware: Hardware
    times = 1.0  # bytes that one byte stands for

    def send(self, block: np.ndarray):
        begin = time.perf_counter()
        sent = super().send(block)
        wanted = self.hardware.t0_s + self.times * block.nbytes / self.hardware.link_bps
        time.sleep(max(0.0, begin + wanted - time.perf_counter()))
        return sent


@contextlib.contextmanager
def linked(hardware: Hardware, times: float):
    """Every transfer goes over that link."""
    Throttled.hardware, Throttled.times = hardware, times
    before = dict(staging._MAKERS)
    staging._MAKERS["plain"] = Throttled
    try:
        yield
    finally:
        staging._MAKERS.update(before)


def opened(model: str, share: float, batch: int, ctx: int, wishes: dict[str, Any]) -> Parts:
    """An engine with that share of the experts on the device, whatever else its policy needs there."""
    settings: dict[str, Any] = {"ctx": ctx, "batch": batch, "staging": "plain", "dtype": "float32", **wishes}
    plan = plan_for(model, EngineConfig(**settings, vram_budget="64GiB"))
    folder = model_folder(model, offline=True, config_only=True, progress=lambda *_: None)
    from dynajax.checkpoint import read_spec

    unit = unit_bytes(read_spec(folder), "float32")
    budget = plan.smallest_budget_bytes + round(share * plan.units_total) * unit
    config = EngineConfig(**settings, vram_budget=budget)
    return open_parts(model, config, lambda *_: None, lambda _: None)


def texts(model: str, rows: int, length: int) -> np.ndarray:
    """[rows, length] token ids, each row another place of the held-out texts."""
    tokenizer = load_tokenizer(model_folder(model, offline=True, config_only=True, progress=lambda *_: None))
    assert tokenizer is not None, "this benchmark reads texts"
    ids = [tokenizer.encode(path.read_text(encoding="utf-8")) for path in sorted(TEXTS.glob("*.txt"))]
    rng, found = np.random.default_rng(0), []
    for row in range(rows):
        text = ids[row % len(ids)]
        start = int(rng.integers(0, len(text) - length))
        found.append(text[start : start + length])
    return np.array(found, np.int32)


def run(model: str, share: float, batch: int, steps: int) -> dict[str, Any]:
    """Every policy at one batch."""
    ids = texts(model, batch, PROMPT + WARM_UP + steps + 1)
    engines = {name: opened(model, share, batch, 256, wishes) for name, wishes in POLICIES.items()}
    try:
        for parts in engines.values():
            parts.reset_counters()
            for row in range(batch):
                parts.stepper.prefill(row, ids[row, :PROMPT].tolist(), lambda done, total: None)
            parts.reset_counters()
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        worst = 0.0
        for step in range(WARM_UP + steps):
            at = np.full(batch, PROMPT + step, np.int32)
            answers = {}
            for name, parts in engines.items():
                begin = time.perf_counter()
                answers[name] = parts.stepper.step(ids[:, PROMPT + step], at, np.ones(batch, np.bool_))
                if step >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begin)
            scale = float(np.abs(answers["static"]).max())
            worst = max(worst, *(float(np.abs(a - answers["static"]).max()) / scale for a in answers.values()))
        assert worst < 1e-3, f"policies disagree by {worst}"
        return {"batch": batch, "share": share, "policies": {n: _row(p, seconds, n) for n, p in engines.items()}}
    finally:
        for parts in engines.values():
            parts.close()


def _row(parts: Parts, seconds: dict[str, list[float]], name: str) -> dict[str, Any]:
    """Medians of this policy, and its step against the default's, step by step."""
    mine, default = np.array(seconds[name]), np.array(seconds[DEFAULT])
    found: dict[str, Any] = {
        "step_ms": 1e3 * float(np.median(mine)),
        "tok_s": parts.config.batch / float(np.median(mine)),
        "default_is_faster_by": float(np.median(mine / default)),
    }
    if parts.mixture is not None:
        parts.mixture.runner.moves.settle()
        books = parts.mixture.runner.moves.books
        found |= {
            "weighted_hits": float(books.hit_pairs.sum() / books.pairs.sum()),
            "computed_hot": float(books.hot_pairs.sum() / books.pairs.sum()),
            "loads_per_layer_step": float(books.loads.sum() / books.steps.sum()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--hardware", default="dali-pc")
    parser.add_argument("--link-times", type=float, default=1.0, help="bytes of the link that one byte stands for")
    args = parser.parse_args()
    hardware, rows = load_hardware(args.hardware), []
    with linked(hardware, args.link_times):
        for batch in args.batches:
            rows.append(found := run(args.model, args.share, batch, args.steps))
            for name, row in found["policies"].items():
                print(f"batch {batch:3d}  {name:16s}", "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    print(json.dumps({"machine": machine(), "link": hardware.name, "link_times": args.link_times, "rows": rows}))


if __name__ == "__main__":
    main()
