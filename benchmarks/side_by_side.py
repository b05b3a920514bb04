"""This engine, llama.cpp and transformers on the same weights, tokens and threads: one process each, rounds in turn.

    make bench-deps
    for type in F16 Q4_0; do
        python -m benchmarks.to_gguf runs/synth-1.1b runs/synth-1.1b-$type.gguf --type $type --speed-only; done
    python -m benchmarks.side_by_side --model runs/synth-1.1b --gguf 'runs/synth-1.1b-{}.gguf' \
        --engines dynajax:dense:float16 dynajax:exact:float16:none llama.cpp:F16 llama.cpp:Q4_0

A round is a prompt and tokens that follow, both given, so that every engine computes the same positions; every engine
has one in turn, the others are halted meanwhile. The first round of each warms up and compiles and is not counted.
best and median are over all single steps of all rounds: on a machine that others use, compare the best. CPU ms a step,
of all threads together in the best round, is what a busy machine disturbs least, as long as an engine sleeps where it
waits (OMP_WAIT_POLICY=passive for llama.cpp). The share of the floor is best against best: the bytes that a step must
read at the best read bandwidth found between the rounds, over the best step; a dense row of this engine is held to all
weights, though its kernels leave out the rows of down whose activation is zero. Tokens are compared with the first
engine's: the share of positions with the same most likely one. Engines are in memory together if they fit, else one
after the other, loaded again for every round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bandwidth import chunks, machine, read_buffer, seconds
from benchmarks.children import FORMS, Child, Contender, Setup, contender
from benchmarks.make_checkpoint import FIRST_TOPIC_ID, topic_ids
from dynajax.checkpoint import read_spec
from dynajax.errors import DynajaxError, UsageError
from dynajax.model_folder import model_folder
from hostcompute import HostPool, default_threads

Round = dict[str, Any]
READ_BYTES, READS = 2**26, 10  # between two rounds
HOLDS = 1.4  # memory of an engine per byte of its weights
FREE_SHARE = 0.8  # of the free memory that engines may take together
ROW_KEYS = (
    "engine", "model", "policy", "sparsity", "dtype", "host_dtype", "threads", "batch", "prompt_tokens", "new_tokens",
    "budget_bytes", "prefill_tok_s", "decode_tok_s", "spread", "share_of_floor", "cpu_share", "hot_share",
    "peak_rss_bytes", "compile_s", "load_s",
)  # fmt: skip


def free_bytes() -> int:
    """Memory that a process may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def tokens_of(setup: Setup, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts [B, T] and what follows them [N, B]; each row keeps mostly to a topic of its own."""
    if setup.spec.vocab <= FIRST_TOPIC_ID:
        raise UsageError(f"the vocabulary must have more than {FIRST_TOPIC_ID} tokens, got {setup.spec.vocab}")
    ids = topic_ids(np.random.default_rng(seed), setup.batch, setup.ctx, setup.spec.vocab)
    prompt = setup.prompt_tokens
    return ids[:, :prompt].tolist(), ids[:, prompt:].T.tolist()


class Bandwidth:
    """The read bandwidth of the machine, as the best of many short looks in GB/s."""

    def __init__(self, threads: int):
        self._pool = HostPool(threads)
        self._pieces = chunks(read_buffer(READ_BYTES), READ_BYTES)
        self.best_gb_s = 0.0

    def look(self) -> None:
        for _ in range(READS):
            spent = seconds(lambda: self._pool.read_sum(next(self._pieces)))
            self.best_gb_s = max(self.best_gb_s, READ_BYTES / spent / 1e9)

    def close(self) -> None:
        self._pool.close()


def counted(child: Child, prompts: list[list[int]], following: list[list[int]], before: Round | None) -> Round:
    """A round in which nothing may be compiled, `before` the one that warmed up."""
    found = child.round(prompts, following)
    if before is not None and found["compile_s"] != before["compile_s"]:
        raise RuntimeError(f"{child.contender.name} compiled in a counted round: the warm-up does not cover it")
    return found | {"load_s": child.opened["load_s"], "opened": child.opened}


def measure(contenders: Sequence[Contender], tokens: tuple, rounds: int, band: Bandwidth) -> dict[str, list[Round]]:
    """Counted rounds by name, all engines in turn."""
    found: dict[str, list[Round]] = {one.name: [] for one in contenders}
    wanted = sum(HOLDS * one.file_bytes for one in contenders)
    together = wanted <= FREE_SHARE * free_bytes()
    print("together in memory" if together else "one after the other in memory", file=sys.stderr)
    with ExitStack() as open_children:
        children: dict[str, tuple[Child, Round]] = {}
        for turn in range(rounds):
            for one in contenders:
                band.look()
                with ExitStack() as mine:
                    if one.name not in children:
                        child = (open_children if together else mine).enter_context(Child(one))
                        children[one.name] = child, counted(child, *tokens, None)
                    child, warm = children[one.name]
                    found[one.name].append(counted(child, *tokens, warm))
                if not together:
                    del children[one.name]
                step = float(np.median(found[one.name][-1]["step_s"]))
                print(f"round {turn + 1} of {rounds} {one.name:32} {1e3 * step:8.2f} ms a step", file=sys.stderr)
    return found


def row_of(one: Contender, rounds: Sequence[Round], first: Sequence[Round], setup: Setup, gb_s: float) -> Round:
    """The figures of an engine; those of `ROW_KEYS`, and best, agreement and names."""
    steps = np.concatenate([found["step_s"] for found in rounds])
    prefills = np.array([found["prefill_s"] for found in rounds])
    last, known = rounds[-1], one.row | rounds[-1]["opened"]
    prompt, batch = setup.prompt_tokens, setup.batch
    floor_bytes = last["floor_bytes"] if last["floor_bytes"] is not None else one.row.get("floor_bytes")
    best, median = float(steps.min()), float(np.median(steps))
    floor_s = None if floor_bytes is None else floor_bytes / gb_s / 1e9
    same = np.array(last["chosen"]) == np.array(first[-1]["chosen"])
    figures = {
        "engine": one.engine, "model": setup.model, "threads": setup.threads, "batch": batch, "prompt_tokens": prompt,
        "new_tokens": setup.new_tokens,
        "prefill_tok_s": batch * prompt / float(np.median(prefills)), "decode_tok_s": batch / median,
        "spread": {
            "best_step_s": best, "p90_step_s": float(np.quantile(steps, 0.9)), "best_prefill_s": float(prefills.min()),
            "rounds": len(rounds),
        },
        "share_of_floor": None if floor_s is None else floor_s / best,
        "cpu_share": sum(found["step_cpu_s"] for found in rounds) / (float(steps.sum()) * setup.threads),
        "hot_share": last["hot_share"],
        "peak_rss_bytes": max(found["peak_rss_bytes"] for found in rounds), "compile_s": last["compile_s"],
        "load_s": min(found["load_s"] for found in rounds),
    }  # fmt: skip
    row = {key: figures.get(key, known.get(key)) for key in ROW_KEYS}
    return row | {"name": one.name, "best_tok_s": batch / best, "best_prefill_tok_s": batch * prompt / prefills.min(),
                  "cpu_s_per_step": min(found["step_cpu_s"] for found in rounds) / setup.new_tokens,
                  "floor_bytes": floor_bytes, "agreement": float(same.mean()), "version": known.get("version"),
                  "host_mode": known.get("host_mode")}  # fmt: skip


def table(rows: Sequence[Round]) -> str:
    """Markdown."""
    heads = ("engine", "decode best, median tok/s", "prefill best tok/s", "of the floor", "CPU",
             "CPU ms a step", "peak GiB", "load, compile s", "agrees")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        floor = "" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}"
        lines.append(
            f"| {row['name']} | {row['best_tok_s']:.2f}, {row['decode_tok_s']:.2f} | {row['best_prefill_tok_s']:.1f} | "
            f"{floor} | {row['cpu_share']:.0%} | {1e3 * row['cpu_s_per_step']:.1f} | "
            f"{row['peak_rss_bytes'] / 2**30:.2f} | {row['load_s']:.1f}, {row['compile_s']:.1f} | "
            f"{row['agreement']:.0%} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an alias or a folder")
    parser.add_argument("--engines", nargs="+", default=["dynajax:dense:float16", "llama.cpp:F16"], help=FORMS)
    parser.add_argument("--gguf", default="", metavar="PATTERN", help="the .gguf files, {} where the type stands")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predictor", default="auto", help="of dynajax:predicted")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, for dynajax:predicted")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama_cpp")
    args = parser.parse_args(argv)
    for name in ("prompt_tokens", "new_tokens", "batch", "threads", "rounds"):
        if getattr(args, name) < (least := 2 if name == "prompt_tokens" else 1):
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def setup_of(args: argparse.Namespace) -> Setup:
    """Looks the model up; UsageError or ModelError: it is not there."""
    folder = model_folder(args.model, offline=True)
    return Setup(
        model=args.model,
        folder=folder,
        spec=read_spec(folder),
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        batch=args.batch,
        threads=args.threads,
        gguf_files=args.gguf,
        llama_python=args.llama_python,
        predictor=args.predictor,
        constants=tuple(args.set),
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        setup = setup_of(args)
        contenders = [contender(name, setup) for name in args.engines]
        tokens = tokens_of(setup, args.seed)
    except DynajaxError as error:
        raise SystemExit(f"error: {error}") from error
    band = Bandwidth(args.threads)
    try:
        found = measure(contenders, tokens, args.rounds, band)
    finally:
        band.close()
    first = found[contenders[0].name]
    rows = [row_of(one, found[one.name], first, setup, band.best_gb_s) for one in contenders]
    print(table(rows))
    load = os.getloadavg()[0]
    print(json.dumps({**machine(), "read_gb_s": band.best_gb_s, "load_average": load, "rows": rows}))


if __name__ == "__main__":
    main()
