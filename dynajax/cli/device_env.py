"""XLA's memory pool on a GPU, sized from the budget. Must run before jax starts its backend."""

from __future__ import annotations

import os
import subprocess

from dynajax.config import parse_budget

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
OWN_CHOICE = (FRACTION, PREALLOCATE, "XLA_PYTHON_CLIENT_ALLOCATOR")  # set by the user: leave everything alone
SURPLUS, MOST = 0.03, 0.98  # shares of the device
QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def configure(vram_budget: str | int | float) -> None:
    """Make XLA take an absolute budget, and a little more, at start; does nothing for shares, without a GPU, or on
    the user's word. XLA takes the fraction of what CUDA calls the total, which is somewhat less than nvidia-smi's:
    without the surplus its limit would lie below the budget. The engine itself keeps to the budget.

    A budget of the whole device or more is left to the engine, which refuses it with the numbers: XLA would
    take a fraction above 1 as leave to spill into host memory.
    """
    budget = parse_budget(vram_budget)
    if not isinstance(budget, int) or any(name in os.environ for name in OWN_CHOICE):
        return
    total = total_bytes() if "cpu" not in os.environ.get("JAX_PLATFORMS", "").split(",") else None
    if total is None or budget >= total:
        return
    os.environ[FRACTION] = f"{min(MOST, budget / total + SURPLUS):.6f}"
    os.environ[PREALLOCATE] = "true"


def total_bytes() -> int | None:
    """Memory of the first GPU that CUDA will show, or None if there is no answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.split(",")[0].strip():
        return None
    chosen = () if visible is None else (f"--id={visible.split(',')[0].strip()}",)
    try:
        done = subprocess.run([*QUERY, *chosen], capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.split()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
