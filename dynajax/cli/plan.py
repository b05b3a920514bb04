"""`plan`: where every byte would go, from the model's config alone; and how fast it would be on a described machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from dynajax.cli import device_env
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import note, size, table, write_json, write_out

if TYPE_CHECKING:
    from dynajax.budget import MemoryPlan
    from dynajax.config import EngineConfig
    from dynajax.engine.planning import Prepared
    from dynajax.engine.strategy import Strategy
    from dynajax.sim.estimate import Asked, Estimate, Running
    from dynajax.sim.hardware import Hardware


def plan(
    context: typer.Context,
    engine: EngineFlags,
    output: OutputFlags,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Plan for this machine instead, and simulate how fast it would be: pc-high, pc-low, pc-low-12gb, or "
            "a file of profile_machine.py.",
        ),
    ] = None,
) -> None:
    """Show what a model would take of the device and of the host. Loads no weights."""
    config = engine.config()
    from dynajax.sim.hardware import load_hardware

    machine = None if hardware is None else load_hardware(hardware)
    device_env.configure(config.vram_budget)
    context.obj.hold()
    estimate = None
    if machine is None:
        from dynajax.engine import plan_for

        memory = plan_for(engine.model, config)
    else:
        memory, estimate = _foreseen(engine.model, config, machine)
    context.obj.check()
    if machine is not None and estimate is None:
        note("no speed is simulated here of experts: scripts/simulate.py --trace takes recorded and drawn routing")
    if output.json:
        write_json(memory.to_json() | ({} if estimate is None else {"expected": estimate.to_json()}))
        return
    rows = budget_rows(memory)
    smallest = memory.smallest_budget_bytes
    rows.append(("smallest budget", f"{size(smallest)} ({smallest}B)"))  # what can be typed must work: no rounding
    rows += [(f"host {name}", size(count)) for name, count in memory.host.items()]
    rows.append(("units on the device", f"{memory.units_resident} of {memory.units_total}"))
    rows += [] if estimate is None else estimate_rows(estimate)
    write_out(table(rows) + "\n")


def budget_rows(memory: MemoryPlan) -> list[tuple[str, str]]:
    """Every item on the device in the order in which it is granted, their sum, and the budget; for people."""
    rows = [(f"device {name}", size(count)) for name, count in memory.rows()]
    return [*rows, ("device, without margin", size(memory.plan_bytes)), ("budget", size(memory.budget_bytes))]


def estimate_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """Speed on a machine that is only described; for people."""

    def speed(tok_s: float) -> str:
        return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.3g}"

    return [
        ("simulated decoding", f"{speed(estimate.decode_tok_s)} tok/s"),
        ("simulated range", f"{' to '.join(map(speed, estimate.decode_range))} tok/s"),
        ("simulated prefill", f"{speed(estimate.prefill_tok_s)} tok/s"),
        ("simulated bound", estimate.bound_by),
    ]


def _foreseen(model: str, config: EngineConfig, machine: Hardware) -> tuple[MemoryPlan, Estimate | None]:
    """What an engine would decide there, and how fast it would be; None: not known of experts."""
    from dynajax.engine.mixture.strategy import MixtureStrategy
    from dynajax.engine.planning import foresee, load_frequency
    from dynajax.engine.target import Described
    from dynajax.sim.estimate import expected

    room = machine.device_bytes - machine.reserved_bytes
    if config.vram_budget == "auto":
        config = replace(config, vram_budget=room)
    config = replace(config, staging="auto")  # ways of sending are tried out, and the device is not here
    prepared = foresee(model, config, Described("cpu" if machine.shared else "gpu", room))
    if isinstance(prepared.strategy, MixtureStrategy):
        return prepared.memory, None
    frequency = load_frequency(config.stats, prepared.folder, prepared.spec, None)  # `foresee` has read and checked it
    return prepared.memory, expected(
        _running(prepared, prepared.strategy), machine, frequency if frequency.any() else None
    )


def _running(prepared: Prepared, strategy: Strategy) -> Running:
    """The part of a plan that decides how fast it runs."""
    from dynajax.engine.prediction import knobs_of
    from dynajax.sim.estimate import Running

    shapes = prepared.programs.shapes
    return Running(
        spec=prepared.spec,
        dtype=shapes.dtype,
        host_dtype=prepared.host_dtype,
        ctx=prepared.ctx,
        chunk=shapes.chunks[-1],
        slots=prepared.placement.slots,
        resident=prepared.host_mode == "resident",
        sparsity=strategy.sparsity,
        density=prepared.prediction.density,
        policy=strategy.policy,
        guarded=strategy.guarded,
        knobs=knobs_of(strategy.knobs, prepared.prediction),
        asked=_asked(prepared, strategy),
    )


def _asked(prepared: Prepared, strategy: Strategy) -> Asked:
    """The predictors that are there, as far as they take time and can be wrong."""
    from dynajax.sim.estimate import Asked

    spec, prediction = prepared.spec, prepared.prediction
    entries = prediction.entries
    skipping = [prediction.skipping(layer) for layer in range(spec.layers)] if strategy.skips else []
    placing = [place for place in entries if place[0] == prediction.lead] if strategy.places else []
    return Asked(
        read=prediction.read_bytes(spec) / spec.layers,
        programs=round(len(entries) / spec.layers),
        skip_bits=tuple(entries[place].form.bits for place in skipping if place is not None),
        place_bits=tuple(entries[place].form.bits for place in placing),
    )
