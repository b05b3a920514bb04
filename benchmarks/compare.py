"""What became slower or faster between two results of the same benchmark, beyond what each of them spread.

    python -m benchmarks.compare benchmarks/results/side_by_side-amd-epyc-zen5-2026-11-30.json runs/now.json

Rows are matched by what identifies them (IDENTITY). Of each speed a file has the best and the median; the stretch
between the two is the spread. A figure is slower if even the new best is behind the old median, and faster if even the
old best is behind the new median: what one run reaches and the other half of the time is no change. What differs by
less than --least is none either; counts of instructions have no spread, and for them that is 0.1 %. Plain reading of
memory is the machine's own speed: it is told, and counts as neither. Memory, CPU time and loading have no spread in
the files and are not compared. On a machine that others use two runs of one commit can differ, too (2 of 8 figures of
a short run did, at a load average of 2.5): repeat what is told, the older commit and the newer one in turn.

One line a change; with --json the last line is an object with all of them. Exit codes: 0 nothing is slower, 1 something
is, 2 the files cannot be compared (unreadable, of different machines without --any-machine, no row in common).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]

MACHINE = ("machine", "cpus", "cores", "last_level_cache_bytes", "memory_bytes", "platform", "device")
IDENTITY = (
    "name", "kernel", "model", "dtype", "threads", "batch", "prompt_tokens", "new_tokens", "budget", "share", "policy",
)  # fmt: skip
NO_IDENTITY = (None, "auto")  # a file from before the key was there, and the default
OWN_SPEED = "read"  # of the machine
LEAST, LEAST_INSTRUCTIONS = 0.02, 0.001


class Incomparable(Exception):
    """Why two files cannot be compared, with the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One speed as a time, or a count: less is better."""

    best: float
    median: float
    unit: str

    @property
    def spread(self) -> float:
        """How far the median is behind the best, as a share."""
        return self.median / self.best - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of a figure."""

    row: str
    figure: str
    verdict: str  # slower, faster or same; machine: its own speed
    old: Figure
    new: Figure

    @property
    def line(self) -> str:
        """For people."""
        old, new = self.old, self.new
        shift, spread = new.best / old.best - 1, max(old.spread, new.spread)
        return (
            f"{self.verdict:7} {self.row} {self.figure}: best {old.best:.5g} -> {new.best:.5g} {new.unit} "
            f"({shift:+.1%}), median {old.median:.5g} -> {new.median:.5g}; spread {spread:.1%}"
        )


def read(path: Path) -> Result:
    """A result file: one JSON object, or whatever was printed with the object as its last line."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Incomparable(f"cannot read {path}: {error}") from error
    for piece in (text, text.rsplit("\n", 1)[-1]):
        try:
            found = json.loads(piece)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and isinstance(found.get("rows"), list):
            return found
    raise Incomparable(f"{path} holds no result with rows: give the JSON that a benchmark prints last")


def check_machines(old: Result, new: Result) -> None:
    """Incomparable: what both files tell of their machines differs."""
    told = [key for key in MACHINE if key in old and key in new and old[key] != new[key]]
    if told:
        what = ", ".join(f"{key} {old[key]} and {new[key]}" for key in told)
        raise Incomparable(f"these are different machines ({what}): say --any-machine to compare them all the same")


def name_of(row: Result) -> str:
    """What a row is matched by. A row with a name says in that which policy was asked for, not only which ran."""
    keys = [key for key in IDENTITY if row.get(key) not in NO_IDENTITY]
    if "name" in keys:
        keys = [key for key in keys if key != "policy"]
    return " ".join(str(row[key]) if key in ("name", "kernel") else f"{key}={row[key]}" for key in keys)


def figures_of(row: Result) -> Iterator[tuple[str, Figure]]:
    """The speeds of a row, in whichever of the benchmarks' forms they are."""
    if isinstance(spread := row.get("spread"), dict):
        step_s, prefill_s = (
            row["batch"] / row["decode_tok_s"],
            row["batch"] * row["prompt_tokens"] / row["prefill_tok_s"],
        )
        yield "decode step", Figure(best=1e3 * spread["best_step_s"], median=1e3 * step_s, unit="ms")
        yield "prompt", Figure(best=1e3 * spread["best_prefill_s"], median=1e3 * prefill_s, unit="ms")
    for name, value in row.items():
        if isinstance(value, dict) and {"min_us", "median_us"} <= value.keys():
            yield name, Figure(best=value["min_us"], median=value["median_us"], unit="us")
    if isinstance(rates := row.get("tok_s"), list):
        yield "token", Figure(best=1e3 / max(rates), median=1e3 / sorted(rates)[len(rates) // 2], unit="ms")
    if "instructions" in row:
        yield "instructions", Figure(best=row["instructions"], median=row["instructions"], unit="")


def figures(result: Result) -> dict[tuple[str, str], Figure]:
    """{(row, figure): value} of a file. Incomparable: two rows that nothing tells apart."""
    found: dict[tuple[str, str], Figure] = {}
    rows = list(result["rows"])
    if isinstance(kernel := result.get("kernel"), dict):
        rows.append({"kernel": "kernel", **kernel})
    for row in rows:
        for figure, value in figures_of(row):
            if (key := (name_of(row), figure)) in found:
                raise Incomparable(f"two rows are {key[0]!r}: a file must tell its rows apart by {', '.join(IDENTITY)}")
            found[key] = value
    return found


def verdict_of(figure: str, old: Figure, new: Figure, least: float) -> str:
    """See the module."""
    least = LEAST_INSTRUCTIONS if figure == "instructions" else least
    if new.best > old.median and new.best > old.best * (1 + least):
        found = "slower"
    elif old.best > new.median and old.best > new.best * (1 + least):
        found = "faster"
    else:
        return "same"
    return "machine" if figure == OWN_SPEED else found


def compare(old: Result, new: Result, least: float) -> tuple[list[Change], list[str]]:
    """Every figure that both have, and the names of the rows that only one has. Incomparable: none is in both."""
    before, after = figures(old), figures(new)
    common = [key for key in before if key in after]
    if not common:
        raise Incomparable("the files have no row in common: they must be of the same benchmark, model and lengths")
    changes = [
        Change(
            row=row, figure=figure, old=before[row, figure], new=after[row, figure],
            verdict=verdict_of(figure, before[row, figure], after[row, figure], least),
        )
        for row, figure in common
    ]  # fmt: skip
    lonely = sorted({row for row, _ in before.keys() ^ after.keys()})
    return changes, lonely


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--least", type=float, default=LEAST, help="share that is no change (default: %(default)s)")
    parser.add_argument("--any-machine", action="store_true", help="though the files are of different machines")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.least < 0:
        parser.error(f"--least must be >= 0, got {args.least}")
    try:
        old, new = read(args.old), read(args.new)
        if not args.any_machine:
            check_machines(old, new)
        changes, lonely = compare(old, new, args.least)
    except Incomparable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = {verdict: sum(one.verdict == verdict for one in changes) for verdict in ("slower", "faster", "same")}
    for change in changes:
        if change.verdict != "same":
            print(change.line)
    for row in lonely:
        print(f"alone   {row}: in one of the files only")
    print(f"{old.get('commit')} -> {new.get('commit')}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    if args.json:
        print(json.dumps({**counts, "alone": lonely, "figures": [asdict(change) for change in changes]}))
    return 1 if counts["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
