"""Scores by packed low-bit matrices on the CPU backend: against the read bandwidth, and against XLA's blocks.

One matrix of 13824 x 5120, a gate of a 13B model, in a jitted program. Copies of it take turns, so that none is in a
cache when it comes again, and so do reading and computing, so that a busy moment hits both. The answers are checked in
the same run. XLA's form is what `lowbit_scores` falls back to without the library.

python -m benchmarks.lowbit --repeat 40
"""

import argparse
import json
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np

from dynajax.benching.bandwidth import chunks, read_buffer, seconds, summary
from dynajax.benching.machine import last_level_cache_bytes, machine
from dynajax.config import GROUP
from dynajax.quant import BITS
from hostcompute import HostPool, default_threads, ffi
from predictors.lowbit import block_scores, lowbit_scores

ROWS, WIDTH = 13824, 5120
WARM_UP = 3
XLA_SHARE = 8  # XLA's form is measured this many times less often


def operands(bits: int) -> list[tuple[jax.Array, jax.Array]]:
    """Equal codes and scales at random, more than the last cache holds."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (ROWS, WIDTH // GROUP * 4 * bits), np.uint8)
    scales = rng.random((ROWS, WIDTH // GROUP), np.float32).astype(np.float16)
    copies = -(-4 * last_level_cache_bytes() // (codes.nbytes + scales.nbytes))
    return [(jnp.array(codes), jnp.array(scales)) for _ in range(copies)]


def measure(pool: HostPool, bits: int, tokens: int, repeat: int) -> dict:
    packed = operands(bits)
    size = sum(array.nbytes for array in packed[0])
    x = jax.random.normal(jax.random.key(0), (tokens, WIDTH), jnp.float32)
    run = jax.jit(partial(lowbit_scores, bits=bits)).lower(x, *packed[0]).compile()
    blocks = jax.jit(partial(block_scores, bits=bits)).lower(x, *packed[0]).compile()
    wanted = np.asarray(blocks(x, *packed[0]))
    error = float(np.abs(np.asarray(run(x, *packed[0])) - wanted).max() / np.abs(wanted).max())
    if error > 1e-5:
        raise RuntimeError(f"the product is wrong: relative error {error:.1e}")
    pieces, turns = chunks(read_buffer(size), size), cycle(packed)
    times_s: dict[str, list[float]] = {"read": [], "scores": [], "xla": []}
    for turn in range(WARM_UP + repeat):
        times_s["read"].append(seconds(lambda: pool.read_sum(next(pieces))))
        times_s["scores"].append(seconds(lambda: run(x, *next(turns)).block_until_ready()))
        if turn % XLA_SHARE == 0:
            times_s["xla"].append(seconds(lambda: blocks(x, *next(turns)).block_until_ready()))
    rates = {name: summary(spent[1 if name == "xla" else WARM_UP :], size) for name, spent in times_s.items()}
    share = {k: round(rates["scores"][k] / rates["read"][k], 3) for k in ("median_gb_s", "best_gb_s")}
    return {
        "bits": bits,
        "tokens": tokens,
        "bytes": size,
        "relative_error": error,
        **rates,
        "share_median": share["median_gb_s"],
        "share_best": share["best_gb_s"],
    }


def print_row(row: dict) -> None:
    scores, xla = row["scores"], row["xla"]
    print(
        f"{row['bits']} bits, {row['tokens']} tokens: {scores['median_us'] / 1e3:.2f} ms (best "
        f"{scores['min_us'] / 1e3:.2f}), {scores['median_gb_s']:.1f} of {row['read']['median_gb_s']:.1f} GB/s "
        f"({row['share_median']:.0%}, best {row['share_best']:.0%}); XLA {xla['median_us'] / 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--bits", type=int, nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--repeat", type=int, default=40)
    args = parser.parse_args()
    if (reason := ffi.unavailable()) is not None:
        raise SystemExit(reason)
    rows = []
    with HostPool(args.threads) as pool:  # the products run in its threads too; those of XLA in XLA's
        print(f"{ROWS} x {WIDTH}, {args.threads} threads, {pool.isa}; median ms, GB/s of codes and scales")
        for bits in args.bits:
            for tokens in args.tokens:
                rows.append(measure(pool, bits, tokens, args.repeat))
                print_row(rows[-1])
    common = {**machine(), "jax": jax.__version__, "threads": args.threads, "isa": pool.isa}
    print(json.dumps({**common, "rows_of_matrix": ROWS, "width": WIDTH, "rows": rows}))


if __name__ == "__main__":
    main()
