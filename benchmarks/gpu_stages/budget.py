"""Stage `budget`. The stage's own process never starts a backend: an allocator's peak only falls with its process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_stages.isolated import Report, run_isolated

LIMIT_S = 90
PROMPT_TOKENS, NEW_TOKENS = 40, 8
UPDATES, UPDATE_ROWS = 20, 32
POOL_SHARE = 0.05  # what updating and reading a pool may take beside it


def run(report: Report) -> None:
    """Does the engine stay within its budget on this device, and how far is the plan from the measured peak?

    A peak above the budget means that the accountant misses something of this backend (workspaces of libraries,
    arguments in flight, fragments): it is planned, or the margin in `engine/planning.py` grows by it. A plan far above
    the peak wastes room for neurons. `as_command` shows whether the memory fraction that the command line sets
    before jax starts leaves the engine the budget it was given; if not, the fraction has to be larger.
    """
    with TemporaryDirectory() as folder:
        plan = _child(report, "prepare", {"folder": folder})
        model, budgets, on_cpu = plan["model"], plan["budgets"], plan["platform"] == "cpu"
        alone = [budgets] if on_cpu else [{name: budget} for name, budget in budgets.items()]
        for some in alone:
            _child(report, "measure", {"model": model, "budgets": some})
        if not on_cpu:
            last = {"as_command": budgets["everything"]}
            _child(report, "measure", {"model": model, "budgets": last, "as_command": True})
    _child(report, "pool_update", {})


def _child(report: Report, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One of the functions below in a process of its own; what it found goes into this report too."""
    outcome = run_isolated(f"{__name__}:{function}", arguments, limit_s=LIMIT_S)
    report.add(**outcome.figures)
    if outcome.error is not None:
        report.fail(f"{function}: {outcome.error}")
    return outcome.figures


def prepare(report: Report, folder: str) -> None:
    """Write a random model and size the budgets."""
    from benchmarks.gpu_stages.device import facts, is_cpu
    from benchmarks.gpu_stages.models import STAND_IN, budgets
    from dynajax.testing import make_checkpoint

    large = replace(STAND_IN, hidden=2048, ffn=8192, heads=16, kv_heads=16, head_dim=128, vocab=8192)
    make_checkpoint(Path(folder), STAND_IN if is_cpu() else large, dtype="float16")
    report.add(**facts(), model=folder, budgets=budgets(folder, _dtype()))


def measure(report: Report, model: str, budgets: dict[str, int], as_command: bool = False) -> None:
    """Generate within each budget; as_command: after setting the allocator's share as the command line does."""
    if as_command:
        from dynajax.cli.device_env import configure

        configure(next(iter(budgets.values())))
    from benchmarks.gpu_stages.models import CTX
    from dynajax import Engine

    for name, budget in budgets.items():
        with Engine.from_pretrained(model, dtype=_dtype(), vram_budget=budget, ctx=CTX) as engine:
            engine.generate(list(range(3, 3 + PROMPT_TOKENS)), max_new_tokens=NEW_TOKENS, ignore_eos=True)
            result = engine.last_result
        memory = result.memory
        over = memory["peak_bytes"] - memory["plan_bytes"]
        report.add(**{name: {**memory, "hot_share": result.units.hot_share, "peak_over_plan_bytes": over}})
        if memory["peak_bytes"] > memory["budget_bytes"]:
            report.fail(f"{name}: the peak is {memory['peak_bytes'] - memory['budget_bytes']} bytes above the budget")


def pool_update(report: Report) -> None:
    """An FFN-shaped pool, updated again and again from staging, then read by the FFN: what that takes beside it.

    If compiling alone takes too much (a compiler that tries kernels on the device), every program has to be compiled
    before the pool is allocated.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.gpu_stages.device import is_cpu, temp_bytes, the_device
    from dynajax.bundles import allocate_arena
    from dynajax.config import Activation
    from dynajax.memory import PeakMeter
    from dynajax.ops.ffn import pool_ffn, write_slots

    slots, hidden = (2**13, 256) if is_cpu() else (2**16, 4096)
    meter = PeakMeter(the_device())
    parts = tuple(jnp.zeros((slots, hidden), _dtype()) for _ in range(3))
    staging = allocate_arena((UPDATE_ROWS, 3, 1, hidden), np.float16)
    where = np.arange(UPDATE_ROWS, dtype=np.int32)
    h = jnp.ones((1, hidden), jnp.float32)
    write = jax.jit(write_slots, donate_argnums=0).lower(parts, staging, where).compile()
    read = jax.jit(pool_ffn, static_argnums=2).lower(h, parts, Activation()).compile()
    meter.sample()
    peaks = {"compile": meter.peak_bytes(0)}
    for name, program in (("update", write), ("read", read)):
        for step in range(UPDATES):
            if program is write:
                parts, fence = write(parts, staging, where + step * UPDATE_ROWS)
                fence.block_until_ready()
            else:
                jax.block_until_ready(read(h, parts))
            meter.sample()
        peaks[name] = meter.peak_bytes(temp_bytes(program))
    pool_bytes = sum(part.nbytes for part in parts)
    extra = max(peaks.values()) - pool_bytes
    report.add(pool_update={"pool_bytes": pool_bytes, "peak_bytes": peaks, "extra_share": round(extra / pool_bytes, 4)})
    if extra > POOL_SHARE * pool_bytes:
        report.fail(f"pool_update: {extra} bytes beside a pool of {pool_bytes}")


def _dtype() -> str:
    from benchmarks.gpu_stages.device import is_cpu

    return "float32" if is_cpu() else "float16"
