"""`verify`: does this machine compute what the checkpoint says?"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli import device_env
from dynajax.cli.generate import watch
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import note, progress, write_json, write_out
from dynajax.errors import FitError, NumericalError

if TYPE_CHECKING:
    from dynajax.verify import Report, Run

Against = Annotated[
    str | None,
    typer.Option(metavar="NAME|FOLDER|FILE.gguf", help="Another copy of the same weights to compare with."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="With --against: the relative error of a weight that still counts as equal; if not given, what rounding "
        "explains, and 0.02 where one copy is quantised.",
    ),
]


def verify(
    context: typer.Context,
    engine: EngineFlags,
    output: OutputFlags,
    against: Against = None,
    tolerance: Tolerance = None,
) -> None:
    """Compare the engine with a plain float64 forward: every placement, every type, every host mode.

    Names the first layer that is off and the weights that differ; exit code 7 if anything does. --dtype, --host-dtype
    and --host-mode leave only what they name, --policy none only units on the host; what does not fit --vram-budget is
    not run. Statistics are not asked.
    """
    config = engine.config()
    device_env.configure(config.vram_budget)
    context.obj.hold()
    from dynajax.verify import Settings, verify

    settings = Settings(model=engine.model, config=config, against=against, tolerance=tolerance)

    def on_run(run: Run) -> None:
        note(_line(run))
        context.obj.check()

    with closing(progress()) as report:
        found = verify(settings, watch(report, context.obj), on_run)
    if output.json:
        write_json(_json(found))
    else:
        write_out(_summary(found) + "\n")
    if found.checksums or not all(run.passed for run in found.ran):
        raise NumericalError(_failure(found))
    if not found.ran:
        raise FitError(f"nothing could be run: {found.runs[0].skipped}")


def _line(run: Run) -> str:
    """One way of running, for people."""
    where = f"{run.dtype:9} {run.placement:7} {run.host_mode:9}"
    if run.skipped is not None:
        return f"{where} not run: {run.skipped}"
    hidden = "    n/a" if run.hidden_error is None else f"{run.hidden_error:.1e}"
    verdict = "ok" if run.passed else f"OFF {_where_off(run)}"
    errors = f"layers {hidden}  logits {run.logits_error:.1e}  allowed {run.allowed:.0e}"
    return f"{where} {errors}  same token {run.same_tokens:.0%}  {verdict}"


def _where_off(run: Run) -> str:
    """What is wrong with a run that did not pass."""
    start = "in the logits" if run.first_layer is None else f"from layer {run.first_layer} on"
    if not run.tensors:
        return f"{start}, and no weight differs: it is the computation"
    first, more = run.tensors[0], len({difference.tensor for difference in run.tensors}) - 1
    others = f" and {more} tensors more" if more else ""
    return f"{start}: {first.tensor} on the {first.where} ({first.values} of {first.of} values){others}"


def _summary(report: Report) -> str:
    good = sum(run.passed is True for run in report.ran)
    sums = "no checksums.json" if report.checksums is None else f"{len(report.checksums)} tensors with other bytes"
    return (
        f"{report.model}: {good} of {len(report.ran)} ways of running agree with the reference ({report.against}, "
        f"{report.tokens} tokens, {report.layers} layers), {len(report.runs) - len(report.ran)} not run; {sums}"
    )


def _failure(report: Report) -> str:
    """The first thing that is off, named."""
    if report.checksums:
        more = f" and {len(report.checksums) - 1} more" if len(report.checksums) > 1 else ""
        return f"{report.checksums[0]}{more} is not what was written: checksums.json differs; fetch or convert it again"
    bad = next(run for run in report.ran if not run.passed)
    return f"{bad.dtype}, {bad.placement}, {bad.host_mode}: off {_where_off(bad)}"


def _json(report: Report) -> dict[str, Any]:
    """The report as JSON has it, which knows no infinity: such an error is null, and the run has not passed."""
    return _without_infinity(asdict(report)) | {"passed": report.passed}


def _without_infinity(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_infinity(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_without_infinity(inner) for inner in value]
        case float() if math.isinf(value):
            return None
    return value
