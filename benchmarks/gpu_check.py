"""Check on this machine's device what the engine relies on, and measure what its plans are made from.

    python -m benchmarks.gpu_check --out runs/gpu-check

Needs the checkout and its dependencies, no download: weights are drawn on the device. Every stage runs in a process of
its own with a time limit, and the limits of the default run add up to less than ten minutes; --stages chooses others,
or fewer. What a stage found is printed, and with --out written, as soon as it is done, even if it failed or was cut:
OUT/STAGE.json, and OUT/all.json with all that are done so far. Both are replaced as a whole, so that whatever ends the
check leaves them readable. The last line of stdout is the same as all.json. The exit status is 1 if a stage found
something wrong, 130 or 143 after SIGINT or SIGTERM. Without a GPU the CPU backend plays the device with small sizes
(two or three minutes): that shows that the stages work, not how fast anything is. What a stage asks, and what would
follow from the answer, stands at the head of its `run` in benchmarks/gpu_stages/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_stages.isolated import Outcome, run_isolated
from dynajax.benching.machine import machine

DEFAULT_S = {  # in the order in which they run: what the others rest on and what tells most first
    "memory_kinds": 15,
    "link": 35,
    "masked": 40,
    "host_threads": 35,
    "donation": 25,
    "step": 35,
    "arms_13b": 180,
    "arms_7b": 60,
    "mixtral": 50,
    "tokens": 50,
    "readability": 15,
    "int4_70b": 45,
}
MORE_S = {"throttled": 240, "staging": 30, "budget": 240, "experts": 240}  # only if --stages names them
LIMITS_S = DEFAULT_S | MORE_S
DEVICE_FACTS = ("python", "jax", "platform", "device", "bytes_limit")


COMPILED_ONCE = {  # what a stage compiled the next one reads; unless the user keeps it anyway
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
CACHE = "JAX_COMPILATION_CACHE_DIR"


def run_stage(name: str, limit_s: float | None = None, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One stage's record: stage, ok, seconds, figures, error."""
    target = f"benchmarks.gpu_stages.{name}:run"
    outcome: Outcome = run_isolated(target, {}, limit_s=limit_s or LIMITS_S[name], env=env, group=True)
    return {"stage": name, **asdict(outcome)}


def host() -> dict[str, Any]:
    """The machine and the commit; a machine without git still has a device to check."""
    try:
        return dict(machine())
    except OSError as error:
        return {"machine": f"unknown ({error})"}


def write(out: Path | None, name: str, record: dict[str, Any]) -> None:
    """Keep a record as OUT/NAME.json: the old file or the new one is there, never a part of it."""
    if out is not None:
        draft = out / f".{name}.draft"
        draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(draft, out / f"{name}.json")


def run_all(names: Sequence[str], out: Path | None, limit_s: float | None) -> bool:
    """Run the stages one by one -> whether all are well. Whatever ends it, what is done is printed as the last line."""
    facts: dict[str, Any] = host()
    records: list[dict[str, Any]] = []
    compiled = TemporaryDirectory(ignore_cleanup_errors=True)
    env = {} if CACHE in os.environ else {**COMPILED_ONCE, CACHE: compiled.name}
    try:
        for name in names:
            record = run_stage(name, limit_s, env)
            facts |= {key: record["figures"].pop(key) for key in DEVICE_FACTS if key in record["figures"]}
            records.append(record)
            write(out, name, {**facts, **record})
            write(out, "all", {**facts, "stages": records})
            print(json.dumps(record), flush=True)
    finally:
        compiled.cleanup()
        print(json.dumps({**facts, "stages": records}), flush=True)
    return all(record["ok"] for record in records)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stages", default=",".join(DEFAULT_S), help=f"which, separated by commas; also {', '.join(MORE_S)}; all: each"
    )
    parser.add_argument("--out", type=Path, help="folder for one JSON file per stage, and all.json")
    parser.add_argument("--limit-s", type=float, help="time limit of every stage, instead of its own")
    args = parser.parse_args(argv)
    names = list(LIMITS_S) if args.stages == "all" else args.stages.split(",")
    if unknown := [name for name in names if name not in LIMITS_S]:
        parser.error(f"unknown stage {unknown[0]!r}: known are {', '.join(LIMITS_S)}")
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot write to {args.out}: {error.strerror}; name another folder with --out")
    return 0 if run_all(names, args.out, args.limit_s) else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # by way of `finally`, which ends a running stage
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    sys.exit(main())
