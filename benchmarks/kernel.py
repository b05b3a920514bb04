"""The row-sparse FFN kernel against the read bandwidth of the same run.

One layer of 4096 x 11008, 10 % of its neurons a call, all of them live; disjoint sets of rows in turn, so
that no call finds its rows in a cache. The answer is checked against the reference in the same run.

python -m benchmarks.kernel --threads 1 2 --repeat 40
"""

import argparse
import json
import math
import mmap
from itertools import cycle

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.bandwidth import chunks, last_level_cache_bytes, machine, read_buffer, seconds, summary
from hostcompute import HostPool, ffn_reference
from predictors.lowbit import quantise

WIDTH, NEURONS, PARTS = 4096, 11008, 3
SETS = 10  # disjoint sets of rows in one arena: 10 % each
TILE = 61  # random units drawn; the arena repeats them, because drawing it whole takes minutes
DTYPES = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": 8, "int4": 4}
WARM_UP = 5


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """An array that begins on a page, as the arenas of a host store do."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    offset = -buffer.ctypes.data % mmap.PAGESIZE
    return buffer[offset : offset + nbytes].view(dtype).reshape(shape)


def packed(units: np.ndarray, bits: int) -> np.ndarray:
    """The bundle uint8 [n,P,1,groups,bytes] of a float32 one."""
    copy = quantise(units.reshape(-1, units.shape[-1]), bits)  # which keeps the signs
    rows = np.concatenate([copy.codes, copy.scales.view(np.uint8)], axis=1)
    return rows.reshape(*units.shape[:3], copy.scales.shape[1], -1)


def make_arena(dtype: str, x: np.ndarray, rng: np.random.Generator, neurons: int = NEURONS) -> np.ndarray:
    """[n,P,1,D], or packed, whose gates are all positive for x."""
    units = rng.standard_normal((TILE, PARTS, 1, x.shape[1])).astype(np.float32)
    units[:, 0] = np.abs(units[:, 0]) * np.sign(x)
    kind = DTYPES[dtype]
    units = packed(units, kind) if isinstance(kind, int) else units.astype(kind)
    arena = aligned_empty((neurons, *units.shape[1:]), units.dtype)
    for at in range(0, neurons, TILE):
        arena[at : at + TILE] = units[: neurons - at]
    return arena


def row_sets(rng: np.random.Generator, neurons: int = NEURONS) -> list[np.ndarray]:
    """Disjoint random tenths of the neurons, each sorted, as a planner hands them over."""
    order = rng.permutation(neurons).astype(np.int32)
    return [np.sort(part) for part in np.array_split(order, SETS)]


def check(pool: HostPool, x: np.ndarray, arena: np.ndarray, units: np.ndarray) -> float:
    """The largest relative error against the reference; too large a one ends the run."""
    wanted, live = ffn_reference(x, arena, units, "relu")
    result = pool.ffn(x, arena, units, activation="relu")
    error = float(np.abs(result.y - wanted).max() / np.abs(wanted).max())
    if error > 1e-5 or not live.all() or result.bytes_read != arena[units].nbytes:
        raise RuntimeError(f"the kernel is wrong: relative error {error:.1e}, {result.bytes_read} bytes read")
    return error


def measure(dtype: str, threads: int, repeat: int, width: int = WIDTH, neurons: int = NEURONS) -> dict:
    """Kernel, gather and plain reading, in turn, so that a busy moment hits all three."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, width)).astype(np.float32)
    sets = row_sets(rng, neurons)
    arenas = [make_arena(dtype, x, rng, neurons)]
    while len(arenas) * arenas[0].nbytes < 4 * last_level_cache_bytes():
        arenas.append(arenas[0].copy())
    jobs = cycle([(arena, units) for arena in arenas for units in sets])
    call_bytes = arenas[0][sets[-1]].nbytes
    staging = np.empty_like(arenas[0][: len(sets[0])])
    buffer = read_buffer(call_bytes)
    pieces = chunks(buffer, call_bytes)
    y = np.empty_like(x)
    times_s: dict[str, list[float]] = {"read": [], "ffn": [], "gather": []}
    with HostPool(threads) as pool:
        error = check(pool, x, arenas[0], sets[0])
        for _ in range(repeat + WARM_UP):
            piece, (arena, units) = next(pieces), next(jobs)
            times_s["read"].append(seconds(lambda: pool.read_sum(piece)))
            times_s["ffn"].append(seconds(lambda: pool.ffn(x, arena, units, activation="relu", out=y)))
            arena, units = next(jobs)
            times_s["gather"].append(seconds(lambda: pool.gather(arena, units, staging[: len(units)])))
        isa = pool.isa
    rates = {name: summary(values[WARM_UP:], call_bytes) for name, values in times_s.items()}
    share = {k: round(rates["ffn"][k] / rates["read"][k], 3) for k in ("median_gb_s", "best_gb_s")}
    return {
        "dtype": dtype,
        "threads": threads,
        "isa": isa,
        "call_bytes": call_bytes,
        "relative_error": error,
        **rates,
        "gb_s": rates["ffn"]["median_gb_s"],
        "share_of_read_bandwidth": share["median_gb_s"],
        "share_best": share["best_gb_s"],
    }


def empty_call_us(threads: int, repeat: int = 2000) -> float:
    """What a call costs that has no unit to compute: checks, ctypes, waking and joining the threads."""
    x, y = np.zeros((1, WIDTH), np.float32), np.empty((1, WIDTH), np.float32)
    arena, units = np.zeros((1, PARTS, 1, WIDTH), np.float16), np.empty(0, np.int32)
    with HostPool(threads) as pool:
        times_s = [seconds(lambda: pool.ffn(x, arena, units, activation="relu", out=y)) for _ in range(repeat)]
    return round(float(np.median(times_s)) * 1e6, 2)


def print_row(row: dict) -> None:
    share, best = f"{row['share_of_read_bandwidth']:.0%}", f"{row['share_best']:.0%}"
    print(f"{row['dtype']}, {row['isa']}, {row['threads']} threads: {share} of the read bandwidth (best {best})")
    for name in ("read", "ffn", "gather"):
        rate = row[name]
        spread = f"{rate['median_us']:.0f} / {rate['p10_us']:.0f} / {rate['min_us']:.0f} us"
        print(f"  {name:6} {spread:>28} {rate['median_gb_s']:7.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    args = parser.parse_args()
    say = (lambda *_: None) if args.json else print
    say(f"D {WIDTH}, N {NEURONS}, {100 // SETS} % of the rows a call; median / p10 / min us, GB/s at the median")
    rows = []
    for dtype in args.dtypes:
        for threads in args.threads:
            rows.append(measure(dtype, threads, args.repeat))
            if not args.json:
                print_row(rows[-1])
    overhead = {threads: empty_call_us(threads) for threads in args.threads}
    say("empty call: " + ", ".join(f"{us} us on {threads} threads" for threads, us in overhead.items()))
    print(json.dumps({**machine(), "width": WIDTH, "neurons": NEURONS, "rows": rows, "empty_call_us": overhead}))


if __name__ == "__main__":
    main()
