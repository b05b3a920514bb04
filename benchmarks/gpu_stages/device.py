"""What every stage needs of the device: which it is, memory to measure with, and clocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Sharding = jax.sharding.SingleDeviceSharding


def the_device() -> jax.Device:
    """The first device of the default backend."""
    return jax.local_devices()[0]


def is_cpu() -> bool:
    """Whether the CPU backend plays the device: sizes are then small, and times only show that the stage runs."""
    return the_device().platform == "cpu"


def facts() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    device = the_device()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "bytes_limit": (device.memory_stats() or {}).get("bytes_limit"),
    }


def place(kind: str = "device") -> Sharding:
    """The first device's memory of one kind."""
    return Sharding(the_device(), memory_kind=kind)


def dma_map(array: np.ndarray) -> Callable[[], None]:
    """Register page-aligned memory for direct transfers; -> what undoes it. Raises where that is not implemented."""
    client = the_device().client
    client.dma_map(array.ctypes.data, array.nbytes)
    return lambda: client.dma_unmap(array.ctypes.data)


def temp_bytes(program: jax.stages.Compiled) -> int:
    """What a program needs beside its arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None, "this backend does not say what a program needs"
    return int(analysis.temp_size_in_bytes)


def attempt(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A probe's figures, or {"error": ...}: a machine that cannot do it is an answer, not a failure."""
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}


def times_s(call: Callable[[], object], count: int, warm_up: int = 2) -> list[float]:
    """Seconds of each call after the first few; the call waits for its own result."""
    measured = []
    for _ in range(count + warm_up):
        start = time.perf_counter()
        call()
        measured.append(time.perf_counter() - start)
    return measured[warm_up:]


def median_s(call: Callable[[], object], count: int) -> float:
    """The median of `times_s`."""
    return float(np.median(times_s(call, count)))


def spread_us(measured_s: Sequence[float]) -> dict[str, float]:
    """Microseconds: the median counts, the 10th percentile and the least show a busy machine."""
    values = {"median": np.median(measured_s), "p10": np.percentile(measured_s, 10), "min": np.min(measured_s)}
    return {name: round(float(value) * 1e6, 1) for name, value in values.items()}
