"""What host memory and the host's kernels give, called as the engine calls them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore, allocate_arena
from dynajax.config import Activation
from dynajax.engine.cold import ColdSide
from dynajax.policy.placement import MOST_STAGED
from dynajax.pool import DevicePool
from dynajax.profiling.pace import Pace
from hostcompute import HostPool, NumpyPool

PARTS = 3  # gate, up, down
TILE = 61  # random units drawn; an arena repeats them, because drawing all of it takes long
TINY = 64  # columns of a row that costs nothing
CPUS = Path("/sys/devices/system/cpu")
_UNKNOWN_CACHE = 32 << 20  # where the system does not say
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Host = HostPool | NumpyPool


def cache_bytes(cpus: Path = CPUS) -> int:
    """All last-level caches of the CPUs in this process's affinity mask together."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        caches = []
        for index in cpus.glob(f"cpu{cpu}/cache/index*"):
            texts = [(index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")]
            caches.append((int(texts[0]), int(texts[1][:-1]) * _UNITS[texts[1][-1]], texts[2]))
        if caches:
            _, size, shared = max(caches)
            found[shared] = size
    return sum(found.values()) or _UNKNOWN_CACHE


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_bps(host: Host, chunk_bytes: int, working_bytes: int, pace: Pace) -> float:
    """Bytes a second that all threads together read, chunk by chunk of `working_bytes` or somewhat more."""
    chunks = max(2, -(-working_bytes // chunk_bytes))
    buffer = np.ones((chunks, max(1, chunk_bytes // 8)), np.int64)
    pieces = cycle(buffer)
    if isinstance(host, HostPool):
        spent = pace.median_s(lambda: host.read_sum(next(pieces)))
    else:
        with ThreadPoolExecutor(host.threads) as threads:
            spent = pace.median_s(lambda: list(threads.map(np.sum, np.array_split(next(pieces), host.threads))))
    return buffer[0].nbytes / spent


def make_store(dtype: str, hidden: int, units: int, working_bytes: int) -> HostStore:
    """Arenas of `units` neurons each, together `working_bytes` or more; every gate is positive for a positive x."""
    rng = np.random.default_rng(0)
    tile = rng.standard_normal((min(TILE, units), PARTS, 1, hidden), dtype=np.float32)
    tile[:, 0] = np.abs(tile[:, 0])
    arenas = [allocate_arena((units, PARTS, 1, hidden), dtype)]
    arenas += [allocate_arena(arenas[0].shape, dtype) for _ in range(-(-working_bytes // arenas[0].nbytes) - 1)]
    for arena in arenas:
        for at in range(0, units, len(tile)):
            arena[at : at + len(tile)] = tile[: units - at]
    return HostStore(arenas)


def rows_bps(host: Host, store: HostStore, pace: Pace) -> float:
    """Bytes of rows a second that a token's FFN reads: a random half of a layer's units a call, every gate positive."""
    cold, jobs = _cold_side(host, store), _halves(store)
    h = _inputs(store, 1)
    live = np.empty((1, len(store.arenas[0]) // 2), np.uint8)

    def call() -> None:
        layer, units = next(jobs)
        cold.run_chosen(layer, h, units, live=live)

    spent = pace.median_s(call)
    cold.reset()
    call()
    return cold.counters.bytes_read / spent


def rows_flops(host: Host, store: HostStore, tokens: int, pace: Pace) -> float:
    """Floating point operations a second of the same for many tokens at once, as in a prompt."""
    cold, jobs = _cold_side(host, store), _halves(store)
    h, (units, parts, _, hidden) = _inputs(store, tokens), store.arenas[0].shape

    def call() -> None:
        layer, chosen = next(jobs)
        cold.run_chosen(layer, h, chosen)

    return 2 * parts * hidden * (units // 2) * tokens / pace.median_s(call)


def call_s(host: Host, pace: Pace) -> float:
    """Seconds of a call for a few tiny units: checks, ctypes, waking and joining the threads."""
    store = make_store("float32", TINY, 8, 1)
    cold, h, units = _cold_side(host, store), _inputs(store, 1), np.arange(4, dtype=np.int32)
    live = np.empty((1, len(units)), np.uint8)
    return pace.median_s(lambda: cold.run_chosen(0, h, units, live=live))


def gather_bps(host: Host, store: HostStore, pace: Pace) -> float:
    """Bytes a second of random units that are copied into a block of as many as the engine sends at a time."""
    rng = np.random.default_rng(0)
    count = min(MOST_STAGED, len(store.arenas[0]))
    block = allocate_arena((count, *store.arenas[0].shape[1:]), store.dtype)
    orders = [rng.permutation(len(arena)).astype(np.int32) for arena in store.arenas]
    jobs = cycle(
        (arena, np.sort(order[at : at + count]))
        for arena, order in zip(store.arenas, orders, strict=True)
        for at in range(0, len(order) - count + 1, count)
    )
    return block.nbytes / pace.median_s(lambda: host.gather(*next(jobs), block))


def _cold_side(host: Host, store: HostStore) -> ColdSide:
    """The engine's, of a model that has nothing on the device."""
    units, parts, width, hidden = store.arenas[0].shape
    pool = DevicePool((0,) * len(store.arenas), parts, width, (hidden,), jnp.dtype("float32"), units)
    return ColdSide(store, pool, host, Activation(kind="relu"), skip_zeros=True)


def _inputs(store: HostStore, tokens: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(1)
    return np.abs(rng.standard_normal((tokens, store.arenas[0].shape[-1]), dtype=np.float32))


def _halves(store: HostStore) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """(layer, half of its units), without end: random, ascending, and all units before any comes again."""
    rng = np.random.default_rng(0)
    half = len(store.arenas[0]) // 2
    orders = [rng.permutation(len(arena)).astype(np.int32) for arena in store.arenas]
    return cycle(
        [(i, np.sort(part)) for i, order in enumerate(orders) for part in (order[:half], order[half : 2 * half])]
    )
