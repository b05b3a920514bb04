"""Stage `donation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.gpu_stages.device import facts, is_cpu, spread_us, temp_bytes, the_device, times_s
from benchmarks.gpu_stages.isolated import Report
from dynajax.bundles import allocate_arena
from dynajax.ops.ffn import write_slots

PARTS = 3
ROWS = (1, 8, 32, 128)
ROWS_OF_LARGE = (32,)  # enough to see whether the cost grows with the pool
POOLS = {"float16": np.dtype(np.float16), "float32": np.dtype(np.float16), "uint16": np.dtype(ml_dtypes.bfloat16)}
TEMPORARY_SHARE = 0.05  # of the pool, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much to measure; see `sizes`."""

    hidden: int
    pool_bytes: tuple[int, int]  # a layer's pool, and one that no cache holds
    repeat: int


def sizes() -> Sizes:
    """A 7B layer and up to 8 GB on a GPU, a few MiB on the CPU backend."""
    if is_cpu():
        return Sizes(hidden=256, pool_bytes=(2**23, 2**25), repeat=8)
    limit = (the_device().memory_stats() or {}).get("bytes_limit", 2**33)
    return Sizes(hidden=4096, pool_bytes=(2**28, min(2**33, limit // 5 * 2)), repeat=30)


def run(report: Report) -> None:
    """Does a donated pool update stay in place, and what does it cost by rows, pool size and type?

    The design rests on it: if a pointer changes, or the cost grows with the pool, pools must be split into pieces
    small enough to rewrite, or updated through another mechanism. A type that is slow here is stored as uint16.
    The cost by rows is what the planner's window has to account for beside the transfer.
    """
    report.add(**facts())
    wanted = sizes()
    layer, large = wanted.pool_bytes
    cases: list[dict[str, Any]] = []
    for pool_type, host_type in POOLS.items():
        for pool_bytes, rows in [(layer, rows) for rows in ROWS] + [(large, rows) for rows in ROWS_OF_LARGE]:
            case = measure(pool_type, host_type, pool_bytes, rows, wanted)
            cases.append(case)
            report.add(updates=cases)
            where = f"{pool_type}, {rows} rows, a pool of {case['pool_bytes']} bytes"
            if not case["in_place"]:
                report.fail(f"the update is not in place: {where}")
            if not case["equal"]:
                report.fail(f"the update writes something else: {where}")
            if case["temp_bytes"] > TEMPORARY_SHARE * case["pool_bytes"]:
                report.fail(f"the update needs {case['temp_bytes']} bytes of temporaries: {where}")


def measure(pool_type: str, host_type: np.dtype, pool_bytes: int, rows: int, wanted: Sizes) -> dict[str, Any]:
    """One pool, filled `rows` units at a time from a staging block and from rows that are on the device already."""
    slots = pool_bytes // (PARTS * wanted.hidden * np.dtype(pool_type).itemsize)
    parts = tuple(jnp.zeros((slots, wanted.hidden), pool_type) for _ in range(PARTS))
    staging = allocate_arena((rows, PARTS, 1, wanted.hidden), host_type)
    staging[:] = np.random.default_rng(0).standard_normal(staging.shape, np.float32).astype(host_type)
    where = np.random.default_rng(1).permutation(slots)[:rows].astype(np.int32)
    program = jax.jit(write_slots, donate_argnums=0).lower(parts, staging, where).compile()
    pointers = [part.unsafe_buffer_pointer() for part in parts]
    times = {}
    for name, source in (("from_host", staging), ("from_device", jax.device_put(staging.copy()))):
        holder = [parts]

        def update(source=source, holder=holder) -> None:
            holder[0], fence = program(holder[0], source, where)
            jax.block_until_ready((holder[0], fence))

        times[name] = spread_us(times_s(update, wanted.repeat))
        parts = holder[0]
    in_place = [part.unsafe_buffer_pointer() for part in parts] == pointers
    written = np.stack([np.asarray(part[where]) for part in parts], axis=1)  # [n, P, D]
    sent = staging[:, :, 0]
    return {
        "pool_type": pool_type,
        "pool_bytes": sum(part.nbytes for part in parts),
        "rows": rows,
        "in_place": in_place,
        "equal": bool(np.array_equal(written, sent.view(np.uint16) if pool_type == "uint16" else sent)),
        "temp_bytes": temp_bytes(program),
        "us": times,
    }
