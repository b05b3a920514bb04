"""`profile-machine`: the figures of this machine that the simulator goes by."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynajax.cli import device_env
from dynajax.cli.generate import watch
from dynajax.cli.options import OutputFlags
from dynajax.cli.output import note, progress, size, table, write_json, write_out

if TYPE_CHECKING:
    from dynajax.sim.hardware import Hardware


def profile_machine(
    context: typer.Context,
    output: OutputFlags,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The hardware file to write (.json).")],
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; rougher.")] = False,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Host threads; physical cores if not given.")] = None,
) -> None:
    """Measure this machine and write its figures for the simulator.

    What is measured: reading of host memory, the host's rows by type and its gather, products and launches on the
    device, transfers between the two, plans, and what the engine itself takes for a layer and a token. Nothing else
    should run meanwhile.
    """
    from dynajax.checkpoint.drafts import draft_file, refuse_unwritable

    refuse_unwritable(out)
    device_env.configure("auto")
    context.obj.hold()
    from dynajax import profiling

    with closing(progress()) as report:
        effort = profiling.QUICK if quick else profiling.FULL
        hardware = profiling.profile_machine(threads, effort, date.today().isoformat(), watch(report, context.obj))
    text = json.dumps(hardware.to_json(), indent=2, allow_nan=False) + "\n"
    with draft_file(out, len(text)) as file:
        file.write(text.encode())
    if output.json:
        write_json(hardware.to_json())
        return
    write_out(table(_rows(hardware)) + "\n")
    note(f"{hardware.name}, written to {out}")


def _rows(hardware: Hardware) -> list[tuple[str, str]]:
    """The figures, for people."""
    rates = {f"host rows, {name}": rate for name, rate in hardware.cpu_bps.items()}
    rates = {"host memory": hardware.host_bps} | rates | {"gather": hardware.gather_bps}
    rates |= {"device": hardware.device_bps, "link": hardware.link_bps, "link, pageable": hardware.pageable_bps}
    flops = {"host products": hardware.cpu_flops, "device products": hardware.device_flops}
    names = ("t0_s", "call_s", "launch_s", "dispatch_s", "sync_s", "layer_s", "token_s", "plan_s", "balance_s")
    rows = [("device memory", size(hardware.device_bytes)), ("cores", str(hardware.cores))]
    rows += [(name, f"{rate / 1e9:.1f} GB/s") for name, rate in rates.items()]
    rows += [(name, f"{rate / 1e9:.1f} GFLOP/s") for name, rate in flops.items()]
    rows += [(name, f"{1e6 * getattr(hardware, name):.1f} us") for name in names]
    return [*rows, ("plan_unit_s", f"{1e9 * hardware.plan_unit_s:.2f} ns")]
