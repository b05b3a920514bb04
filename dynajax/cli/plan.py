"""`plan`: where every byte would go, from the model's config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dynajax.cli import device_env
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import size, table, write_json, write_out

if TYPE_CHECKING:
    from dynajax.budget import MemoryPlan


def plan(context: typer.Context, engine: EngineFlags, output: OutputFlags) -> None:
    """Show what a model would take of the device and of the host. Loads no weights."""
    config = engine.config()
    device_env.configure(config.vram_budget)
    context.obj.hold()
    from dynajax.engine import plan_for

    memory = plan_for(engine.model, config)
    context.obj.check()
    if output.json:
        write_json(memory.to_json())
        return
    rows = budget_rows(memory)
    smallest = memory.smallest_budget_bytes
    rows.append(("smallest budget", f"{size(smallest)} ({smallest}B)"))  # what can be typed must work: no rounding
    rows += [(f"host {name}", size(count)) for name, count in memory.host.items()]
    rows.append(("units on the device", f"{memory.units_resident} of {memory.units_total}"))
    write_out(table(rows) + "\n")


def budget_rows(memory: MemoryPlan) -> list[tuple[str, str]]:
    """Every item on the device in the order in which it is granted, their sum, and the budget; for people."""
    rows = [(f"device {name}", size(count)) for name, count in memory.rows()]
    return [*rows, ("device, without margin", size(memory.plan_bytes)), ("budget", size(memory.budget_bytes))]
