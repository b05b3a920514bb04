"""This engine and others on the same weights, tokens and threads: one process each, rounds in turn.

    make bench-deps
    for type in F16 Q4_0; do
        python -m benchmarks.to_gguf runs/synth-1.1b runs/synth-1.1b-$type.gguf --type $type --speed-only; done
    python -m benchmarks.side_by_side --model runs/synth-1.1b --gguf 'runs/synth-1.1b-{}.gguf' \
        --engines dynajax:dense:float16 dynajax:exact:float16:none llama.cpp:F16 llama.cpp:Q4_0

How rounds go stands at the head of `dynajax/benching/rounds.py`. best and median are over all single steps of all
rounds: on a machine that others use, compare the best. CPU ms a step, of all threads together in the best round, is
what a busy machine disturbs least, as long as an engine sleeps where it waits (OMP_WAIT_POLICY=passive for llama.cpp,
which costs it up to two thirds of its speed).
The share of the floor is best against best: the bytes that a step must read at the best read bandwidth found between
the rounds, over the best step; a dense row of this engine is held to all weights, though its kernels leave out the rows
of down whose activation is zero. Tokens are compared with the first engine's: the share of positions with the same most
likely one. Engines are in memory together if they fit, else one after the other, loaded again for every round.

--vram-budget is kept by who can: dynajax, accelerate (without a GPU: host memory up to it, the rest on disk) and
powerinfer. powerinfer is a finished binary of that project; it takes no token ids, so it reads as many tokens of a text
of its own and writes what it likes, and tells means only: see `benchmarks/engines/powerinfer.py`. torch, transformers
and accelerate may live in a Python of their own, as llama_cpp may.

Exit code 1 with one line: a model, a file or a package is missing, or an engine refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import FORMS, Setup, contender
from benchmarks.make_checkpoint import FIRST_TOPIC_ID, topic_ids
from dynajax.benching.bandwidth import Bandwidth
from dynajax.benching.children import Contender
from dynajax.benching.machine import machine
from dynajax.benching.rounds import Task, Tokens, fit_together, measure, row_of, table
from dynajax.checkpoint import read_spec
from dynajax.errors import DynajaxError, UsageError
from dynajax.model_folder import model_folder
from hostcompute import default_threads


def tokens_of(task: Task, vocab: int, seed: int) -> Tokens:
    """Prompts [B, T] and what follows them [N, B]; each row keeps mostly to a topic of its own."""
    if vocab <= FIRST_TOPIC_ID:
        raise UsageError(f"the vocabulary must have more than {FIRST_TOPIC_ID} tokens, got {vocab}")
    ids = topic_ids(np.random.default_rng(seed), task.batch, task.ctx, vocab)
    prompt = task.prompt_tokens
    return ids[:, :prompt].tolist(), ids[:, prompt:].T.tolist()


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
    parser.add_argument("--vram-budget", default="auto", help="auto or a size; for dynajax, accelerate and powerinfer")
    parser.add_argument("--predictor", default="auto", help="of dynajax:predicted")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, for dynajax:predicted")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama_cpp")
    parser.add_argument("--torch-python", default=sys.executable, help="one that has torch, transformers, accelerate")
    parser.add_argument("--powerinfer", default="", metavar="PATH", help="the finished binary of PowerInfer")
    parser.add_argument("--out", type=Path, help="file for the JSON; stdout has the table alone then")
    args = parser.parse_args(argv)
    for name in ("prompt_tokens", "new_tokens", "batch", "threads", "rounds"):
        if getattr(args, name) < (least := 2 if name == "prompt_tokens" else 1):
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    return args


def setup_of(args: argparse.Namespace, scratch: Path) -> Setup:
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
        budget=args.vram_budget,
        gguf_files=args.gguf,
        llama_python=args.llama_python,
        torch_python=args.torch_python,
        powerinfer=args.powerinfer,
        scratch=scratch,
        predictor=args.predictor,
        constants=tuple(args.set),
    )


def run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The result. DynajaxError: something is missing or refused."""
    setup = setup_of(args, scratch)
    contenders = [contender(name, setup) for name in args.engines]
    tokens = tokens_of(setup, setup.spec.vocab, args.seed)
    together = fit_together(contenders)
    print("together in memory" if together else "one after the other in memory", file=sys.stderr)

    def on_round(turn: int, one: Contender, found: dict[str, Any]) -> None:
        step = float(np.median(found["step_s"]))
        print(f"round {turn + 1} of {args.rounds} {one.name:32} {1e3 * step:8.2f} ms a step", file=sys.stderr)

    here, band = machine(), Bandwidth(args.threads)
    try:
        found = measure(contenders, tokens, args.rounds, band, on_round, together=together)
    finally:
        band.close()
    first = found[contenders[0].name]
    rows = [row_of(one, found[one.name], first, setup, band.best_gb_s) for one in contenders]
    return {**here, "read_gb_s": band.best_gb_s, "together": together, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="dynajax-offload-") as scratch:
            told = run(args, Path(scratch))
    except DynajaxError as error:
        raise SystemExit(f"error: {error}") from error
    print(table(told["rows"]))
    if args.out is None:
        print(json.dumps(told))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
