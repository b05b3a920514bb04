"""What each neuron policy is worth: the share of live neurons it finds on the device, on a real model's traces.

    python -m benchmarks.placement --model tiny-relullama --documents 16
    python -m benchmarks.placement --pools 0.4 --windows 0.5 --set swap_rule=gain --set ranking=flag

Live sets come from running the model over held-out text; frequencies, calibration and residuals from other text. A
document is a prompt, whose live counts seed the frequencies, and decoded tokens. The planner that drives the engine
decides, one token after the other; every transfer arrives in time, nothing is computed. Columns are swaps allowed per
token, as shares of a layer's mean live count; hot_share is over layers >= 1. Times are those of the cost model for a
13B layer, not measured. `bound`: as many live neurons as fit, whatever it would cost to move them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from benchmarks.bandwidth import machine
from benchmarks.placement_trace import Trace, record
from dynajax.checkpoint import resolve_model
from dynajax.config import NeuronPolicy, PolicyConfig, policy_from_settings
from dynajax.plan import LayerPlan, Placement
from dynajax.policy.costs import Costs
from dynajax.policy.placement import place_static
from dynajax.policy.planner import NeuronPlanner

HELDOUT = Path(__file__).parents[1] / "tests" / "data" / "heldout"
POLICIES: tuple[NeuronPolicy, ...] = ("static", "lru", "micro", "macro", "macro+micro", "dynamic")
DYNAMIC = POLICIES[1:]
# ReluLLaMA-13B at 16 bit on an RTX 4090 with PCIe 4.0: derived from published bandwidths, not measured.
UNITS_13B = 13824
COSTS_13B = Costs(t0_s=2e-5, t_gather_s=7e-7, t_trans_s=1.4e-6, t_gpu_s=5e-8, t_cpu_s=7e-7, t_sync_s=1e-4)


@dataclass(slots=True)
class Tally:
    """Sums over the steps of layers >= 1."""

    live: int = 0
    hot: int = 0  # live and on the device
    skipped: int = 0  # live and below its threshold
    computed: int = 0
    moved: int = 0
    steps: int = 0
    ffn_s: float = 0.0  # by the cost model
    move_s: float = 0.0  # the same, hidden behind compute or not

    def figures(self) -> dict[str, float]:
        return {
            "hot_share": round(self.hot / self.live, 4),
            "missed": round(self.skipped / self.live, 4),
            "computed_per_live": round(self.computed / self.live, 3),
            "moved_per_step": round(self.moved / self.steps, 2),
            "ffn_us": round(1e6 * self.ffn_s / self.steps, 1),
            "move_us": round(1e6 * self.move_s / self.steps, 1),
        }


def costs_of(units: int) -> Costs:
    """A layer as heavy as one of the 13B model: each neuron stands for 13824 / F of them."""
    scaled = {
        f"t_{name}_s": getattr(COSTS_13B, f"t_{name}_s") * UNITS_13B / units
        for name in ("gather", "trans", "gpu", "cpu")
    }
    return replace(COSTS_13B, **scaled)


def place(trace: Trace, pool: float, budgets: str) -> Placement:
    """`static`: as the engine does it, by frequency over all layers; `equal`: the same share of every layer."""
    layers, units = trace.frequency.shape
    if budgets == "static":
        return place_static(trace.frequency, 1, int(pool * layers * units))
    order = np.argsort(-trace.frequency, axis=1, kind="stable")[:, : round(pool * units)]
    return Placement(tuple(np.sort(row).astype(np.int32) for row in order), units)


def replay(
    trace: Trace, placement: Placement, policy: NeuronPolicy, window: float, prompt: int, config: PolicyConfig
) -> Tally:
    """All documents one after the other; pools go on as they are, frequencies start anew from the document's prompt."""
    planner = NeuronPlanner(placement, trace.frequency, policy, config, trace.mass)
    allowed = [int(window * row.sum()) for row in trace.frequency]
    costs, tally = costs_of(placement.units), Tally()
    for document, scores in zip(trace.live, trace.score, strict=True):
        planner.start_sequence(document[:prompt].sum(axis=0), prompt)
        for live, score in zip(document[prompt:], scores[prompt:], strict=True):
            for layer in range(1, len(live)):
                plan = planner.plan(layer, score[layer], allowed[layer], costs)
                planner.applied(layer, plan)
                tally.ffn_s += costs.layer_s(plan.n_gpu, plan.n_cpu)
                tally.move_s += bool(len(plan.units)) * costs.t0_s
                tally.move_s += len(plan.units) * (costs.t_gather_s + costs.t_trans_s)
                count(tally, live[layer], score[layer], plan, planner.bucket(layer))
                planner.observe(layer, live[layer])
    planner.check()
    return tally


def count(tally: Tally, live: np.ndarray, score: np.ndarray, plan: LayerPlan, bucket: np.ndarray) -> None:
    """One layer's step."""
    threshold = np.full(len(live), plan.theta_c, np.uint8)
    threshold[bucket] = plan.theta_g
    tally.live += int(np.count_nonzero(live))
    tally.hot += int(np.count_nonzero(live[bucket]))
    tally.skipped += int(np.count_nonzero(live & (score < threshold)))
    tally.computed += plan.n_gpu + plan.n_cpu
    tally.moved += len(plan.units)
    tally.steps += 1


def bound(trace: Trace, placement: Placement, prompt: int) -> float:
    """hot_share with unlimited swaps and perfect foresight."""
    live = trace.live[:, prompt:, 1:].sum(axis=3)
    return float(np.minimum(live, placement.slots[1:]).sum() / live.sum())


def table(trace: Trace, args: argparse.Namespace, config: PolicyConfig) -> list[dict]:
    """Print a block for each pool; -> its figures."""
    rows = []
    for pool in args.pools:
        placement = place(trace, pool, args.budgets)
        limit = bound(trace, placement, args.prompt)
        static = replay(trace, placement, "static", 0.0, args.prompt, config).figures()
        rows.append({"pool": pool, "policy": "bound", "hot_share": round(limit, 4)})
        rows.append({"pool": pool, "policy": "static", **static})
        print(f"\npool {pool:.0%} (slots {placement.slots}): static {static['hot_share']:.3f}, bound {limit:.3f}")
        print(f"{'hot_share':>12}" + "".join(f"{f'{w:.2f} x live':>14}" for w in args.windows))
        for policy in args.policies:
            found = [replay(trace, placement, policy, window, args.prompt, config).figures() for window in args.windows]
            rows += [
                {"pool": pool, "policy": policy, "window": w, **f} for w, f in zip(args.windows, found, strict=True)
            ]
            print(f"{policy:>12}" + "".join(f"{f['hot_share']:14.3f}" for f in found))
            print(f"{'gap closed':>12}" + "".join(f"{_closed(f, static, limit):14.2f}" for f in found))
            print(f"{'moved':>12}" + "".join(f"{f['moved_per_step']:14.1f}" for f in found))
            print(
                f"{'FFN + move us':>12}" + "".join(f"{f['ffn_us']:8.0f}+{f['move_us']:<4.0f}" for f in found),
                flush=True,
            )
    return rows


def _closed(figures: dict[str, float], static: dict[str, float], limit: float) -> float:
    return (figures["hot_share"] - static["hot_share"]) / max(limit - static["hot_share"], 1e-9)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-relullama")
    parser.add_argument("--text", type=Path, default=HELDOUT, help="folder of .txt files")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a document that are its prompt")
    parser.add_argument("--pools", type=float, nargs="+", default=[0.2, 0.4, 0.6])
    parser.add_argument("--windows", type=float, nargs="+", default=[0.10, 0.25, 0.50])
    parser.add_argument("--policies", nargs="+", default=list(DYNAMIC), choices=get_args(NeuronPolicy))
    parser.add_argument("--budgets", default="static", choices=["static", "equal"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--trace", type=Path, help="npz file to keep the trace in, read if it is there")
    return parser.parse_args(argv)


def load(args: argparse.Namespace) -> Trace:
    from dynajax.training.tiny import heldout_sample

    if args.trace and args.trace.exists():
        with np.load(args.trace, allow_pickle=False) as kept:
            return Trace(**{name: kept[name] for name in ("live", "score", "frequency", "mass")})
    folder = resolve_model(args.model)
    trace = record(folder, heldout_sample(args.text, folder / "tokenizer.json"), args.documents)
    if args.trace:
        np.savez(args.trace, live=trace.live, score=trace.score, frequency=trace.frequency, mass=trace.mass)
    return trace


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    config = policy_from_settings(["swap_rule=paper", *args.set])
    trace = load(args)
    print(f"{args.model}: {trace.live.shape[0]} documents x {trace.live.shape[1]} tokens, live shares", end=" ")
    print(*(f"{share:.3f}" for share in trace.live.mean(axis=(0, 1, 3))))
    rows = table(trace, args, config)
    print(json.dumps({"machine": machine(), "config": asdict(config), "costs": asdict(COSTS_13B), "rows": rows}))


if __name__ == "__main__":
    main()
