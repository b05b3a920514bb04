"""Every figure of the machine this runs on, in one record."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jax

from dynajax.config import DTYPE_BYTES, DTypeName, EngineConfig
from dynajax.engine.opening import host_threads
from dynajax.policy.placement import MOST_STAGED
from dynajax.profiling import device, engine, host, overhead
from dynajax.profiling.pace import Pace
from dynajax.sim.hardware import Hardware
from hostcompute import default_threads, open_pool

FIGURES = 22  # steps of a run
CACHES, LEAST_BYTES = 4, 2**30  # what is read in turn: so many times the caches, and more than a virtual machine hides
GPU_WEIGHTS = 2**32  # bytes of a product's weights on a GPU
PROMPT_DTYPE: DTypeName = "float16"  # of the host rows whose `cpu_flops` and `gather_bps` are measured
LEAST_S = 1e-9  # of a figure that a line gives

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. Sizes are those of a model of 7B parameters, as far as memory allows."""

    pace: Pace
    hidden: int = 4096
    units: int = 4096  # of a layer on the host
    prompt_units: int = 1024  # the same where many tokens are computed at once
    prompt_bytes: int = 128 << 20  # weights on the device of the CPU backend then
    tokens: int = 128  # that many
    chunk_bytes: int = 32 << 20  # that the host reads at a time
    most_bytes: int = 4 << 30  # of host memory that a figure takes
    link_bytes: tuple[int, int] = (64 << 20, 4 << 10)
    widths: tuple[int, int] = (768, 6144)  # of the layers that are planned
    models: engine.Models  # that are decoded
    decoding: Pace  # runs of some tokens each


FULL = Effort(
    pace=Pace(seconds=1.5, least=7, most=2000),
    models=engine.LARGE,
    decoding=Pace(seconds=3.5, least=3, most=100),
)
QUICK = Effort(
    pace=Pace(seconds=0.1, least=3, most=200),
    hidden=1024,
    units=2048,
    prompt_units=256,
    prompt_bytes=16 << 20,
    chunk_bytes=8 << 20,
    most_bytes=128 << 20,
    link_bytes=(16 << 20, 4 << 10),
    models=engine.SMALL,
    decoding=Pace(seconds=0.2, least=1, most=3),
)


def profile_machine(threads: int | None, effort: Effort, date: str, progress: Progress) -> Hardware:
    """Measure this machine with so many host threads (None: physical cores) and the first device of jax.

    `progress` is told of the stage `measure` after every figure and may raise. UsageError for a number of threads that
    cannot be.
    """
    count = host_threads(EngineConfig(threads=threads))
    steps = _Steps(progress)
    there = jax.local_devices()[0]
    figures = _host_figures(count, effort, steps)
    figures |= _device_figures(there, effort, steps)
    started = device.launch(effort.hidden, effort.pace)
    steps.next()
    line = overhead.plan_line(effort.widths, effort.pace)
    steps.next()
    hardware = Hardware(
        name=machine_name(there),
        source=f"measured by profile_machine.py with jax {jax.__version__} on {date}",
        shared=there.platform == "cpu",
        device_bytes=memory_bytes(there),
        cores=default_threads(),
        launch_s=max(LEAST_S, started.ready_s - started.dispatch_s),
        dispatch_s=started.dispatch_s,
        sync_s=started.sync_s,
        layer_s=LEAST_S,
        token_s=LEAST_S,
        plan_s=max(LEAST_S, line.intercept),
        plan_unit_s=max(LEAST_S, line.slope),
        balance_s=LEAST_S,
        **figures,
    )
    return engine.with_engine_figures(hardware, effort.models, count, effort.decoding, steps.next)


class _Steps:
    """Counts figures for `progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done = progress, 0

    def next(self) -> None:
        """One more is done."""
        self._done += 1
        self._progress("measure", self._done, FIGURES)


def _host_figures(threads: int, effort: Effort, steps: _Steps) -> dict:
    pace, working = effort.pace, host_working_bytes(effort)
    found: dict = {"cpu_bps": {}}
    with open_pool(threads) as pool:
        found["host_bps"] = host.read_bps(pool, effort.chunk_bytes, working, pace)
        steps.next()
        for dtype in get_args(DTypeName):
            store = host.make_store(dtype, effort.hidden, effort.units, working)
            found["cpu_bps"][dtype] = host.rows_bps(pool, store, pace)
            if dtype == PROMPT_DTYPE:
                found["gather_bps"] = host.gather_bps(pool, store, pace)
            steps.next()
        store = host.make_store(PROMPT_DTYPE, effort.hidden, effort.prompt_units, 1)
        found["cpu_flops"] = host.rows_flops(pool, store, effort.tokens, pace)
        steps.next()
        found["call_s"] = host.call_s(pool, pace)
        steps.next()
    return found


def _device_figures(there: jax.Device, effort: Effort, steps: _Steps) -> dict:
    pace, found = effort.pace, {}
    dtype = "float32" if there.platform == "cpu" else "float16"
    parts = device.make_parts(dtype, effort.hidden, device_working_bytes(there, effort))
    found["device_bps"] = device.weights_bps(parts, pace)
    steps.next()
    if there.platform == "cpu":  # which needs no more to be busy
        parts = device.make_parts(dtype, effort.hidden, effort.prompt_bytes)
    found["device_flops"] = device.products_flops(parts, effort.tokens, pace)
    steps.next()
    block = MOST_STAGED * device.PARTS * effort.hidden * DTYPE_BYTES[PROMPT_DTYPE]
    way = device.open_link(there, "auto", block)
    found["link_bps"], found["t0_s"] = device.link(way, *effort.link_bytes, pace)
    steps.next()
    found["pageable_bps"] = device.pageable_bps(there, effort.link_bytes[0], pace)
    steps.next()
    return found


def host_working_bytes(effort: Effort) -> int:
    """What host figures go through: several times the caches, at most an eighth of memory."""
    wanted = max(LEAST_BYTES, CACHES * host.cache_bytes())
    return min(wanted, effort.most_bytes, host.physical_bytes() // 8)


def device_working_bytes(there: jax.Device, effort: Effort) -> int:
    """Weights that a product on the device reads."""
    if there.platform == "cpu":
        return host_working_bytes(effort)
    return min(GPU_WEIGHTS, memory_bytes(there) // 8)


def memory_bytes(there: jax.Device) -> int:
    """What jax may use of a GPU; without one, this machine's memory."""
    stats = there.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return host.physical_bytes()
    return int(stats["bytes_limit"])


def machine_name(there: jax.Device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, and the GPU's if there is one."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    processor = next(filter(None, [*models, platform.processor(), platform.machine()]), "unknown processor")
    return processor if there.platform == "cpu" else f"{processor} + {there.device_kind}"
