"""checksums.json: the sha256 of every tensor's bytes, written when a folder is made, compared when it is verified.

{"version": 1, "tensors": {name: 64 hex digits over the raw little-endian bytes, as the safetensors file holds them}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from dynajax.checkpoint.drafts import draft_file
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.wording import listing, located, quoted
from dynajax.errors import ModelError

CHECKSUMS_NAME = "checksums.json"
VERSION = 1
_MOST_BYTES = 2**24  # 100,000 tensors take 13 MB
_HEX = re.compile(r"[0-9a-f]{64}")


def write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    """Write `folder/checksums.json` beside its final name, then rename: readers see the old one or the new one."""
    if bad := [name for name, digest in checksums.items() if not _HEX.fullmatch(digest)]:
        raise ValueError(f"checksums must be 64 hex digits, those of {listing(bad)} are not")
    text = json.dumps({"version": VERSION, "tensors": dict(sorted(checksums.items()))}, indent=0) + "\n"
    path = folder / CHECKSUMS_NAME
    with draft_file(path, len(text)) as file:
        file.write(text.encode())


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Tensor name -> sha256; None if the folder has no such file. ModelError if it is damaged."""
    path = folder / CHECKSUMS_NAME
    if not os.path.lexists(path):
        return None
    if problem := stray_link(path):
        raise ModelError(problem)
    record = read_json(path, _MOST_BYTES)
    if record.get("version") != VERSION or isinstance(record["version"], bool):
        raise ModelError(f"{located(path)} has version {quoted(record.get('version'))}, this program reads {VERSION}")
    tensors = record.get("tensors")
    if not isinstance(tensors, dict):
        raise ModelError(f"{located(path)} must hold an object tensors, name -> sha256, got {quoted(tensors)}")
    bad = [name for name, digest in tensors.items() if not isinstance(digest, str) or not _HEX.fullmatch(digest)]
    if bad:
        raise ModelError(f"{located(path)}: these are no sha256 of 64 hex digits: {listing(bad)}")
    return tensors
