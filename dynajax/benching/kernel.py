"""The row kernel of the host against the read bandwidth of the same moments, on layers of a given shape.

A tenth of a layer's neurons a call, all of them live; disjoint sets of rows in turn, so that no call finds its rows in
a cache. The answer is checked against the reference before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.benching.bandwidth import chunks, read_buffer, seconds, summary
from dynajax.benching.machine import last_level_cache_bytes
from dynajax.bundles import allocate_arena
from hostcompute import HostPool, ffn_reference
from predictors.lowbit import quantise

SETS = 10  # disjoint sets of rows in one arena: 10 % each
TILE = 61  # random units drawn; the arena repeats them, because drawing it whole takes minutes
KINDS = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": 8, "int4": 4}
WARM_UP = 5
MOST_ERROR = 1e-5

Job = tuple[np.ndarray, np.ndarray]  # an arena and which of its units


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A layer's neurons, each with one row of every part."""

    neurons: int
    parts: int
    width: int


def inputs(shape: LayerShape) -> npt.NDArray[np.float32]:
    """One row that every gate of `arena_of` is positive for."""
    return np.random.default_rng(0).standard_normal((1, shape.width)).astype(np.float32)


def arena_of(shape: LayerShape, dtype: str, x: np.ndarray) -> np.ndarray:
    """[n,P,1,D], or packed [n,P,1,groups,bytes], whose gates are all positive for x."""
    units = np.random.default_rng(1).standard_normal((min(TILE, shape.neurons), shape.parts, 1, shape.width))
    units = units.astype(np.float32)
    units[:, 0] = np.abs(units[:, 0]) * np.sign(x)
    kind = KINDS[dtype]
    units = _packed(units, kind) if isinstance(kind, int) else units.astype(kind)
    arena = allocate_arena((shape.neurons, *units.shape[1:]), units.dtype)
    for at in range(0, shape.neurons, len(units)):
        arena[at : at + len(units)] = units[: shape.neurons - at]
    return arena


def jobs_of(arenas: list[np.ndarray], neurons: int) -> Iterator[Job]:
    """Every arena with disjoint random tenths of its units, each sorted as a planner hands them over, without end."""
    order = np.random.default_rng(2).permutation(neurons).astype(np.int32)
    sets = [np.sort(part) for part in np.array_split(order, min(SETS, neurons))]
    return cycle([(arena, units) for arena in arenas for units in sets])


def check(pool: HostPool, x: np.ndarray, job: Job) -> float:
    """The largest relative error against the reference; RuntimeError if it is too large."""
    arena, units = job
    wanted, live = ffn_reference(x, arena, units, "relu")
    result = pool.ffn(x, arena, units, activation="relu")
    error = float(np.abs(result.y - wanted).max() / (np.abs(wanted).max() or 1.0))
    if error > MOST_ERROR or not live.all() or result.bytes_read != arena[units].nbytes:
        raise RuntimeError(f"the kernel is wrong: relative error {error:.1e}, {result.bytes_read} bytes read")
    return error


def kernel_figures(shape: LayerShape, dtype: str, threads: int, repeat: int) -> dict[str, Any]:
    """Kernel, gather and plain reading, in turn, so that a busy moment hits all three."""
    x = inputs(shape)
    arenas = [arena_of(shape, dtype, x)]
    while len(arenas) * arenas[0].nbytes < 4 * last_level_cache_bytes():
        arenas.append(allocate_arena(arenas[0].shape, arenas[0].dtype))
        arenas[-1][:] = arenas[0]
    jobs = jobs_of(arenas, shape.neurons)
    first = next(jobs)
    call_bytes = first[0][first[1]].nbytes
    staging = allocate_arena((len(first[1]), *first[0].shape[1:]), first[0].dtype)
    pieces = chunks(read_buffer(call_bytes), call_bytes)
    y = np.empty_like(x)
    times_s: dict[str, list[float]] = {"read": [], "ffn": [], "gather": []}
    with HostPool(threads) as pool:
        error = check(pool, x, first)
        for _ in range(repeat + WARM_UP):
            times_s["read"].append(seconds(partial(pool.read_sum, next(pieces))))
            times_s["ffn"].append(seconds(partial(pool.ffn, x, *next(jobs), activation="relu", out=y)))
            arena, units = next(jobs)
            times_s["gather"].append(seconds(partial(pool.gather, arena, units, staging[: len(units)])))
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


def _packed(units: np.ndarray, bits: int) -> np.ndarray:
    """The bundle uint8 [n,P,1,groups,bytes] of a float32 one."""
    copy = quantise(units.reshape(-1, units.shape[-1]), bits)  # which keeps the signs
    rows = np.concatenate([copy.codes, copy.scales.view(np.uint8)], axis=1)
    return rows.reshape(*units.shape[:3], copy.scales.shape[1], -1)
