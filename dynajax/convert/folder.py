"""A Hugging Face folder written tensor by tensor: safetensors shards, config.json, checksums.json, other files.

Every converter ends here. Memory: one block at a time, whatever the model's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.checksums import CHECKSUMS_NAME, write_checksums
from dynajax.checkpoint.drafts import draft_of
from dynajax.checkpoint.paths import is_plain_name
from dynajax.checkpoint.reading import DTYPES, STORED_DTYPES
from dynajax.checkpoint.shards import INDEX, SINGLE, read_shard
from dynajax.checkpoint.wording import listing, plain
from dynajax.errors import ModelError

SHARD_BYTES = 4 * 2**30
SHARD_TENSORS = 10_000  # keeps a shard's header below what the reader accepts
STAGE = "convert"
_SAFETENSORS_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_OWN_FILES = (SINGLE, INDEX, CHECKSUMS_NAME, "config.json")
_SLACK_BYTES = 2**20  # headers, index, checksums and config


class Progress(Protocol):
    """Told how far a stage is."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write.

    `blocks()` gives its values in row-major order, cut anywhere: arrays of any shape whose type is `dtype`
    (a block may be overwritten once the next is asked for). It is called once, when the tensor's turn comes.
    Values are written as they are: screening them for NaN and overflow is the caller's (`numbers.py`).
    """

    name: str
    dtype: str  # float32, float16 or bfloat16
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[npt.NDArray]]

    @property
    def nbytes(self) -> int:
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


def write_folder(
    target: Path,
    tensors: Sequence[Tensor],
    *,
    config: Mapping[str, Any],
    files: Mapping[str, Path | bytes],
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `target` whole or not at all, and return it.

    config: what becomes config.json, its `dtype` (and `torch_dtype`, if it has that key) set to the type that
    most bytes are written in. files: other files by name, to copy or as bytes. Tensors are written in the order
    given, up to `shard_bytes` a file; a larger tensor has a file of its own. progress: ("convert", tensors done,
    tensors in all).

    Raises what `blocks` raises; UsageError if `target` exists and is not empty, or another process is writing
    it; StorageError if the disk is too small, before anything is written where that can be known; ModelError for
    two tensors of one name.
    """
    _check_names(tensors, files)
    shards = _split(tensors, shard_bytes)
    needed = sum(tensor.nbytes for tensor in tensors) + len(shards) * _SLACK_BYTES
    needed += sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
    checksums: dict[str, str] = {}
    report = progress or (lambda stage, done, total: None)
    with draft_of(target, needed) as draft:
        names = _shard_names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            _write_shard(draft / name, shard, checksums, lambda: report(STAGE, len(checksums), len(tensors)))
        if len(shards) > 1:
            _write_index(draft, dict(zip(names, shards, strict=True)))
        _write_file(draft / "config.json", _json(_with_dtype(config, tensors)))
        for name, file in files.items():
            if isinstance(file, bytes):
                _write_file(draft / name, file)
            else:
                shutil.copyfile(file, draft / name)
        write_checksums(draft, checksums)
    return target


def _check_names(tensors: Sequence[Tensor], files: Mapping[str, Path | bytes]) -> None:
    if not tensors:
        raise ModelError("there are no tensors to write: is this a model?")
    twice = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if twice:
        raise ModelError(f"tensors of one name twice: {listing(twice)}")
    if bad := [tensor.name for tensor in tensors if tensor.name == "__metadata__" or not tensor.name]:
        raise ModelError(f"a tensor cannot be named {plain(bad[0])}")
    if bad := [name for name in files if not is_plain_name(name) or name in _OWN_FILES]:
        raise ValueError(f"these files cannot be copied under their names: {listing(bad)}")


def _split(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Consecutive tensors, as many a shard as fit."""
    shards: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and (held + tensor.nbytes > shard_bytes or len(shards[-1]) == SHARD_TENSORS):
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _write_shard(path: Path, tensors: Sequence[Tensor], checksums: dict[str, str], tick: Callable[[], None]) -> None:
    """The header, then the data in order; adds each tensor's sha256 to `checksums`."""
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            digest, done = hashlib.sha256(), 0
            for block in tensor.blocks():
                raw = _raw(block, tensor)
                digest.update(raw)
                file.write(raw)
                done += len(raw)
            if done != tensor.nbytes:
                raise ValueError(f"{plain(tensor.name)}: blocks gave {done} bytes, expected {tensor.nbytes}")
            checksums[tensor.name] = digest.hexdigest()
            tick()
        file.flush()
        os.fsync(file.fileno())
    read_shard(path)  # the library's own check of the header against the file


def _header(tensors: Sequence[Tensor]) -> bytes:
    """Length and JSON, padded to a multiple of 8 bytes as the safetensors library does."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        kind = _SAFETENSORS_NAMES[DTYPES[tensor.dtype]]
        entries[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raw(block: npt.NDArray, tensor: Tensor) -> memoryview:
    if block.dtype != DTYPES[tensor.dtype]:
        raise ValueError(f"{plain(tensor.name)}: a block of {block.dtype}, expected {tensor.dtype}")
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data


def _write_index(folder: Path, shards: Mapping[str, Sequence[Tensor]]) -> None:
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
    _write_file(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _with_dtype(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """`config` naming the type that most bytes are written in."""
    held = Counter[str]()
    for tensor in tensors:
        held[tensor.dtype] += tensor.nbytes
    dtype = held.most_common(1)[0][0]
    return {**config, "dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in config else {})}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_file(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
