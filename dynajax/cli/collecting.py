"""`collect-stats`: which neurons a text makes live, or which experts its tokens go to."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynajax.cli import device_env
from dynajax.cli.generate import watch
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import note, progress, table, write_json, write_out
from dynajax.config import check_share
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from dynajax.collecting import Collected
    from dynajax.config import ModelSpec


def collect_stats(
    context: typer.Context,
    engine: EngineFlags,
    output: OutputFlags,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The statistics file to write (.npz).")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="UTF-8 text, or a folder of .txt files.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(metavar="FILE|random:N|topics:N", help="Token ids instead of a text.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Read at most this many.")] = 200_000,
    density: Annotated[
        float, typer.Option(metavar="D", help="Share of the neurons that counts as live where none is zero (SiLU).")
    ] = 0.5,
) -> None:
    """Run a model over a text and write how often each neuron is live and what it contributes; of a mixture of experts
    the share of the tokens that each expert serves.

    The file steers placement: --stats FILE, or put it into the model's folder as activations.npz.
    """
    check_one_source(text, ids)
    check_share("--density", density)
    config = engine.config()
    device_env.configure(config.vram_budget)
    context.obj.hold()
    import numpy as np

    from dynajax import collecting
    from dynajax.checkpoint import read_spec, write_stats
    from dynajax.model_folder import model_folder

    with closing(progress()) as report:
        step = watch(report, context.obj)
        folder = model_folder(engine.model, offline=config.offline, progress=step)
        spec = read_spec(folder)
        config = collecting.with_window(config, spec)
        windows = windows_from(text, ids, tokens, folder, spec, config.ctx or 1)
        checkpoint, found = collecting.collect(engine.model, folder, config, windows, step, density)
    neurons = spec.experts is None
    wanted = density if neurons and not spec.activation.has_zeros else None
    figures = {"mass": found.mass, "cosine": found.cosine, "density": wanted}
    more = {name: np.asarray(figure, np.float32) for name, figure in figures.items() if figure is not None}
    write_stats(out, fingerprint=checkpoint.fingerprint(), frequency=found.frequency, tokens=found.tokens, **more)
    if output.json:
        head = {"model": engine.model, "out": str(out), "tokens": found.tokens, "wanted_density": wanted}
        units = {"unit_kind": "neuron" if neurons else "expert", "layers": list(spec.unit_layers)}
        shares = {"density": _density(found), "top_quarter": found.top_quarter, "cosine": _cosine(found)}
        write_json({**head, **units, **shares})
        return
    write_out((_neurons_table(found) if neurons else _experts_table(found, spec)) + "\n")
    if wanted is not None:
        note(f"live: the {wanted:.0%} of a token's neurons that contribute most, for none is zero")
    note(f"{found.tokens} tokens, written to {out}")


def check_one_source(text: Path | None, ids: str | None) -> None:
    """UsageError unless exactly one of the two was given."""
    if (text is None) == (ids is None):
        raise UsageError("give one of --text FILE|DIR and --ids FILE")


def windows_from(
    text: Path | None, ids: str | None, tokens: int, folder: Path, spec: ModelSpec, length: int
) -> list[list[int]]:
    """What --text, or else --ids, holds of tokens, at most `tokens`, in windows of at most `length`."""
    from dynajax import collecting
    from dynajax.cli import prompts

    if text is not None:
        return collecting.windows_of(collecting.read_texts(text), folder, tokens, length)
    return collecting.cut(prompts.prompt_ids(ids or "", spec, 0)[:tokens].tolist(), length)


def _density(found: Collected) -> list[float]:
    return found.frequency.mean(axis=1).tolist()


def _cosine(found: Collected) -> list[list[float | None]] | None:
    """[L][3]; None beyond the last layer, where the figures are NaN. None: not of experts."""
    if found.cosine is None:
        return None
    return [[None if value != value else value for value in row] for row in found.cosine.tolist()]


def _neurons_table(found: Collected) -> str:
    """The figures by layer, for people."""
    rows = [("layer", "live    cosine with the next, second, third")]
    for layer, (share, row) in enumerate(zip(_density(found), _cosine(found) or [], strict=True)):
        figures = "  ".join("  n/a" if value is None else f"{value:.3f}" for value in row)
        rows.append((str(layer), f"{share:6.1%}  {figures}"))
    return table(rows)


def _experts_table(found: Collected, spec: ModelSpec) -> str:
    """The same of the layers that have experts."""
    rows = [("layer", "tokens of the busiest, of the idlest expert; share of the busiest quarter")]
    for layer, frequency, quarter in zip(spec.unit_layers, found.frequency, found.top_quarter, strict=True):
        rows.append((str(layer), f"{frequency.max():6.1%}  {frequency.min():6.1%}  {quarter:6.1%}"))
    return table(rows)
