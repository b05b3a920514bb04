"""Host memory read bandwidth: the limit that `kernels.py` is held against.

python -m benchmarks.bandwidth --threads 1 2
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import numpy as np

from hostcompute import HostPool, default_threads


def last_level_cache_bytes() -> int:
    """The largest cache of CPU 0; 32 MiB where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=32 << 20)


def machine() -> dict[str, str | int]:
    """What a reader needs to place the figures."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "machine": models[0] if models else "unknown",
        "cpus": len(os.sched_getaffinity(0)),
        "cores": default_threads(),
        "commit": git.stdout.strip() if git.returncode == 0 else "unknown",
        "last_level_cache_bytes": last_level_cache_bytes(),
    }


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_buffer(chunk_bytes: int) -> np.ndarray:
    """A touched buffer of several chunks, at least four times the last-level cache."""
    chunks = max(4, -(-4 * last_level_cache_bytes() // chunk_bytes))
    return np.ones(chunks * chunk_bytes // 8, np.int64)


def chunks(buffer: np.ndarray, chunk_bytes: int) -> Iterator[np.ndarray]:
    """The buffer piece by piece, without end: a piece has left the caches when it comes again."""
    step = chunk_bytes // buffer.itemsize
    return cycle([buffer[at : at + step] for at in range(0, len(buffer) - step + 1, step)])


def summary(times_s: list[float], work_bytes: float) -> dict[str, float]:
    """Times in microseconds and rates in GB/s; the median is what counts, p10 and min show a busy machine."""
    median, p10, best = (float(np.quantile(times_s, q)) for q in (0.5, 0.1, 0.0))
    return {
        "median_us": round(median * 1e6, 1),
        "p10_us": round(p10 * 1e6, 1),
        "min_us": round(best * 1e6, 1),
        "median_gb_s": round(work_bytes / median / 1e9, 2),
        "best_gb_s": round(work_bytes / best / 1e9, 2),
    }


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
