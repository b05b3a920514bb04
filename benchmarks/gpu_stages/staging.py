"""Stage `staging`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks.gpu_stages.device import attempt, facts, is_cpu, median_s, the_device
from benchmarks.gpu_stages.isolated import Report
from dynajax.bundles import allocate_arena
from dynajax.staging import KINDS, open_staging

UNIT_BYTES = 3 * 5120 * 2  # of a 13B model in 16 bit
UNITS = (1, 8, 32, 72)


def run(report: Report) -> None:
    """How long does each way of sending a block of neurons take, does it arrive whole, and which one is `auto`?

    `us` over the number of neurons is a line: where it meets one neuron is t0_s, its slope t_trans_s of the cost model.
    If `registered` fails on CUDA the staging memory cannot be pinned in place (see its error) and `auto` must not
    choose it; if `auto` is not the fastest of the others here, its measurement at the start is too short.
    """
    report.add(**facts())
    block = allocate_arena((max(UNITS), 3, 1, UNIT_BYTES // 6), np.dtype(np.float16))
    block[:] = np.random.default_rng(0).standard_normal(block.shape).astype(np.float16)
    ways: dict[str, Any] = {}
    for name in KINDS:
        ways[name] = attempt(lambda name=name: measure(name, block))
        report.add(ways=ways)
        if ways[name].get("whole") is False:
            report.fail(f"{name}: the block did not arrive as it was sent")
    report.add(auto=open_staging("auto", the_device(), block).name)
    if "error" in ways["plain"]:
        report.fail("plain transfers must work everywhere")


def measure(name: str, block: np.ndarray) -> dict[str, Any]:
    """Microseconds by number of neurons, and whether the values are right."""
    way = open_staging(name, the_device(), block)
    way.register([block])
    try:
        sent: jax.Array = way.send(block)
        whole = bool(np.array_equal(np.array(sent), block))
        del sent
        count = 5 if is_cpu() else 30
        times = {str(n): round(1e6 * median_s(lambda n=n: way.send(block[:n]), count), 1) for n in UNITS}
    finally:
        way.close()
    largest = max(UNITS)
    return {"whole": whole, "us": times, "gb_s": round(block.nbytes / times[str(largest)] / 1e3, 2)}
