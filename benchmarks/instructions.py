"""How many instructions the host's kernels take, counted by callgrind: the same on a quiet machine and on a busy one.

    python -m benchmarks.instructions --json

Needs valgrind (on Debian: apt install valgrind). One call a row, on one thread, every neuron of a layer live; what is
counted is the function of the C++ library alone. valgrind knows no AVX-512, so the counts are those of the AVX2
kernels: they tell whether the code does more work than it did, not how long that takes. `python -m benchmarks.compare`
holds a later run against this one, with 0.1 % for what differs between two runs.

Exit codes: 0; 2 valgrind is not there, or it failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dynajax.benching.children import with_root
from dynajax.benching.machine import machine
from hostcompute import HostPool

NEURONS, PARTS, WIDTH = 256, 3, 1024  # of the layer: some milliseconds a call, a second under valgrind
ISA = "avx2"
WIDE = {"bfloat16": np.uint16}  # what NumPy's files do not know, as what it is kept
CALLS = {  # functions of the library as callgrind names them, `?` for the asterisk of a pointer
    "ffn": "ffn(Pool&, Kernels const&, FfnCall const&)",
    "gather": "gather(Pool&, Kernels const&, hc_arena const&, int const?, long, void?)",
}


class Unavailable(Exception):
    """Why nothing can be counted, with the remedy."""


def prepare(folder: Path, dtypes: Sequence[str]) -> None:
    """Write x and an arena of every type: the counted process must not load what makes them."""
    from dynajax.benching.kernel import LayerShape, arena_of, inputs

    shape = LayerShape(neurons=NEURONS, parts=PARTS, width=WIDTH)
    np.save(folder / "x.npy", x := inputs(shape))
    for dtype in dtypes:
        arena = arena_of(shape, dtype, x)
        np.save(folder / f"{dtype}.npy", arena.view(WIDE.get(dtype, arena.dtype)))


def calls(folder: Path, dtypes: Sequence[str]) -> None:
    """In the counted process: of every type one call of each kernel, in the order of CALLS."""
    x, units = np.load(folder / "x.npy"), np.arange(NEURONS, dtype=np.int32)
    with HostPool(1) as pool:
        for dtype in dtypes:
            arena = np.load(folder / f"{dtype}.npy")
            if dtype in WIDE:
                import ml_dtypes

                arena = arena.view(getattr(ml_dtypes, dtype))
            pool.ffn(x, arena, units, activation="relu")
            pool.gather(arena, units, np.empty_like(arena))


def counted(folder: Path, dtypes: Sequence[str]) -> list[int]:
    """Instructions of every call in turn. Unavailable: valgrind is not there or fails."""
    if shutil.which("valgrind") is None:
        raise Unavailable("valgrind is not there: install it (on Debian: apt install valgrind)")
    told = [f"--toggle-collect={name}" for name in CALLS.values()]
    told += [f"--dump-{when}={CALLS['ffn']}" for when in ("before", "after")]  # a file for it, and one for what follows
    command = (
        "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", *told,
        sys.executable, "-m", "benchmarks.instructions", "--counted", str(folder), "--dtypes", *dtypes,
    )  # fmt: skip
    changed = with_root() | {"HOSTCOMPUTE_ISA": ISA, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=changed, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(
            f"valgrind ended with code {done.returncode}: {(done.stderr.strip() or '?').splitlines()[-1]}"
        )
    files = sorted(folder.glob("out.*"), key=lambda path: int(path.suffix[1:]))
    found = [instructions(path.read_text()) for path in (*files, folder / "out")]  # the last is what came at the end
    return [count for count in found if count > 0]


def instructions(text: str) -> int:
    """The total of a file that callgrind wrote."""
    found = re.search(r"^(?:summary|totals): (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def rows_of(counts: Sequence[int], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """A row a call."""
    jobs = [(dtype, kernel) for dtype in dtypes for kernel in CALLS]
    if len(jobs) != len(counts):
        raise Unavailable(f"callgrind told of {len(counts)} calls, {len(jobs)} were made")
    return [
        {"kernel": kernel, "dtype": dtype, "threads": 1, "isa": ISA, "instructions": count,
         "instructions_per_weight": round(count / (NEURONS * PARTS * WIDTH), 4)}
        for (dtype, kernel), count in zip(jobs, counts, strict=True)
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("float16", "float32", "bfloat16", "int8", "int4")
    parser.add_argument("--dtypes", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    parser.add_argument("--counted", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.counted is not None:
        calls(args.counted, args.dtypes)
        return 0
    with TemporaryDirectory(prefix="dynajax-instructions-") as name:
        prepare(Path(name), args.dtypes)
        try:
            rows = rows_of(counted(Path(name), args.dtypes), args.dtypes)
        except Unavailable as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if not args.json:
        for row in rows:
            print(f"{row['dtype']:9} {row['kernel']:7} {row['instructions']:>12,} instructions, "
                  f"{row['instructions_per_weight']:.3f} a weight")  # fmt: skip
    print(json.dumps({**machine(), "neurons": NEURONS, "parts": PARTS, "width": WIDTH, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
