"""The row-sparse FFN kernel against the read bandwidth of the same run.

One layer of 4096 x 11008; `dynajax/benching/kernel.py` says how a call is timed and checked.

python -m benchmarks.kernel --threads 1 2 --repeat 40
"""

import argparse
import json

import numpy as np

from dynajax.benching.bandwidth import seconds
from dynajax.benching.kernel import KINDS, SETS, LayerShape, kernel_figures
from dynajax.benching.machine import machine
from hostcompute import HostPool

SHAPE = LayerShape(neurons=11008, parts=3, width=4096)


def empty_call_us(threads: int, repeat: int = 2000) -> float:
    """What a call costs that has no unit to compute: checks, ctypes, waking and joining the threads."""
    x, y = np.zeros((1, SHAPE.width), np.float32), np.empty((1, SHAPE.width), np.float32)
    arena, units = np.zeros((1, SHAPE.parts, 1, SHAPE.width), np.float16), np.empty(0, np.int32)
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
    parser.add_argument("--dtypes", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    args = parser.parse_args()
    say = (lambda *_: None) if args.json else print
    say(f"{SHAPE}, {100 // SETS} % of the rows a call; median / p10 / min us, GB/s at the median")
    rows = []
    for dtype in args.dtypes:
        for threads in args.threads:
            rows.append(kernel_figures(SHAPE, dtype, threads, args.repeat))
            if not args.json:
                print_row(rows[-1])
    overhead = {threads: empty_call_us(threads) for threads in args.threads}
    say("empty call: " + ", ".join(f"{us} us on {threads} threads" for threads, us in overhead.items()))
    print(
        json.dumps(
            {**machine(), "width": SHAPE.width, "neurons": SHAPE.neurons, "rows": rows, "empty_call_us": overhead}
        )
    )


if __name__ == "__main__":
    main()
