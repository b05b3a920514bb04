"""`verify`: does this machine compute what the checkpoint says?"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli import device_env
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import note, progress, write_json, write_out
from dynajax.errors import NumericalError

if TYPE_CHECKING:
    from dynajax.verify import Report, Run

Against = Annotated[
    str | None,
    typer.Option(metavar="NAME|FOLDER", help="Another copy of the same weights to compare with; none: itself."),
]
Tolerance = Annotated[
    float, typer.Option(metavar="X", help="With --against: the relative error of a weight that still counts as equal.")
]


def verify(
    context: typer.Context,
    engine: EngineFlags,
    output: OutputFlags,
    against: Against = None,
    tolerance: Tolerance = 0.02,
) -> None:
    """Compare the engine with a plain float64 forward: every placement, every type, every host mode.

    Names the first layer that is off and the weights that differ; exit code 7 if anything does. --dtype restricts the
    types, --vram-budget the placements.
    """
    config = engine.config()
    device_env.configure(config.vram_budget)
    context.obj.hold()
    from dynajax.verify import Settings, verify

    settings = Settings(model=engine.model, config=config, against=against, tolerance=tolerance)
    show = note if not output.json else (lambda line: None)

    def on_run(run: Run) -> None:
        show(_line(run))
        context.obj.check()

    with closing(progress()) as downloading:
        found = verify(settings, downloading, on_run)
    if output.json:
        write_json(_json(found))
    else:
        write_out(_summary(found) + "\n")
    if not found.passed:
        raise NumericalError(_failure(found))


def _line(run: Run) -> str:
    """One way of running, for people."""
    where = f"{run.dtype:9} {run.placement:7} {run.host_mode:9}"
    if run.skipped is not None:
        return f"{where} not run: {run.skipped}"
    cosine = "      n/a" if run.cosine is None else f"{run.cosine:.7f}"
    verdict = "ok" if run.passed else f"OFF {_where_off(run)}"
    return f"{where} cosine {cosine}  logits {run.logits_error:.1e}  same token {run.same_tokens:.0%}  {verdict}"


def _where_off(run: Run) -> str:
    words = [] if run.first_layer is None else [f"from layer {run.first_layer} on"]
    if run.tensors:
        more = f" and {len(run.tensors) - 1} more" if len(run.tensors) > 1 else ""
        words.append(f"{run.tensors[0]}{more} differs")
    return ", ".join(words) or "in the logits"


def _summary(report: Report) -> str:
    ran = [run for run in report.runs if run.skipped is None]
    good = sum(run.passed for run in ran)
    sums = "no checksums" if report.checksums is None else f"{len(report.checksums)} tensors with other bytes"
    return (
        f"{report.model}: {good} of {len(ran)} ways of running agree with the reference ({report.against}, "
        f"{report.tokens} tokens, {report.layers} layers); {sums}"
    )


def _failure(report: Report) -> str:
    """The first thing that is off, named."""
    if report.checksums:
        more = f" and {len(report.checksums) - 1} more" if len(report.checksums) > 1 else ""
        return f"{report.checksums[0]}{more} is not what was written: checksums.json differs; fetch or convert it again"
    bad = next((run for run in report.runs if run.skipped is None and not run.passed), None)
    if bad is None:
        return "nothing could be run: raise --vram-budget"
    return f"{bad.dtype}, {bad.placement}, {bad.host_mode}: off {_where_off(bad)}"


def _json(report: Report) -> dict[str, Any]:
    return asdict(report) | {"passed": report.passed}
