"""A model's name -> a folder whose weights can be read: found, downloaded, and converted if they are pickles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from dynajax.checkpoint import resolve_model
from dynajax.checkpoint.drafts import remove_folder
from dynajax.checkpoint.hub_files import is_complete, needs_conversion
from dynajax.checkpoint.places import converted_folder
from dynajax.checkpoint.wording import located
from dynajax.errors import ModelError, UsageError

log = logging.getLogger(__name__)


def model_folder(
    name: str,
    *,
    offline: bool = False,
    config_only: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """As `resolve_model`, with PyTorch pickles converted once into the cache folder; nothing in them is executed.

    With `config_only` nothing is converted: config.json and statistics are the same before and after.
    """
    folder = resolve_model(name, offline=offline, config_only=config_only, progress=progress)
    return folder if config_only else converted(folder, progress)


def converted(folder: Path, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """`folder`, or where its weights are as safetensors if it has pickles only; converts them if need be."""
    if not folder.is_dir() or not needs_conversion(folder):
        return folder
    target = converted_folder(folder)
    if not is_converted(target):
        from dynajax.convert.weights import convert_weights

        remove_folder(target)  # it was renamed into place whole; since then somebody cleared files away
        log.info("converting the pickles of %s to %s, once", located(folder), located(target))
        try:
            convert_weights(folder, target, progress=progress)
        except UsageError:  # another process writes, or has just written, the same folder
            if not is_converted(target):
                raise
    return target


def is_converted(target: Path) -> bool:
    """Whether a converted folder is there, with every file."""
    try:
        return is_complete(target)
    except ModelError:  # a damaged index
        return False
