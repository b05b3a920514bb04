"""What each neuron policy is worth: the share of live neurons it finds on the device, on a real model's traces.

    python -m benchmarks.placement --model tiny-relullama --documents 16
    python -m benchmarks.placement --model runs/synth-1.1b --ids topics:160 --documents 6 --trace runs/synth.npz
    python -m benchmarks.placement --pools 0.4 --windows 0.5 --set swap_rule=gain --set ranking=flag
    python -m benchmarks.placement --table docs/placement.md --synthetic runs/synth-1.1b

Live sets come from running the model over held-out text; frequencies, calibration and residuals from other text. A
document is a prompt, whose live counts seed the frequencies, and decoded tokens. The planner that drives the engine
decides, one token after the other; every transfer arrives in time, nothing is computed. Columns are swaps allowed per
token, as shares of a layer's mean live count; hot_share is over layers >= 1. Times are those of the cost model for a
13B layer, not measured. `bound`: as many live neurons as fit, whatever it would cost to move them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.placement_replay import COSTS_13B, bound, place, replay
from benchmarks.placement_table import SMOLLM2, Case, cases, claims, page
from benchmarks.placement_trace import Trace, documents, made_up, record
from dynajax.benching.machine import machine
from dynajax.checkpoint import read_spec, resolve_model
from dynajax.config import NeuronPolicy, PolicyConfig, policy_from_settings
from dynajax.errors import ModelError, UsageError

HELDOUT = Path(__file__).parents[1] / "tests" / "data" / "heldout"
DYNAMIC: tuple[NeuronPolicy, ...] = ("lru", "micro", "macro", "macro+micro", "dynamic")


def measure(trace: Trace, args: argparse.Namespace, config: PolicyConfig) -> Iterable[dict]:
    """A row for each pool, policy and window.

    `static` is the better of its two placements: its own, by frequency over all layers, and the equal slots of the
    policies that move neurons. `gap_closed` is the share of the way from there to the bound.
    """
    for pool in args.pools:
        start = place(trace, pool, args.budgets)
        limit = max(bound(trace, place(trace, pool, kind), args.prompt) for kind in ("static", args.budgets))
        stills = [
            replay(trace, place(trace, pool, kind), "static", 0.0, args.prompt, config).figures()
            for kind in ("static", args.budgets)
        ]
        still = max(stills, key=lambda figures: figures["hot_share"])
        yield {"pool": pool, "policy": "static", **still}
        for policy in args.policies:
            for window in args.windows:
                found = replay(trace, start, policy, window, args.prompt, config).figures()
                closed = (found["hot_share"] - still["hot_share"]) / max(limit - still["hot_share"], 1e-9)
                yield {"pool": pool, "policy": policy, "window": window, **found, "gap_closed": round(closed, 3)}
        yield {"pool": pool, "policy": "bound", "hot_share": round(limit, 4)}


def show(rows: Iterable[dict]) -> list[dict]:
    """Print them as they come."""
    kept = []
    print(f"{'pool':>5} {'policy':>12} window  hot_share  gap closed  moved  max(t_g, t_c) + moves  Err of it  missed")
    for row in rows:
        kept.append(row)
        line = f"{row['pool']:5.0%} {row['policy']:>12} {row.get('window', 0):6.2f}  {row['hot_share']:9.3f}"
        if "ffn_us" in row:
            line += f"  {row.get('gap_closed', 0):10.2f} {row['moved_per_step']:6.1f}"
            line += f"  {row['ffn_us']:8.0f} + {row['move_us']:5.0f} us  {row['err']:13.4f}  {row['missed']:6.3f}"
        print(line, flush=True)
    return kept


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-relullama")
    parser.add_argument("--text", type=Path, default=HELDOUT, help="folder of .txt files")
    parser.add_argument("--ids", help="topics:N, topic:N, random:N or a .npy file instead of text")
    parser.add_argument("--documents", type=int, default=16, help="that are measured")
    parser.add_argument("--statistics", type=int, help="documents that give statistics; default: all, of ids 16")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a document that are its prompt")
    parser.add_argument("--bits", type=int, default=1, choices=[1, 2, 4, 8], help="of the gates that predict")
    parser.add_argument("--density", type=float, help="live share where no activation is zero; default 0.5")
    parser.add_argument("--pools", type=float, nargs="+", default=[0.2, 0.4, 0.6])
    parser.add_argument("--windows", type=float, nargs="+", default=[0.10, 0.25, 0.50])
    parser.add_argument("--policies", nargs="+", default=list(DYNAMIC), choices=get_args(NeuronPolicy))
    parser.add_argument("--budgets", default="equal", choices=["static", "equal"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--trace", type=Path, help="npz file to keep the trace in, read if it is there")
    parser.add_argument("--table", type=Path, help="write this page: every model that is there, all policies")
    parser.add_argument("--synthetic", type=Path, help="with --table: a folder of benchmarks.make_checkpoint")
    parser.add_argument(
        "--traces", type=Path, help="with --table: folder to keep the traces in, read if they are there"
    )
    return parser.parse_args(argv)


def sample(case: Case, folder: Path, text: Path) -> tuple[np.ndarray, np.ndarray]:
    """(test, other) documents of token ids."""
    from dynajax.cli.prompts import prompt_ids
    from dynajax.training.tiny import heldout_sample

    if case.ids and case.ids.endswith(".npy"):
        spec = read_spec(folder)
        test, other = documents({"file": prompt_ids(case.ids, spec, 0)}, case.documents)
    elif case.ids:
        return made_up(case.ids, read_spec(folder), case.documents, case.statistics or 16)
    else:
        if not (folder / "tokenizer.json").exists():
            raise SystemExit(f"{folder} has no tokenizer.json: give --ids topics:160")
        test, other = documents(heldout_sample(text, folder / "tokenizer.json"), case.documents)
    most = len(other) if case.statistics is None else min(case.statistics, len(other))
    return test, other[np.linspace(0, len(other) - 1, most).astype(int)]


def load(case: Case, text: Path, keep: Path | None) -> dict[int, Trace]:
    """A trace for each number of bits, from the file `keep` if it is there, written to it if not."""
    if keep and keep.exists():
        with np.load(keep, allow_pickle=False) as kept:
            common = [kept[name] for name in ("frequency", "mass")]
            return {bits: Trace(kept["live"], kept[f"score{bits}"], *common) for bits in case.bits}
    folder = resolve_model(case.model)
    traces = record(folder, *sample(case, folder, text), case.bits, case.density)
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        one = next(iter(traces.values()))
        arrays: dict[str, Any] = {"live": one.live, "frequency": one.frequency, "mass": one.mass}
        np.savez(keep, **arrays, **{f"score{bits}": trace.score for bits, trace in traces.items()})
    return traces


def facts(case: Case, trace: Trace, prompt: int) -> str:
    shape, active = trace.live.shape, trace.live.mean(axis=(0, 1, 3))[1:]
    return (
        f"{shape[0]} documents of {shape[1]} tokens ({case.ids or 'text'}), {prompt} of them the prompt; {shape[2]} "
        f"layers of {shape[3]} neurons, {active.min():.3f} to {active.max():.3f} of them live in layers >= 1."
    )


def run_case(case: Case, args: argparse.Namespace, keep: Path | None) -> list[dict]:
    """What each number of bits gives, with the facts of the case."""
    measured = []
    for bits, trace in load(case, args.text, keep).items():
        config = policy_from_settings(["swap_rule=paper", *args.set])
        if case.density is not None:
            config = replace(config, density=case.density)
        about = facts(case, trace, args.prompt)
        print(f"\n{case.name}, {bits}-bit gates: {about}")
        rows = show(measure(trace, args, config))
        told = {"name": case.name, "bits": bits, "facts": about, "claims": claims(rows), "rows": rows}
        print(*(f"{claim}: {held} of {places}" for claim, (held, places) in told["claims"].items()), sep=", ")
        measured.append(told)
    return measured


def chosen(args: argparse.Namespace) -> list[Case]:
    """One case, or with --table all of those whose models are there."""
    if args.table is None:
        zeros = read_spec(resolve_model(args.model)).activation.has_zeros
        return [
            Case(
                name=args.model,
                model=args.model,
                ids=args.ids,
                documents=args.documents,
                statistics=args.statistics,
                bits=(args.bits,),
                density=None if zeros else args.density or 0.5,
            )
        ]
    try:
        there = resolve_model(SMOLLM2, offline=True).is_dir()
    except (ModelError, UsageError):
        there = False
    return cases(None if args.synthetic is None else str(args.synthetic), smollm2=there)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    measured = []
    for i, case in enumerate(chosen(args)):
        keep = args.trace if args.table is None else args.traces and args.traces / f"{i}-{Path(case.model).name}.npz"
        measured += run_case(case, args, keep)
    if args.table:
        args.table.write_text(page(measured), encoding="utf-8")
    constants = {"config": asdict(policy_from_settings(["swap_rule=paper", *args.set])), "costs": asdict(COSTS_13B)}
    print(json.dumps({"machine": machine(), **constants, "cases": measured}))


if __name__ == "__main__":
    main()
