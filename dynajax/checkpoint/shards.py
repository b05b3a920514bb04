"""Safetensors shards: which a folder has, and where in them each tensor lies. Headers only, never data.

Each header is validated by the safetensors library (no overlap, no hole, no byte beyond the last tensor)
through plain reads: nothing here or later maps a file into memory, so a file cut short while the program
runs is an error message and not a SIGBUS.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dynajax.checkpoint.json_file import parse_json, read_json
from dynajax.checkpoint.paths import is_plain_name, stray_link
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.errors import ModelError, StorageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_BYTES = 2**24  # the largest index read; 100,000 tensors take 10 MB
HEADER_BYTES = 2**22  # the largest header parsed; a shard of 10,000 tensors takes 1.5 MB
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one version of a file from the next."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the bytes of one tensor lie. dtype as safetensors or GGUF spells it: F32, F16, BF16, Q4_1, ..."""

    name: str
    path: Path
    stamp: Stamp
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int
    rotary_heads: int | None = None  # rows are stored interleaved, as GGUF's llama has q and k: see reading.py

    def piece(self, index: int, shape: tuple[int, ...]) -> Stored:
        """The `index`-th of the equal consecutive tensors of that shape that this one is made of."""
        pieces = prod(self.shape) // prod(shape)
        assert 0 <= index < pieces and self.rotary_heads is None, (self.name, index, shape)
        nbytes = self.nbytes // pieces
        offset = self.offset + index * nbytes
        return replace(self, name=f"{self.name}[{index}]", shape=shape, offset=offset, nbytes=nbytes)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its raw header (with the 8 bytes of its length) and its tensors."""

    path: Path
    stamp: Stamp
    header: bytes
    tensors: dict[str, Stored]


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and tensor name -> file name if there is an index. ModelError names all problems.

    As transformers does, `model.safetensors` goes before an index. PyTorch pickles are never opened.
    """
    if os.path.lexists(folder / SINGLE):  # a link to nothing counts as missing, not as another layout
        names, weight_map = [SINGLE], None
    elif os.path.lexists(folder / INDEX):
        weight_map = _weight_map(folder)
        names = sorted(set(weight_map.values()))
    else:
        raise ModelError(_nothing_found(folder))
    problems = [problem for name in names if (problem := stray_link(folder / name))]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        problems.append(f"{len(missing)} of {len(names)} shards are missing: {listing(missing)}: download them again")
    if problems:
        raise ModelError(f"{located(folder)}: " + "; ".join(problems))
    return [folder / name for name in names], weight_map


def _weight_map(folder: Path) -> dict[str, str]:
    if problem := stray_link(folder / INDEX):
        raise ModelError(problem)
    weight_map = read_json(folder / INDEX, INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX} must hold an object weight_map, tensor name -> file name, got {quoted(weight_map)}")
    bad = {str(name) for name in weight_map.values() if not is_plain_name(name) or not name.endswith(".safetensors")}
    if bad:
        raise ModelError(f"{INDEX} names shards that are not plain .safetensors files in the folder: {listing(bad)}")
    return weight_map


def _nothing_found(folder: Path) -> str:
    names = [path.name for path in folder.iterdir()]
    pickles = [name for name in names if name.endswith(PICKLES)]
    other = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    where = f"{located(folder)} has neither {SINGLE} nor {INDEX}"
    if pickles:
        return (
            f"{where}, only PyTorch pickles ({listing(pickles)}), which can run code and are never opened: "
            "convert them once with transformers, save_pretrained(folder), on a machine you trust it to"
        )
    return f"{where}; it has {listing(other)}" if other else f"{where}: the weights are not there"


def read_shard(path: Path) -> Shard:
    """The header of one shard, validated. ModelError names the file, and for a wrong size both sizes."""
    name = plain(path.name)
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > stamp.size - 8:
                needed = f"at least {8 + length}" if len(prefix) == 8 else "at least 8"
                raise ModelError(f"{name} is truncated or corrupt: expected {needed} bytes, found {stamp.size}")
            if length > HEADER_BYTES:
                raise ModelError(f"{name} is corrupt: a header of {length} bytes, {HEADER_BYTES} are allowed")
            header = prefix + file.read(length)
        with safe_open(path, framework="np", backend="pread"):  # refuses what is not well-formed
            pass
    except SafetensorError as error:
        reason = _size_problem(header[8:], stamp.size) or plain(str(error))
        raise ModelError(f"{name} is truncated or corrupt: {reason}") from error
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error
    entries = parse_json(header[8:], f"the header of {name}")
    tensors = {
        key: Stored(
            name=key,
            path=path,
            stamp=stamp,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=len(header) + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for key, entry in entries.items()
        if key != "__metadata__"
    }
    return Shard(path, stamp, header, tensors)


def _size_problem(header: bytes, size: int) -> str | None:
    """ "expected N bytes, found M" if the header can be read and disagrees with the file's size."""
    try:
        entries = parse_json(header, "header")
        data_bytes = max(entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__")
        expected = 8 + len(header) + data_bytes
    except (ModelError, KeyError, IndexError, TypeError, ValueError):
        return None
    return None if expected == size else f"expected {expected} bytes, found {size}: download it again"
