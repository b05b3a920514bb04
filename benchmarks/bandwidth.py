"""Host memory read bandwidth: the limit that `kernels.py` is held against.

python -m benchmarks.bandwidth --threads 1 2
"""

import argparse
import json

from dynajax.benching.bandwidth import chunks, read_buffer, seconds, summary
from dynajax.benching.machine import machine
from hostcompute import HostPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=50)
    args = parser.parse_args()
    chunk_bytes = args.chunk_mib << 20
    buffer = read_buffer(chunk_bytes)
    rows = []
    for threads in args.threads:
        with HostPool(threads) as pool:
            pieces = chunks(buffer, chunk_bytes)
            times_s = [seconds(lambda: pool.read_sum(next(pieces))) for _ in range(args.repeat + 5)][5:]
            rows.append({"threads": threads, "isa": pool.isa, **summary(times_s, chunk_bytes)})
        print(rows[-1])
    print(json.dumps({**machine(), "chunk_bytes": chunk_bytes, "repeat": args.repeat, "rows": rows}))


if __name__ == "__main__":
    main()
