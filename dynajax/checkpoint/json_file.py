"""JSON from files nobody vouches for: bounded, strict, and refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.errors import ModelError, StorageError


def read_json(path: Path, max_bytes: int) -> dict:
    """The object in `path`. Never follows a FIFO or device, never parses more than `max_bytes`.

    ModelError: missing, not a regular file, too large, not UTF-8, not JSON, not an object, a key twice,
    nested too deeply. StorageError: the machine could not read it.
    """
    try:
        if not path.is_file():
            raise ModelError(f"{plain(path.name)} is missing or not a plain file in {located(path.parent)}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(size) if size <= max_bytes else None
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror}") from error
    if raw is None:
        raise ModelError(f"{located(path)} has {size} bytes, more than the {max_bytes} such a file may have")
    return parse_json(raw, located(path))


def parse_json(raw: bytes, where: str) -> dict:
    """The one JSON object in `raw`; `where` names its origin in the ModelError."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError as error:
        raise ModelError(f"{where} is nested too deeply to be what it says it is") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, a duplicate, an integer of 5,000 digits
        raise ModelError(f"{where} is not valid JSON: {quoted(str(error))}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} must hold a JSON object, found a {type(value).__name__}")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"key {name!r} appears twice")
        result[name] = value
    return result
