"""What jax is told by environment: XLA's memory pool on a GPU, sized from the budget, and where compiled programs are
kept. Must run before jax starts its backend."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

from dynajax.config import parse_budget
from dynajax.errors import StorageError

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
OWN_CHOICE = (FRACTION, PREALLOCATE, "XLA_PYTHON_CLIENT_ALLOCATOR")  # set by the user: leave everything alone
SURPLUS, CONTEXT, MOST = 0.03, 0.01, 0.98  # shares of the device
QUERY = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
KEPT = "JAX_COMPILATION_CACHE_DIR"
KEEPING = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # ours take 0.1 s each, and there are dozens
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),  # bytes; then those go that were used last the longest ago
}


def configure(vram_budget: str | int | float) -> None:
    """Before a command makes an engine."""
    keep_programs()
    size_pool(vram_budget)


def keep_programs() -> None:
    """Compiled programs are kept between runs, in a folder for each kind of CPU: what is compiled for one may hold
    instructions that another lacks. A user's own JAX_COMPILATION_CACHE_DIR is left alone."""
    if KEPT in os.environ:
        return
    from dynajax.checkpoint.places import cache_folder

    try:
        os.environ[KEPT] = str(cache_folder() / "programs" / _cpu_kind())
    except StorageError:  # no home: compiled each time
        return
    for name, value in KEEPING.items():
        os.environ.setdefault(name, value)


def _cpu_kind() -> str:
    """A hash of the instructions that this CPU has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:16]


def size_pool(vram_budget: str | int | float) -> None:
    """Tell XLA how much of the GPU to take at its start; does nothing without a GPU, or on the user's word.

    For `auto` and shares that is what is free, of which the engine takes its share, less what CUDA itself needs;
    jax alone would take three quarters of the device. For an absolute budget it is the budget and a little more: XLA
    takes the fraction of what CUDA calls the total, which is somewhat less than nvidia-smi's, and without the surplus
    its limit would lie below the budget. The engine itself keeps to the budget. A budget of the whole device or more
    is left to the engine, which refuses it with the numbers: XLA would take a fraction above 1 as leave to spill into
    host memory.
    """
    budget = parse_budget(vram_budget)
    if any(name in os.environ for name in OWN_CHOICE) or _chosen_platform() == "cpu":
        return
    memory = device_bytes()
    if memory is None:
        return
    total, free = memory
    fraction = budget / total + SURPLUS if isinstance(budget, int) else free / total - CONTEXT
    if fraction <= 0 or (isinstance(budget, int) and budget >= total):
        return
    os.environ[FRACTION] = f"{min(MOST, fraction):.6f}"
    os.environ[PREALLOCATE] = "true"


def _chosen_platform() -> str:
    """The platform the user wants jax to compute on: the first one named; "" if none is."""
    return os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip()


def device_bytes() -> tuple[int, int] | None:
    """Memory of the first GPU that CUDA will show, (total, free), or None if there is no answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.split(",")[0].strip():
        return None
    chosen = () if visible is None else (f"--id={visible.split(',')[0].strip()}",)
    try:
        done = subprocess.run([*QUERY, *chosen], capture_output=True, text=True, timeout=10, check=True)
        total, free = (int(number) * 2**20 for number in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return (total, free) if total > 0 else None
