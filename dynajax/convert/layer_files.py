"""Folders with one PyTorch file per layer, NAME_<layer>.pt: sorted by number, for text puts 10 before 2."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.wording import listing, located
from dynajax.errors import ModelError, StorageError

MOST_LAYERS = 2**10


def has_layer_files(names: Iterable[str], stem: str) -> bool:
    """Whether a folder of these file names has such files."""
    return any(_pattern(stem).fullmatch(name) for name in names)


def layer_files(folder: Path, stem: str) -> list[Path]:
    """The files of layers 0, 1, 2, ... in that order. ModelError: one is missing, or there twice."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StorageError(f"cannot read {located(folder)}: {error.strerror}") from error
    found: dict[int, list[str]] = {}
    for name in names:
        if match := _pattern(stem).fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    if not found:
        raise ModelError(f"{located(folder)} has no files {stem}_<layer>.pt")
    if twice := [name for same in found.values() if len(same) > 1 for name in same]:
        raise ModelError(f"{located(folder)} has a layer twice: {listing(twice)}")
    if max(found) >= MOST_LAYERS:
        raise ModelError(f"{located(folder)} numbers a layer {max(found)}, {MOST_LAYERS - 1} is the highest")
    if missing := [f"{stem}_{layer}.pt" for layer in range(max(found)) if layer not in found]:
        raise ModelError(f"{located(folder)} lacks {listing(missing)}: download them again")
    paths = [folder / found[layer][0] for layer in sorted(found)]
    if problems := [problem for path in paths if (problem := stray_link(path))]:
        raise ModelError("; ".join(problems[:3]))
    return paths


def _pattern(stem: str) -> re.Pattern[str]:
    return re.compile(rf"{stem}_([0-9]{{1,9}})\.pt")
