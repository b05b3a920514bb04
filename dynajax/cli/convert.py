"""`convert`: PyTorch weights, GGUF files, PowerInfer's predictors and statistics into what this program reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynajax.cli.options import OutputFlags
from dynajax.cli.output import Progress, note, progress, size, write_json
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from dynajax.convert.detect import Kind

WHAT = {
    "weights": "PyTorch weights to safetensors",
    "gguf": "a GGUF file to safetensors",
    "predictors": "PowerInfer predictors to a predictor folder",
    "statistics": "PowerInfer activation counts to activations.npz",
}


def convert(
    context: typer.Context,
    output: OutputFlags,
    source: Annotated[
        Path,
        typer.Argument(help="Folder with pytorch_model*.bin, model_N.pt or activation_N.pt, or a .gguf file."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="What to write; a new folder.")],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|float16|bfloat16", help="Type to write; the stored one if not given."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|FOLDER", help="The model that predictors or statistics belong to."),
    ] = None,
) -> None:
    """Convert other programs' files. Nothing in them is ever run, and nothing unfinished is left behind."""
    from dynajax.convert.detect import kind_of

    kind = kind_of(source)
    _check_flags(kind, dtype, model)
    note(f"converting {source}: {WHAT[kind]}, into {out}")
    shown = progress()
    try:
        made = _run(context, kind, source, out, dtype, model, shown)
    finally:
        shown.close()
    tensors, count = made
    if output.json:
        write_json({"source": str(source), "kind": kind, "out": str(out), "tensors": tensors, "bytes": count})
    note(f"{tensors} tensors, {size(count)}, in {out}")


def _check_flags(kind: Kind, dtype: str | None, model: str | None) -> None:
    if model is not None and kind not in ("predictors", "statistics"):
        raise UsageError(f"--model goes with predictors and statistics, {kind} need none: leave it out")
    if kind == "statistics" and model is None:
        raise UsageError("statistics belong to one model: name it with --model")
    if kind == "statistics" and dtype is not None:
        raise UsageError("statistics are always float32: leave --dtype out")


def _run(
    context: typer.Context,
    kind: Kind,
    source: Path,
    out: Path,
    dtype: str | None,
    model: str | None,
    shown: Progress,
) -> tuple[int, int]:
    """(tensors, bytes) of what was written."""
    from dynajax.model_folder import model_folder

    owner = None if model is None else model_folder(model, progress=shown)
    if kind == "statistics":
        from dynajax.convert.statistics import convert_statistics

        assert owner is not None
        path = convert_statistics(source, out, model=owner, progress=shown)
        return _layers(owner), path.stat().st_size
    if kind == "predictors":
        from dynajax.convert.predictors import convert_predictors
        from predictors.folder import read_manifest

        context.obj.hold()  # orbax works with jax and with threads
        convert_predictors(source, out, model=owner, dtype=dtype, progress=shown)
        context.obj.check()
        return 2 * read_manifest(out).layers, _bytes_in(out)
    if kind == "gguf":
        from dynajax.convert.gguf import convert_gguf

        convert_gguf(source, out, dtype=dtype, progress=shown)
    else:
        from dynajax.convert.weights import convert_weights

        convert_weights(source, out, dtype=dtype, progress=shown)
    from dynajax.checkpoint.checksums import read_checksums

    return len(read_checksums(out) or {}), _bytes_in(out)


def _layers(model: Path) -> int:
    from dynajax.checkpoint import read_spec

    return read_spec(model).layers


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
