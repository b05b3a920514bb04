"""`simulate`: the paper's tables, and policies on a recorded or drawn trace, in simulated time. Never needs jax."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import note, write_json, write_out
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from dynajax.sim.paper import Cell

TABLES = ("paper",)
OF_EXPERTS = ("--recall", "--columns", "--order")
PICTURES = (".png", ".svg", ".pdf")
PROCESSES = 2
MIXTURE_TABLES = "moe_"  # what tables of experts begin with
SEED = "the seed's figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """What only --trace takes."""

    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=V/V,NAME=V/V",
            help="Every combination of these constants: those of --set, rank (of two-layer predictors; their bytes "
            "alone), quality (of drawn scores, as correlation with the gate); of experts also recall.",
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg|.pdf", help="Draw tok/s over the first constant of --sweep.")
    ] = None
    recall: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Experts: share of a later layer's that is foretold; else as recorded."),
    ] = None
    columns: Annotated[
        str | None, typer.Option(metavar="NAME=COLUMN,...", help="Experts: where another program's trace keeps what.")
    ] = None
    order: Annotated[
        str, typer.Option(metavar="planner|engine", help="Experts: work overlaps as planned, or as the engine does it.")
    ] = "planner"


def simulate(
    engine: EngineFlags,
    output: OutputFlags,
    flags: TraceFlags,
    table: Annotated[
        str | None, typer.Option(metavar="paper", help="All tables of the DynamicInfer paper, and DALI's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the tables of --table there, too.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.npz|synthetic:NAME|recorded:NAME",
            help="What the model does: a file of generate --record or of another program (.parquet, .json, .npy, .pt, "
            ".csv), drawn from a published model's statistics, or one of the recordings that are shipped.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="pc-high|pc-low|dali-pc|FILE", help="The machine; profile-machine writes such a file."),
    ] = None,
) -> None:
    """Simulate systems of the DynamicInfer and DALI papers, or the engine's policies on a trace. All is simulated.

    --table paper sets what is simulated beside what is published. --trace with --hardware runs the policies of
    --policy A,B,... on what a model did. Loads no weights, and needs no GPU.
    """
    if (table is None) == (trace is None):
        raise UsageError("give one of --table paper and --trace FILE.npz|synthetic:NAME|recorded:NAME")
    if trace is None:
        if table not in TABLES:
            raise UsageError(f"--table must be {', '.join(TABLES)}, got {table!r}")
        given = ["--hardware"] if hardware is not None else []
        if wrong := given + changed(flags) + changed(engine):
            raise UsageError(f"--table has models and machines of its own: leave out {', '.join(wrong)}")
        _show_table(output, out)
        return
    if out is not None:
        raise UsageError("--out goes with --table: leave it out")
    if hardware is None:
        raise UsageError("--trace needs a machine: give --hardware pc-high, pc-low, dali-pc or a file of "
                         "profile-machine")  # fmt: skip
    plot = flags.plot
    if plot is not None and (flags.sweep is None or plot.suffix not in PICTURES):
        raise UsageError(f"--plot needs --sweep, and a file that ends in {', '.join(PICTURES)}, got {str(plot)!r}")
    from dynajax.cli.simulate_mixtures import is_mixture, show_mixture
    from dynajax.cli.simulate_trace import show_trace

    if is_mixture(trace):
        show_mixture(engine, output, trace, hardware, flags)
        return
    if wrong := [name for name in changed(flags) if name in OF_EXPERTS]:
        raise UsageError(f"{', '.join(wrong)} is of experts, which {trace} has not: leave it out")
    show_trace(engine, output, trace, hardware, flags.sweep, plot)


def changed(flags: EngineFlags | TraceFlags) -> list[str]:
    """The flags that were given."""
    return [f"--{f.name.replace('_', '-')}" for f in fields(flags) if getattr(flags, f.name) != f.default]


def _show_table(output: OutputFlags, out: Path | None) -> None:
    from dynajax.checkpoint.drafts import draft_file, refuse_unwritable
    from dynajax.cli.simulate_dali import dali_report
    from dynajax.cli.simulate_tables import paper_report
    from dynajax.sim.hardware import load_hardware
    from dynajax.sim.published import ROWS

    if out is not None:
        refuse_unwritable(out)
    cells, report = paper_cells(), ""
    if out is not None or not output.json:
        machines = [load_hardware(name) for name in dict.fromkeys(row.hardware for row in ROWS)]
        neurons = [cell for cell in cells if not cell.table.startswith(MIXTURE_TABLES)]
        report = f"{paper_report(neurons, ROWS, machines)}\n{dali_report(cells)}"
    if out is not None:
        text = report.encode()
        with draft_file(out, len(text)) as file:
            file.write(text)
        note(f"simulated tables, written to {out}")
    if output.json:
        write_json({"rows": [cell.to_json() for cell in cells]})
    else:
        write_out(report)


def paper_cells() -> list[Cell]:
    """Everything about every published model, in the order in which they are published, then what they share."""
    from dynajax.sim.experts import published
    from dynajax.sim.experts.paper import mean_cells
    from dynajax.sim.models import SPECS
    from dynajax.sim.paper import shared_cells
    from dynajax.sim.published import ROWS

    models = list(dict.fromkeys(row.model for row in ROWS))
    longest_first = sorted(models, key=lambda model: -SPECS[model].layers)
    found = in_workers(workers(), cells_of, [*longest_first, *published.MODELS, SEED])
    cells = [cell for model in models for cell in found[model]]
    experts = [cell for model in published.MODELS for cell in found[model]]
    return [*cells, *shared_cells(cells), *experts, *mean_cells(experts), *found[SEED]]


def cells_of(item: str) -> list[Cell]:
    """Of a model with neurons or with experts, or the seed's figures."""
    from dynajax.sim import paper
    from dynajax.sim.experts import paper as dali
    from dynajax.sim.experts import published, seed

    if item == SEED:
        return list(seed.seed_cells())
    return dali.mixture_cells_of(item) if item in published.MODELS else paper.cells_of(item)


def workers() -> Executor:
    """Processes that load nothing but the simulator, no more than cores; Ctrl-C is left to this one."""
    import multiprocessing  # noqa: TID251  spawned, not forked, and none of them uses jax
    from concurrent.futures import ProcessPoolExecutor

    count = min(PROCESSES, len(os.sched_getaffinity(0)))
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, spawned, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))


def in_workers(pool: Executor, do: Callable[[str], list[Cell]], items: Sequence[str]) -> dict[str, list[Cell]]:
    """`do` of every item, with a line on stderr for each. Whatever ends it early ends the processes, too."""
    import multiprocessing  # noqa: TID251
    from concurrent.futures import as_completed

    with pool:
        try:
            futures = {pool.submit(do, item): item for item in items}
            for count, future in enumerate(as_completed(futures), 1):
                future.result()
                note(f"simulated {futures[future]}: {count}/{len(items)}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    return {item: future.result() for future, item in futures.items()}
