"""`evaluate`: what skipping costs in quality."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from dynajax.cli import device_env
from dynajax.cli.collecting import check_one_source, windows_from
from dynajax.cli.generate import watch
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import figure, note, progress, write_json, write_out
from dynajax.config import Sparsity
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from dynajax.config import ModelSpec
    from dynajax.evaluating import Row

HEAD = ("sparsity", "tokens", "loss", "ppl", "density", "per live", "recall", "random mask", "no FFN", "host GB read")


def evaluate(
    context: typer.Context,
    engine: EngineFlags,
    output: OutputFlags,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="UTF-8 text, or a folder of .txt files.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(metavar="FILE|random:N|topics:N", help="Token ids instead of a text.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Read at most this many.")] = 20_000,
) -> None:
    """Measure a model's loss on a text, dense, exact and predicted (--sparsity takes several, with commas).

    Beside each stand the loss with a random mask of the same density and the loss without any FFN: a small gap
    means nothing on a text for which the FFN does not matter. The routing of a mixture of experts is never altered:
    it has a loss, the share of its experts that a token goes to, and no row for predicted.
    """
    check_one_source(text, ids)
    wanted, flags = sparsities(engine)
    config = flags.config()
    device_env.configure(config.vram_budget)
    context.obj.hold()
    from dynajax import collecting, evaluating
    from dynajax.checkpoint import read_spec
    from dynajax.model_folder import model_folder

    with closing(progress()) as report:
        step = watch(report, context.obj)
        folder = model_folder(engine.model, offline=config.offline, progress=step)
        spec = read_spec(folder)
        config = collecting.with_window(config, spec)
        windows = windows_from(text, ids, tokens, folder, spec, config.ctx or 1)
        without = left_out(wanted, spec, chosen=engine.sparsity != "auto")
        names = [name for name in wanted if name not in without]
        rows = evaluating.evaluate(engine.model, folder, config, names, windows, step)
    if output.json:
        write_json({"rows": [row.to_json() for row in rows]})
        return
    write_out(table_of(rows) + "\n")
    for name, why in without.items():
        note(f"{name} is left out: {why}")


def sparsities(engine: EngineFlags) -> tuple[list[str], EngineFlags]:
    """What `--sparsity A,B` names, `auto` all three, and the flags with the first of them."""
    from dataclasses import replace

    known = [name for name in get_args(Sparsity) if name != "auto"]
    names = known if engine.sparsity == "auto" else engine.sparsity.split(",")
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"--sparsity must name some of {', '.join(known)}, got {wrong[0]!r}")
    return list(dict.fromkeys(names)), replace(engine, sparsity=names[0])


def left_out(wanted: list[str], spec: ModelSpec, *, chosen: bool) -> dict[str, str]:
    """Those of several sparsities that mean nothing for this model, and why. UsageError if `predicted` was chosen for
    experts."""
    found = {}
    if "exact" in wanted and len(wanted) > 1 and not spec.activation.has_zeros:
        found["exact"] = f"{spec.activation.kind} has no zeros to skip"
    if "predicted" in wanted and spec.experts is not None:
        if chosen:
            raise UsageError(
                "--sparsity predicted skips neurons, and the routing of experts is never altered: leave it out"
            )
        found["predicted"] = "the routing of experts is never altered"
    return found


def table_of(rows: list[Row]) -> str:
    """The figures, for people."""
    cells = [HEAD]
    for row in rows:
        cells.append(
            (
                row.sparsity,
                str(row.tokens),
                f"{row.loss_nats:.4f}",
                f"{row.ppl:.2f}",
                figure(row.density, ".1%"),
                figure(row.computed_per_live, ".2f"),
                figure(row.recall, ".1%"),
                figure(row.random_mask_loss, ".4f"),
                figure(row.no_ffn_loss, ".4f"),
                f"{row.host_bytes_read / 1e9:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
