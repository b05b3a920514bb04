"""Host memory read bandwidth, the limit that kernels and steps are held against, and how times are summed up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np

from dynajax.benching.machine import last_level_cache_bytes
from hostcompute import HostPool, open_pool

READ_BYTES, READS = 2**26, 10  # of a look


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
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


class Bandwidth:
    """The read bandwidth of the machine, as the best of many short looks in GB/s; None before the first look, and
    where there is no C++ library to read with."""

    def __init__(self, threads: int):
        self._pool = open_pool(threads)
        self._pieces = chunks(read_buffer(READ_BYTES), READ_BYTES)
        self.best_gb_s: float | None = None

    def look(self) -> None:
        """Read for a moment; the best so far stays."""
        if not isinstance(pool := self._pool, HostPool):
            return
        for _ in range(READS):
            spent = seconds(lambda: pool.read_sum(next(self._pieces)))
            self.best_gb_s = max(self.best_gb_s or 0.0, READ_BYTES / spent / 1e9)

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
