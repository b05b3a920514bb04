"""Stage `link`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_stages.device import attempt, dma_map, facts, is_cpu, place, times_s
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.work import Products, Work
from dynajax.bundles import allocate_arena

Send = Callable[[], jax.Array]  # starts one transfer
PIECES = (2**15, 2**18, 2**21, 2**23, 2**25, 2**28)  # bytes: a neuron of a 13B model, 8 of them, ..., a layer's pool
CYCLE = 2039  # values until they repeat: float16 tells them apart
HEAD = 512  # values that a program returns of what it was given


def run(report: Report) -> None:
    """How fast is the link by size of the piece and kind of memory, alone and behind a running program?

    `hidden` is the share of the shorter of the two that costs nothing: near 1 a window of transfer is free, which
    is what the planner counts on; near 0 swaps only pay if they save more than their whole transfer. The fastest
    source with the smallest `blocks_us` becomes `--staging auto`; if only `pinned_host` hides, staging must be
    pinned. `as_argument` is how the engine sends today; if `device_put` is better, transfers go before the update.
    On the CPU backend nothing is sent: `plain` hands over the memory as it is.
    """
    report.add(**facts())
    products = Products()
    transfers: list[dict[str, Any]] = []
    for nbytes in (2**18, 2**22) if is_cpu() else PIECES:
        plain = allocate_arena((nbytes // 2,), np.float16)
        plain[:] = np.arange(nbytes // 2) % CYCLE
        for name, make in sources(plain).items():
            found = attempt(lambda make=make, plain=plain: measure(make, plain, products))
            transfers.append({"source": name, "nbytes": nbytes, **found})
            report.add(transfers=transfers)
            if found.get("whole") is False:
                report.fail(f"{name}, {nbytes} bytes: what arrived is not what was sent")
    if all("error" in transfer for transfer in transfers):
        report.fail("no transfer works")


def sources(plain: np.ndarray) -> dict[str, Callable[[], tuple[Send, Callable[[], None]]]]:
    """By name: what makes a transfer ready -> (send, clean up)."""
    take = jax.jit(lambda rows: rows[:HEAD] + 0)  # reads little: the transfer is what counts

    def from_plain() -> tuple[Send, Callable[[], None]]:
        return lambda: jax.device_put(plain, place()), lambda: None

    def as_argument() -> tuple[Send, Callable[[], None]]:
        return lambda: take(plain), lambda: None

    def from_pinned() -> tuple[Send, Callable[[], None]]:
        pinned = jax.device_put(plain, place("pinned_host")).block_until_ready()
        return lambda: jax.device_put(pinned, place()), lambda: None

    def from_mapped() -> tuple[Send, Callable[[], None]]:
        unmap = dma_map(plain)
        return lambda: jax.device_put(plain, place()), unmap

    def mapped_as_argument() -> tuple[Send, Callable[[], None]]:
        unmap = dma_map(plain)
        return lambda: take(plain), unmap

    return {
        "plain": from_plain,
        "plain, as_argument": as_argument,
        "pinned_host": from_pinned,
        "dma_map": from_mapped,
        "dma_map, as_argument": mapped_as_argument,
    }


def measure(
    make: Callable[[], tuple[Send, Callable[[], None]]], plain: np.ndarray, products: Products
) -> dict[str, Any]:
    """The transfer alone, and beside a program of about the same length."""
    repeat = 5 if is_cpu() else 10
    send, clean_up = make()
    try:
        arrived = np.asarray(send())
        whole = bool(np.array_equal(arrived, plain[: arrived.size]))
        alone_s = float(np.median(times_s(lambda: send().block_until_ready(), repeat)))
        work = products.work(alone_s)
        together_s, blocks_s = beside(send, work, repeat)
    finally:
        clean_up()
    return {
        "whole": whole,
        "alone_us": round(alone_s * 1e6, 1),
        "gb_s": round(plain.nbytes / alone_s / 1e9, 2),
        "work_us": round(work.seconds * 1e6, 1),
        "together_us": round(together_s * 1e6, 1),
        "blocks_us": round(blocks_s * 1e6, 1),
        "hidden": round((work.seconds + alone_s - together_s) / min(work.seconds, alone_s), 3),
    }


def beside(send: Send, work: Work, repeat: int) -> tuple[float, float]:
    """Seconds until both are done, and seconds for which starting the transfer held up the host (medians)."""
    blocked = []

    def both() -> None:
        busy = work.run()
        start = time.perf_counter()
        sent = send()
        blocked.append(time.perf_counter() - start)
        jax.block_until_ready((busy, sent))

    together = times_s(both, repeat)
    return float(np.median(together)), float(np.median(blocked[-repeat:]))
