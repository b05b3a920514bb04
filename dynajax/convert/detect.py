"""What a user asks to convert: by file names alone, nothing is opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from dynajax.checkpoint.wording import listing, located
from dynajax.convert import predictors, statistics
from dynajax.convert.layer_files import has_layer_files
from dynajax.convert.weights import has_torch_weights
from dynajax.errors import ModelError, StorageError, UsageError

Kind = Literal["weights", "predictors", "statistics", "gguf"]


def kind_of(source: Path) -> Kind:
    """ModelError: there is nothing this program converts. UsageError: several things, or one file of a folder."""
    if source.is_file():
        if source.name.endswith(".gguf"):
            return "gguf"
        if source.name.endswith((".bin", ".pt", ".pth")):
            raise UsageError(f"{located(source)} is one file: name the folder it lies in")
        raise ModelError(f"{located(source)} is no GGUF file and no folder: nothing to convert")
    if not source.is_dir():
        raise ModelError(f"there is no file or folder {located(source)}")
    try:
        names = os.listdir(source)
    except OSError as error:
        raise StorageError(f"cannot read {located(source)}: {error.strerror}") from error
    kinds: list[Kind] = []
    if has_torch_weights(names):
        kinds.append("weights")
    if has_layer_files(names, predictors.STEM):
        kinds.append("predictors")
    if has_layer_files(names, statistics.STEM):
        kinds.append("statistics")
    if len(kinds) > 1:
        raise UsageError(f"{located(source)} holds {' and '.join(kinds)}: put them into folders of their own")
    if kinds:
        return kinds[0]
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        raise UsageError(f"{located(source)} is a folder: name the GGUF file itself ({listing(ggufs)})")
    if any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{located(source)} has safetensors already: nothing to convert")
    raise ModelError(
        f"{located(source)} has no pytorch_model*.bin, model_<layer>.pt or activation_<layer>.pt: nothing to convert"
    )
