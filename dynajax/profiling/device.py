"""What the device and the way to it give: products, programs that do nothing, transfers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.bundles import allocate_arena
from dynajax.config import Activation
from dynajax.ops.ffn import pool_ffn
from dynajax.profiling.pace import Pace
from dynajax.staging import Staging, open_staging

PARTS = 3  # gate, up, down
QUEUED = 4  # products that are dispatched before one is waited for: the launch hides behind the one before
LEAVES = 6  # of an attention block: two norms, q, k, v and o
SMALL = 16  # columns of what costs nothing

Parts = tuple[jax.Array, ...]


class Launch(NamedTuple):
    """Seconds of a program that has nothing to do."""

    ready_s: float  # from the call until its outputs are ready
    dispatch_s: float  # until the call returns, which is part of that
    sync_s: float  # an output's way to the host and a NumPy argument's way to the next program


class Link(NamedTuple):
    """The way from the engine's staging memory to the device."""

    bps: float
    t0_s: float  # of a transfer of nothing


def make_parts(dtype: str, hidden: int, total_bytes: int) -> Parts:
    """Random weights of a pool, three arrays [G, D] of `total_bytes` or somewhat more."""
    slots = max(1, -(-total_bytes // (PARTS * hidden * jnp.dtype(dtype).itemsize)))
    draw = jax.jit(partial(jax.random.normal, shape=(slots, hidden), dtype=jnp.dtype(dtype)))
    return tuple(draw(key).block_until_ready() for key in jax.random.split(jax.random.key(0), PARTS))


def weights_bps(parts: Parts, pace: Pace) -> float:
    """Bytes of weights a second that a product of one row reads, as a hot program computes it."""
    return sum(part.nbytes for part in parts) / product_s(parts, 1, pace)


def products_flops(parts: Parts, tokens: int, pace: Pace) -> float:
    """Floating point operations a second of the same for many rows."""
    return 2 * sum(part.size for part in parts) * tokens / product_s(parts, tokens, pace)


def product_s(parts: Parts, tokens: int, pace: Pace) -> float:
    """Seconds of the FFN of some rows, one of several in a queue."""
    h = jax.random.normal(jax.random.key(1), (tokens, parts[0].shape[1]), jnp.float32)
    program = jax.jit(partial(_ffn, activation=Activation(kind="relu"))).lower(h, parts).compile()

    def queue() -> None:
        jax.block_until_ready([program(h, parts) for _ in range(QUEUED)])

    return pace.median_s(queue) / QUEUED


def launch(hidden: int, pace: Pace) -> Launch:
    """A program with the arguments of an attention program, called as the engine calls that; h and y are [1, D]."""
    from_device = _caller(hidden, jnp.zeros((1, hidden), jnp.float32))
    from_host = _caller(hidden, np.zeros((1, hidden), np.float32))
    found = pace.samples(lambda: (*from_device(), *from_host()))  # in turn: a busy moment hits both
    dispatch_s, ready_s, copy_s, _, handed_s, _ = (float(np.median(column)) for column in zip(*found, strict=True))
    return Launch(ready_s, dispatch_s, copy_s + max(0.0, handed_s - ready_s))


def open_link(device: jax.Device, wanted: str, block_bytes: int) -> Staging:
    """The engine's way to send blocks of that size; `wanted`: see `open_staging`."""
    return open_staging(wanted, device, allocate_arena((block_bytes,), np.uint8))


def link(staging: Staging, large_bytes: int, small_bytes: int, pace: Pace) -> Link:
    """From a large block and a small one. The staging is closed.

    A way that copies nothing, as on the CPU backend where an aligned block is used in place, has a rate all the same:
    the large block's bytes by the time of the call.
    """
    blocks = [allocate_arena((size,), np.uint8) for size in (large_bytes, small_bytes)]
    for block in blocks:
        block[:] = 1  # every page is there
    staging.register(blocks)
    try:
        large_s, small_s = (pace.median_s(partial(staging.send, block)) for block in blocks)
    finally:
        staging.close()
    return Link(large_bytes / large_s, small_s)


def pageable_bps(device: jax.Device, size: int, pace: Pace) -> float:
    """Bytes a second of an ordinary array that is put on the device."""
    block = _unaligned(size)
    return size / pace.median_s(lambda: jax.device_put(block, device).block_until_ready())


def _ffn(h: jax.Array, parts: Parts, *, activation: Activation) -> jax.Array:
    return pool_ffn(h, parts, activation)[0]


def _nothing(leaves, k, v, x, y_cold, positions):
    """In place of `attend_rows`: the least that depends on x and y_cold -> x, h, k, v."""
    x = x + y_cold
    return x, -x, k, v


def _caller(hidden: int, y_cold: jax.Array | npt.NDArray) -> Callable[[], tuple[float, float, float]]:
    """Calls that return seconds: until dispatched, until ready, and of the copy of h to the host after that."""
    leaves = tuple(jnp.zeros((SMALL, SMALL), jnp.float32) for _ in range(LEAVES))
    caches = tuple(jnp.zeros((1, SMALL, 1, SMALL), jnp.float32) for _ in range(2))
    x, positions = jnp.zeros((1, hidden), jnp.float32), np.zeros(1, np.int32)
    lowered = jax.jit(_nothing, donate_argnums=(1, 2), keep_unused=True).lower(leaves, *caches, x, y_cold, positions)
    program = lowered.compile()

    def call() -> tuple[float, float, float]:
        nonlocal caches
        begin = time.perf_counter()
        _, h, *new = program(leaves, *caches, x, y_cold, positions)
        dispatched = time.perf_counter()
        h.block_until_ready()
        ready = time.perf_counter()
        np.asarray(h)
        copied = time.perf_counter()
        caches = tuple(new)
        return dispatched - begin, ready - begin, copied - ready

    return call


def _unaligned(size: int) -> npt.NDArray[np.uint8]:
    """Touched memory that does not begin where the runtime could use it in place."""
    memory = np.ones(size + 128, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + 16
    return memory[start : start + size]
