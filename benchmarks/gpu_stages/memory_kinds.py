"""Stage `memory_kinds`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_stages.device import attempt, dma_map, facts, is_cpu, median_s, place, the_device
from benchmarks.gpu_stages.isolated import Report
from dynajax.bundles import allocate_arena


def run(report: Report) -> None:
    """Which memories are there, does data move between them, and can plain memory be registered for transfers?

    Staging follows from it: arenas and staging slots are registered where `dma_map` works; if it does not but
    `pinned_host` does, staging goes through pinned arrays; if neither, rows are handed over as plain NumPy, which
    the runtime copies once more. If `pinned_as_numpy` is not zero-copy, results are read through plain D2H copies.
    """
    report.add(**facts())
    device = the_device()
    kinds = [memory.kind for memory in device.addressable_memories()]
    report.add(kinds=kinds, default_kind=device.default_memory().kind)
    if "device" not in kinds:
        report.fail(f"no memory of the kind device: {kinds}")
    value = np.arange(4096, dtype=np.float32)
    report.add(
        put={kind: attempt(lambda kind=kind: put(kind, value)) for kind in kinds},
        inside_jit={kind: attempt(lambda kind=kind: inside_jit(kind, value)) for kind in kinds},
        out_shardings={kind: attempt(lambda kind=kind: out_shardings(kind, value)) for kind in kinds},
    )
    nbytes = 2**20 if is_cpu() else 2**28
    if "pinned_host" in kinds:
        report.add(pinned_to_device=attempt(lambda: pinned_to_device(nbytes)))
        report.add(pinned_as_numpy=attempt(pinned_as_numpy))
    report.add(dma_map=attempt(lambda: map_arena(nbytes)))
    moved = jax.device_put(value, place())
    if not np.array_equal(np.asarray(moved), value):
        report.fail("a round trip through the device changed the data")


def put(kind: str, value: np.ndarray) -> dict[str, Any]:
    """device_put outside jit: where the result says it is, and whether it is right."""
    moved = jax.device_put(value, place(kind))
    return {"kind": moved.sharding.memory_kind, "equal": bool(np.array_equal(np.asarray(moved), value))}


def inside_jit(kind: str, value: np.ndarray) -> dict[str, Any]:
    """device_put inside jit; jax may ignore the kind without a word."""
    moved = jax.jit(lambda v: jax.device_put(v * 2, place(kind)))(value)
    return {"kind": moved.sharding.memory_kind, "equal": bool(np.array_equal(np.asarray(moved), value * 2))}


def out_shardings(kind: str, value: np.ndarray) -> dict[str, Any]:
    """A program whose result is asked for in that memory."""
    moved = jax.jit(lambda v: v * 2, out_shardings=place(kind))(value)
    return {"kind": moved.sharding.memory_kind, "equal": bool(np.array_equal(np.asarray(moved), value * 2))}


def pinned_to_device(nbytes: int) -> dict[str, Any]:
    """A pinned array sent to the device: right, a copy of its own, and how fast."""
    value = np.arange(nbytes // 4, dtype=np.float32)
    pinned = jax.device_put(value, place("pinned_host"))
    moved = jax.device_put(pinned, place()).block_until_ready()
    seconds = median_s(lambda: jax.device_put(pinned, place()).block_until_ready(), 5)
    return {
        "equal": bool(jnp.array_equal(moved, jax.device_put(value, place()))),
        "copies": moved.unsafe_buffer_pointer() != pinned.unsafe_buffer_pointer(),
        "gb_s": round(nbytes / seconds / 1e9, 2),
    }


def pinned_as_numpy() -> dict[str, Any]:
    """Whether np.asarray of a pinned array is a view."""
    pinned = jax.device_put(np.ones(2**16, np.float32), place("pinned_host")).block_until_ready()
    return {"zero_copy": np.asarray(pinned).ctypes.data == pinned.unsafe_buffer_pointer()}


def map_arena(nbytes: int) -> dict[str, Any]:
    """Registering and unregistering page-aligned NumPy memory."""
    arena = allocate_arena((nbytes,), np.uint8)
    arena[:] = 1  # its pages exist

    def map_and_unmap() -> None:
        dma_map(arena)()

    return {"available": True, "gib_s": round(nbytes / median_s(map_and_unmap, 3) / 2**30, 2)}
