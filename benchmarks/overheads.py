"""What it costs to keep units on the host, what threads give beside busy neighbours, and what a batch gives.

    python -m benchmarks.overheads --model tiny-relullama
    python -m benchmarks.overheads --model runs/synth-1.1b --dtype float16 --rounds 10
    python -m benchmarks.overheads --parts offload --modes threads callback ffi --sparsities exact

Given tokens, one process an engine, rounds in turn: see the head of `dynajax/benching/rounds.py`. One type of weights
everywhere, on the device and on the host.

offload: everything on the device, and half of the units or none on it, with each of --modes on the host's side (auto:
the engine's default). us a layer more than with everything on the device, of the fastest tenth of the steps and of the
median; at most 250 of the fastest tenth. Decoding must take no device memory: neither in use after the last step nor at
the peak more than after the first.
threads: --threads-list, and two threads beside one and two processes that never wait, with the first of --sparsities.
Tokens per second of whole rounds. `kept` is the speed per CPU that the system owes the engine (all that run get alike),
against the quiet speed per CPU with as many threads, or as many as there are CPUs: at least 40 %. Told as well: tokens
per CPU second that was really taken. Neighbours that find a CPU of their own take nothing away: on a large machine
begin with `taskset -c 0,1`.
batch: tokens/s at --batches and the ratio to the first; no limit.

Speeds, `spread` and the share of the floor are those of `benchmarks.side_by_side`. Engines of a part open side by side:
their loading and compiling times say nothing. Exit codes: 0 every limit was kept; 1 one was not, the measurement
stands; 2 nothing was measured, the line says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.side_by_side import tokens_of
from dynajax.benching.bandwidth import Bandwidth
from dynajax.benching.children import Contender
from dynajax.benching.machine import machine
from dynajax.benching.rounds import Round, Task, Turn, fit_together, row_of, take_turns
from dynajax.budget import dense_bytes, unit_bytes
from dynajax.checkpoint import read_spec
from dynajax.config import EngineConfig, ModelSpec
from dynajax.errors import DynajaxError
from dynajax.model_folder import model_folder
from hostcompute import default_threads

PARTS = ("offload", "threads", "batch")
MOST_US_PER_LAYER, LEAST_KEPT = 250.0, 0.4
SHARED_THREADS, NEIGHBOURS = 2, (1, 2)
FRACTIONS = {"half": 0.5, "none": 0.0}  # of the units on the device
BUSY = (
    "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent:\n for _ in range(10**6): pass"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all parts share."""

    args: argparse.Namespace
    spec: ModelSpec
    dtype: str
    band: Bandwidth

    def task(self, batch: int = 1, threads: int | None = None) -> Task:
        """What one engine has to do."""
        args = self.args
        return Task(model=args.model, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, batch=batch,
                    threads=threads or args.threads)  # fmt: skip

    def contender(self, name: str, task: Task, sparsity: str, share: float = 1.0, mode: str = "auto") -> Contender:
        """This engine with a share of its units on the device."""
        settings: dict[str, Any] = {
            "ctx": task.ctx, "batch": task.batch, "threads": task.threads, "sparsity": sparsity, "dtype": self.dtype,
            "host_dtype": self.dtype, "host_mode": mode, "offline": True,
        }  # fmt: skip
        EngineConfig(**settings)  # refused before anything is started
        units = len(self.spec.unit_layers) * self.spec.units * unit_bytes(self.spec, self.dtype)
        return Contender(
            name=name, engine="dynajax", command=(sys.executable, "-m", "benchmarks.engines.share"),
            settings={"model": task.model, "share": share, **settings},
            file_bytes=dense_bytes(self.spec, self.dtype) + int((1 + share * (share < 1)) * units),
        )  # fmt: skip


class Check(NamedTuple):
    """A figure and what was asked of it."""

    name: str
    value: float
    limit: float
    ok: bool


Part = tuple[list[Round], list[Check]]


@contextmanager
def neighbours(count: int) -> Generator[None]:
    """So many processes that never wait, while the context lasts; they end with this process, too."""
    busy = [subprocess.Popen((sys.executable, "-c", BUSY), stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for one in busy:
            assert one.stdout is not None
            one.stdout.readline()  # it has begun
        yield
    finally:
        for one in busy:
            one.kill()
            one.communicate()


def rows_of(setup: Setup, part: str, turns: Sequence[tuple[Turn, Task]]) -> list[Round]:
    """A row for every turn, in their order, the first one's tokens being those that others are held against."""
    args = setup.args
    engines = {turn.contender.name: turn.contender for turn, _ in turns}
    together = not args.apart and fit_together(list(engines.values()))
    print(f"{part}: {'together' if together else 'one after the other'} in memory", file=sys.stderr)

    def on_round(number: int, one: Turn, found: Round) -> None:
        step_ms = 1e3 * float(np.median(found["step_s"]))
        print(f"round {number + 1} of {args.rounds} {one.name:28} {step_ms:8.2f} ms a step", file=sys.stderr)

    asked = [turn for turn, _ in turns]
    found = take_turns(asked, args.rounds, setup.band, on_round, together=together, at_once=together)
    first, rows = turns[0], []
    for turn, task in turns:
        rounds = found[turn.name]
        like = rounds if task.batch != first[1].batch else found[first[0].name]  # whose tokens can be compared
        row = row_of(turn.contender, rounds, like, task, setup.band.best_gb_s)
        steps = np.concatenate([one["step_s"] for one in rounds])
        cpu_s, tokens = sum(one["step_cpu_s"] for one in rounds), task.batch * len(steps)
        rows.append(
            row | {
                "name": turn.name, "part": part, "median_step_s": float(np.median(steps)),
                "p10_step_s": float(np.quantile(steps, 0.1)),
                "round_tok_s": float(np.median([task.batch * task.new_tokens / sum(one["step_s"]) for one in rounds])),
                "tok_per_cpu_s": tokens / cpu_s, "on": rounds[-1]["opened"]["on"],
            }
        )  # fmt: skip
    return rows


def offload(setup: Setup) -> Part:
    """Units on the host against all on the device."""
    rows, checks = [], []
    for sparsity in setup.args.sparsities:
        task = setup.task()
        tokens = tokens_of(task, setup.spec.vocab, 0)
        places = [("resident", 1.0, "auto")]
        places += [(f"{name} {mode}", share, mode) for mode in setup.args.modes for name, share in FRACTIONS.items()]
        turns = []
        for name, share, mode in places:
            engine = setup.contender(f"offload {sparsity} {name}", task, sparsity, share, mode)
            turns.append((Turn(name=engine.name, contender=engine, tokens=tokens), task))
        found = rows_of(setup, "offload", turns)
        for row in found:
            checks += offload_checks(row, found[0], setup.spec.layers)
        rows += found
    return rows, checks


def offload_checks(row: Round, resident: Round, layers: int) -> list[Check]:
    """Whether a row took no device memory, and how much it is behind `resident`, which is written into it."""
    taken = row["grown_bytes"]
    checks = [Check(f"{row['name']}: bytes of the device that decoding took", taken, 0, taken == 0)]
    for figure in ("p10", "median"):
        behind_s = row[f"{figure}_step_s"] - resident[f"{figure}_step_s"]
        row[f"{figure}_us_per_layer_more"] = 1e6 * behind_s / layers
    if row is not resident:
        more = row["p10_us_per_layer_more"]
        kept = more <= MOST_US_PER_LAYER
        checks.append(Check(f"{row['name']}: us a layer more, p10", more, MOST_US_PER_LAYER, kept))
    return checks


def threads(setup: Setup) -> Part:
    """Decoding with few and many threads, and beside neighbours."""
    sparsity, counts = setup.args.sparsities[0], sorted({*setup.args.threads_list, 1, SHARED_THREADS})
    tokens = tokens_of(setup.task(), setup.spec.vocab, 0)
    turns, beside = [], []
    for count in counts:
        task = setup.task(threads=count)
        engine = setup.contender(f"threads {sparsity} {count}", task, sparsity)
        for busy in (0, *NEIGHBOURS) if count == SHARED_THREADS else (0,):
            name = engine.name + f" beside {busy} busy" * (busy > 0)
            turns.append((Turn(name=name, contender=engine, tokens=tokens, beside=partial(neighbours, busy)), task))
            beside.append(busy)
    rows = rows_of(setup, "threads", turns)
    return rows, threads_checks(rows, beside, len(os.sched_getaffinity(0)))


def threads_checks(rows: Sequence[Round], beside: Sequence[int], cpus: int) -> list[Check]:
    """See the module; `beside`: the neighbours of each row, which is written into it as is what it kept.

    Example: 2 threads beside 1 neighbour on 2 CPUs are owed 4/3 CPUs; at half of the quiet speed they keep 0.75.
    """
    quiet = {row["threads"]: row["round_tok_s"] for row, busy in zip(rows, beside, strict=True) if not busy}
    checks = []
    for row, busy in zip(rows, beside, strict=True):
        count = row["threads"]
        owed = min(count, cpus * count / (count + busy))
        like = max(one for one in quiet if one <= min(count, cpus))
        kept = row["round_tok_s"] / owed / (quiet[like] / like)
        row |= {"neighbours": busy, "cpus_owed": owed, "kept": kept}
        if busy or count > cpus:
            checks.append(Check(f"{row['name']}: speed kept per CPU", kept, LEAST_KEPT, kept >= LEAST_KEPT))
    return checks


def batch(setup: Setup) -> Part:
    """Decoding several rows at once."""
    rows = []
    for sparsity in setup.args.sparsities:
        turns = []
        for count in setup.args.batches:
            task = setup.task(batch=count)
            engine = setup.contender(f"batch {sparsity} {count}", task, sparsity)
            tokens = tokens_of(task, setup.spec.vocab, 0)
            turns.append((Turn(name=engine.name, contender=engine, tokens=tokens), task))
        found = rows_of(setup, "batch", turns)
        for row in found:
            row["times_first"] = row["decode_tok_s"] / found[0]["decode_tok_s"]
        rows += found
    return rows, []


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-relullama", help="an alias or a folder")
    parser.add_argument("--dtype", default="auto", help="of all weights; auto: the checkpoint's")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sparsities", nargs="+", choices=("exact", "dense"), default=["exact", "dense"])
    parser.add_argument("--modes", nargs="+", choices=("auto", "ffi", "callback", "threads"), default=["auto"])
    parser.add_argument("--threads", type=int, default=default_threads(), help="of offload and batch")
    parser.add_argument("--threads-list", type=int, nargs="+", default=[1, 2, 4, 16], help="always with 1 and 2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--apart", action="store_true", help="one engine in memory at a time, as on a GPU")
    args = parser.parse_args(argv)
    for name in ("prompt_tokens", "new_tokens", "rounds", "threads", "threads_list", "batches"):
        given = getattr(args, name)
        low = min(given) if isinstance(given, list) else given
        if low < (least := 2 if name == "prompt_tokens" else 1):
            parser.error(f"--{name.replace('_', '-')} must be >= {least}, got {low}")
    for name in ("sparsities", "modes", "batches"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The result. DynajaxError: something is missing or refused."""
    folder: Path = model_folder(args.model, offline=True)
    spec, here, rows, checks = read_spec(folder), machine(), [], []
    measured: dict[str, Callable[[Setup], Part]] = {"offload": offload, "threads": threads, "batch": batch}
    band = Bandwidth(args.threads)
    try:
        setup = Setup(args=args, spec=spec, dtype=spec.dtype if args.dtype == "auto" else args.dtype, band=band)
        for part in args.parts:
            found = measured[part](setup)
            rows += found[0]
            checks += found[1]
    finally:
        band.close()
    on = [row.pop("on") for row in rows]
    shape = {"layers": spec.layers, "hidden": spec.hidden, "ffn": spec.ffn}
    return {**here, **on[0], "model": args.model, **shape, "rounds": args.rounds, "read_gb_s": band.best_gb_s,
            "checks": [check._asdict() for check in checks], "rows": rows}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        told = run(args)
    except DynajaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in told["rows"]:
        keys = ("p10_us_per_layer_more", "kept", "times_first")
        rest = ", ".join(f"{key} {row[key]:.2f}" for key in keys if key in row)
        print(f"{row['name']:32} {row['decode_tok_s']:8.1f} tok/s, {row['tok_per_cpu_s']:8.1f} a CPU second, {rest}")
    for check in told["checks"]:
        print(f"{'ok   ' if check['ok'] else 'WRONG'} {check['name']} {check['value']:.2f} (limit {check['limit']:g})")
    print(json.dumps(told))
    return 0 if all(check["ok"] for check in told["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
