"""Experts on the host: the own tiles, OpenBLAS and oneDNN, against the read bandwidth of the same run.

Every expert of a layer is given as many rows at a call: few are what decoding asks for, many a prompt. The kinds of
product take turns, so that a busy moment hits them all. Answers are checked against the reference in the same run.

python -m benchmarks.experts --tokens 1 4 16 64 256 --repeat 20
"""

import argparse
import json
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from dynajax.benching.bandwidth import chunks, read_buffer, seconds, summary
from dynajax.benching.machine import machine
from dynajax.bundles import allocate_arena
from hostcompute import HostPool, default_threads, ffn_reference
from hostcompute.dense import LIBRARIES, unavailable

SHAPES = {"olmoe": (2048, 1024), "qwen3-30b": (2048, 768)}  # D, W
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
PARTS, CHECKED_ROWS, WARM_UP, READ_BYTES = 3, 2, 2, 32 << 20


def shape_of(text: str) -> tuple[int, int]:
    """D and W of a name, or of two numbers: 2048x1024."""
    if text in SHAPES:
        return SHAPES[text]
    width, rows = (int(number) for number in text.split("x"))
    return width, rows


def make_layer(dtype: str, experts: int, width: int, rows: int) -> np.ndarray:
    """[E,P,W,D] of equal experts, because drawing them takes longer than computing them."""
    drawn = np.random.default_rng(0).standard_normal((PARTS, rows, width), np.float32) * np.float32(width**-0.5)
    layer = allocate_arena((experts, PARTS, rows, width), DTYPES[dtype])
    layer[:] = drawn
    return layer


def make_rows(tokens: int, experts: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """x [T,D] and weights [T,E], none of which is zero."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, width), np.float32)
    return x, rng.uniform(0.1, 1, (tokens, experts)).astype(np.float32)


def relative_error(y: np.ndarray, x: np.ndarray, layer: np.ndarray, units: np.ndarray, weights: np.ndarray) -> float:
    """Of some rows, against the reference. Too large a one ends the run."""
    some = slice(CHECKED_ROWS)
    wanted, _ = ffn_reference(x[some], layer, units, "silu", weights=weights[some])
    error = float(np.abs(y[some] - wanted).max() / np.abs(wanted).max())
    if error > 1e-5:
        raise RuntimeError(f"the answer is wrong: relative error {error:.1e}")
    return error


def measure(pools: dict[str, HostPool], dtype: str, shape: str, tokens: int, options: argparse.Namespace) -> list[dict]:
    """One row a kind of product."""
    (width, inner), experts = shape_of(shape), options.experts
    layer, units = make_layer(dtype, experts, width, inner), np.arange(experts, dtype=np.int32)
    x, weights = make_rows(tokens, experts, width)
    given = {"activation": "silu", "weights": weights, "out": np.empty_like(x)}
    calls: dict[str, Callable] = {name: partial(pool.ffn, x, layer, units, **given) for name, pool in pools.items()}
    errors = {name: relative_error(call().y, x, layer, units, weights) for name, call in calls.items()}
    first, pieces = next(iter(pools.values())), chunks(read_buffer(READ_BYTES), READ_BYTES)
    repeat = options.repeat if tokens <= 16 else max(3, options.repeat // 4)
    times_s: dict[str, list[float]] = {"read": [], **{name: [] for name in calls}}
    for _ in range(WARM_UP + repeat):
        times_s["read"].append(seconds(lambda: first.read_sum(next(pieces))))
        for name, call in calls.items():
            times_s[name].append(seconds(call))
    read = summary(times_s["read"][WARM_UP:], READ_BYTES)
    flop = 2 * layer.size * tokens
    rows = []
    for name in calls:
        rates = summary(times_s[name][WARM_UP:], layer.nbytes)
        rows.append(
            {
                "dtype": dtype,
                "shape": [width, inner],
                "tokens": tokens,
                "dense": name,
                "relative_error": errors[name],
                **rates,
                "read_gb_s": read["median_gb_s"],
                "share_of_read": round(rates["median_gb_s"] / read["median_gb_s"], 3),
                "gflop_s": round(flop / rates["median_us"] / 1e3, 1),
                "best_gflop_s": round(flop / rates["min_us"] / 1e3, 1),
            }
        )
    return rows


def print_row(row: dict) -> None:
    what = f"{row['dtype']:8} {'x'.join(map(str, row['shape'])):9} {row['tokens']:4} tokens {row['dense']:6}"
    rate = f"{row['median_gb_s']:5.1f} GB/s ({row['share_of_read']:4.0%} of reading), {row['gflop_s']:6.1f} GFLOP/s"
    print(f"{what} {row['median_us'] / 1e3:9.2f} ms {rate}; best {row['min_us'] / 1e3:9.2f} ms", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="names, or DxW")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="for each expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--dense", nargs="+", choices=["own", *LIBRARIES], default=["own", *LIBRARIES])
    parser.add_argument("--repeat", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    missing = {name: reason for name in options.dense if (reason := unavailable(name)) is not None}
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    pools = {name: HostPool(options.threads, name) for name in options.dense if name not in missing}
    if not pools:
        raise SystemExit("nothing is left to measure")
    isa, rows = next(iter(pools.values())).isa, []
    print(f"{options.experts} experts a call, {options.threads} threads, {isa}; medians")
    for dtype in options.dtypes:
        for shape in options.shapes:
            for tokens in options.tokens:
                for row in measure(pools, dtype, shape, tokens, options):
                    rows.append(row)
                    print_row(row)
    for pool in pools.values():
        pool.close()
    common = {"experts": options.experts, "threads": options.threads, "isa": isa, "left_out": missing}
    print(json.dumps({**machine(), **common, "rows": rows}))


if __name__ == "__main__":
    main()
