"""Check on this machine's device what the engine relies on, and measure what its plans are made from.

    python -m benchmarks.gpu_check --out runs/gpu-check

Needs the checkout and its dependencies, no download. Every stage runs in a process of its own with a time limit; what
it found is printed, and with --out written, as soon as it is done, even if it failed or was cut. The last line of
stdout is one JSON object with all stages; the exit status is 1 if one of them found something wrong. Without a GPU
the CPU backend plays the device with small sizes (about a minute): that shows that the stages work, not how fast
anything is. What a stage asks, and what would follow from the answer, stands at the head of its `run` in
benchmarks/gpu_stages/.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.isolated import Outcome, run_isolated
from dynajax.benching.machine import machine

LIMITS_S = {  # in the order in which they run: what the others rest on first, the long ones last
    "memory_kinds": 60,
    "donation": 120,
    "overlap": 90,
    "readability": 60,
    "tokens": 240,
    "step": 120,
    "staging": 60,
    "plans": 240,
    "experts": 300,
    "budget": 300,
}
DEVICE_FACTS = ("python", "jax", "platform", "device", "bytes_limit")


def run_stage(name: str, limit_s: float | None = None) -> dict[str, Any]:
    """One stage's record: stage, ok, seconds, figures, error."""
    target = f"benchmarks.gpu_stages.{name}:run"
    outcome: Outcome = run_isolated(target, {}, limit_s=limit_s or LIMITS_S[name], group=True)
    return {"stage": name, **asdict(outcome)}


def host() -> dict[str, Any]:
    """The machine and the commit; a machine without git still has a device to check."""
    try:
        return dict(machine())
    except OSError as error:
        return {"machine": f"unknown ({error})"}


def write(out: Path | None, name: str, record: dict[str, Any]) -> None:
    """Keep a record as OUT/NAME.json."""
    if out is not None:
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stages", default=",".join(LIMITS_S), help="which, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder for one JSON file per stage, and all.json at the end")
    parser.add_argument("--limit-s", type=float, help="time limit of every stage, instead of its own")
    args = parser.parse_args(argv)
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in LIMITS_S]:
        parser.error(f"unknown stage {unknown[0]!r}: known are {', '.join(LIMITS_S)}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = host()
    records = []
    for name in names:
        record = run_stage(name, args.limit_s)
        facts |= {key: record["figures"].pop(key) for key in DEVICE_FACTS if key in record["figures"]}
        write(args.out, name, {**facts, **record})
        print(json.dumps(record), flush=True)
        records.append(record)
    everything = {**facts, "stages": records}
    write(args.out, "all", everything)
    print(json.dumps(everything))
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`, which ends a running stage
    sys.exit(main())
