"""Where this program keeps models that it made itself: fetched from elsewhere, or converted."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dynajax.errors import StorageError


def cache_folder() -> Path:
    """$DYNAJAX_CACHE, else $XDG_CACHE_HOME/dynajax, else ~/.cache/dynajax. It need not exist."""
    if own := os.environ.get("DYNAJAX_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "dynajax"
    try:
        return Path.home() / ".cache" / "dynajax"
    except RuntimeError as error:
        raise StorageError("this user has no home folder for a cache: set DYNAJAX_CACHE to a folder") from error


def fetched_folder(name: str) -> Path:
    """Where scripts/fetch_model.py puts the model `name`; need not exist."""
    return cache_folder() / "models" / name


def predictors_folder(fingerprint: str) -> Path:
    """Where the published predictors of the model with these weights belong, converted; need not exist."""
    return cache_folder() / "predictors" / fingerprint[:16]


def quantised_file(fingerprint: str, dtype: str) -> Path:
    """Where the packed copy of the model with these weights belongs; need not exist."""
    return cache_folder() / "quantised" / f"{fingerprint[:16]}-{dtype}.safetensors"


def converted_folder(source: Path) -> Path:
    """Where the converted weights of the folder `source` belong; need not exist.

    Another revision of a hub model, or other files in a local folder, get another place.
    Example: .../models--user--repo/snapshots/0123456789abcdef... -> CACHE/converted/user--repo--0123456789ab.
    """
    source = source.resolve()
    if source.parent.name == "snapshots":
        name, version = source.parent.parent.name.removeprefix("models--"), source.name
    else:
        files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir())
        name, version = source.name, hashlib.sha256(repr((str(source), files)).encode()).hexdigest()
    return cache_folder() / "converted" / f"{name}--{version[:12]}"
