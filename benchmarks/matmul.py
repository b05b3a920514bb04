"""Products with 16-bit matrices on the CPU backend: against the read bandwidth, and against XLA with float32 ones.

Both forms of `contract` in a jitted program: dot (every row times x) and sum (of the rows, as an FFN's down part). The
matrices take turns, so that none is in a cache when it comes again, and so do the kinds of product, so that a busy
moment hits them all. The answers are checked in the same run.

python -m benchmarks.matmul --repeat 40
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np

from dynajax.benching.bandwidth import chunks, read_buffer, seconds, summary
from dynajax.benching.machine import last_level_cache_bytes, machine
from dynajax.ops.linear import contract
from hostcompute import HostPool, default_threads

SHAPES = ((4096, 4096), (11008, 4096))
FORMS = {"dot": "TD,OD->TO", "sum": "TG,GD->TD"}
DTYPES = ("float16", "bfloat16", "float32")
WARM_UP = 3


def matrices(rows: int, width: int, dtype: str) -> list[jax.Array]:
    """Equal ones, more than the last cache holds."""
    drawn = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    first = jnp.asarray(drawn * np.float32(width**-0.5), dtype)
    return [first + jnp.zeros((), dtype) for _ in range(-(-4 * last_level_cache_bytes() // first.nbytes))]


def relative_error(form: str, x: jax.Array, weights: jax.Array, y: jax.Array) -> float:
    """Of y, against float64 NumPy. Too large a one ends the run."""
    wide = np.asarray(weights).astype(np.float64)
    wanted = np.asarray(x, np.float64) @ (wide.T if form == "dot" else wide)
    error = float(np.abs(y - wanted).max() / np.abs(wanted).max())
    if error > 1e-5:
        raise RuntimeError(f"the product is wrong: relative error {error:.1e}")
    return error


def one_product(run: Callable, x: jax.Array, turns: Iterator[jax.Array]) -> None:
    run(x, next(turns)).block_until_ready()


def products(form: str, rows: int, width: int, tokens: int) -> tuple[dict[str, Callable], dict[str, float]]:
    """What computes one product of each type, and its error."""
    inner = width if form == "dot" else rows
    x = jax.random.normal(jax.random.key(0), (tokens, inner), jnp.float32)
    run = jax.jit(lambda x, weights: contract(FORMS[form], x, weights))
    calls, errors = {}, {}
    for dtype in DTYPES:
        turns = matrices(rows, width, dtype)
        errors[dtype] = relative_error(form, x, turns[0], run(x, turns[0]))
        calls[dtype] = partial(one_product, run, x, cycle(turns))
    return calls, errors


def measure(pool: HostPool, form: str, rows: int, width: int, tokens: int, repeat: int) -> list[dict]:
    size = rows * width * 2
    pieces = chunks(read_buffer(size), size)
    calls, errors = products(form, rows, width, tokens)
    times_s: dict[str, list[float]] = {"read": [], **{dtype: [] for dtype in DTYPES}}
    for _ in range(WARM_UP + repeat):
        times_s["read"].append(seconds(lambda: pool.read_sum(next(pieces))))
        for dtype in DTYPES:
            times_s[dtype].append(seconds(calls[dtype]))
    rates = {name: summary(spent[WARM_UP:], size * (2 if name == "float32" else 1)) for name, spent in times_s.items()}
    common = {"form": form, "rows": rows, "width": width, "tokens": tokens, "read_gb_s": rates["read"]["median_gb_s"]}
    return [
        {
            **common,
            "dtype": dtype,
            "relative_error": errors[dtype],
            **rates[dtype],
            "share_of_read": round(rates[dtype]["median_gb_s"] / rates["read"]["median_gb_s"], 3),
            "gflop_s": round(2e-3 * rows * width * tokens / rates[dtype]["median_us"], 1),
            "times_float32": round(rates["float32"]["median_us"] / rates[dtype]["median_us"], 2),
        }
        for dtype in DTYPES
    ]


def print_row(row: dict) -> None:
    what = f"{row['form']} {row['rows']}x{row['width']} T={row['tokens']:<3} {row['dtype']:8}"
    rate = f"{row['median_gb_s']:5.1f} of {row['read_gb_s']:.1f} GB/s ({row['share_of_read']:.0%})"
    print(
        f"{what} {row['median_us']:9.0f} us {rate}, {row['gflop_s']:.0f} GFLOP/s, {row['times_float32']:.2f} x float32"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 128])
    parser.add_argument("--repeat", type=int, default=40)
    args = parser.parse_args()
    rows = []
    with HostPool(args.threads) as pool:  # the products run in its threads too; those of XLA in XLA's
        print(
            f"{args.threads} threads, {pool.isa}; median us, GB/s of weights, share of read bandwidth, of XLA float32"
        )
        for tokens in args.tokens:
            for shape in SHAPES:
                for form in FORMS:
                    repeat = args.repeat if tokens <= 8 else max(3, args.repeat // 8)
                    for row in measure(pool, form, *shape, tokens, repeat):
                        rows.append(row)
                        print_row(row)
    print(json.dumps({**machine(), "jax": jax.__version__, "threads": args.threads, "isa": pool.isa, "rows": rows}))


if __name__ == "__main__":
    main()
