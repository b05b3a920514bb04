"""The packed copy of a checkpoint: made once for its weights and a type, kept in the cache, read in its place.

CACHE/quantised/FINGERPRINT-TYPE.safetensors holds every tensor as an engine of that type has it (`quant.held_as`):
those of a layer's blocks by the names of their parameters, `units.LAYER` as an arena, and the ends. Its metadata name
the weights it was made of and the type, and a digest of some blocks of its data.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import mapping
from dynajax.checkpoint.drafts import draft_file
from dynajax.checkpoint.files import Checkpoint, sampled
from dynajax.checkpoint.json_file import parse_json
from dynajax.checkpoint.places import quantised_file
from dynajax.checkpoint.reading import STORED_DTYPES, read_bytes_into
from dynajax.checkpoint.shards import Shard, read_shard
from dynajax.checkpoint.wording import located
from dynajax.config import PACKED_BITS, ModelSpec, stored_bytes
from dynajax.errors import ModelError, StorageError
from dynajax.quant import stored_as

log = logging.getLogger(__name__)

FORMAT = "dynajax quantised 2"
_HEADER_BYTES = 2**16  # of the header, and as much for every eight layers more
_TYPES: dict[str, np.dtype] = {**STORED_DTYPES, "U8": np.dtype(np.uint8)}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class PackedCheckpoint:
    """The verbs of a `Checkpoint`, for the one type that the file was made for."""

    folder: Path  # of the model
    spec: ModelSpec
    dtype: str
    source: str  # fingerprint of the weights it was made of
    shard: Shard

    @classmethod
    def open(cls, path: Path, checkpoint: Checkpoint, dtype: str) -> PackedCheckpoint:
        """ModelError: no whole file of this program, made of these weights."""
        shard = read_shard(path)
        found = parse_json(shard.header[8:], f"the header of {path.name}").get("__metadata__")
        wanted = _identity(checkpoint.fingerprint(), dtype) | {"digest": sampled(path, len(shard.header))}
        if found != wanted:
            raise ModelError(f"{located(path)} is damaged or not a copy of these weights")
        return cls(checkpoint.folder, checkpoint.spec, dtype, checkpoint.fingerprint(), shard)

    def fingerprint(self) -> str:
        """Of the weights it was made of."""
        return self.source

    def embed(self, dtype: str) -> npt.NDArray:
        """See `Checkpoint`; so for all below. An untied table has the checkpoint's type, whatever is asked for."""
        return self._array("embed")

    def positions(self, dtype: str) -> npt.NDArray | None:
        return self._array("positions") if self.spec.learned_positions else None

    def head(self, dtype: str) -> npt.NDArray | None:
        return None if self.spec.tied else self._array("head")

    def norm(self, dtype: str) -> tuple[npt.NDArray, ...]:
        return tuple(self._array(f"norm.{i}") for i in range(2 if self.spec.norm == "layer" else 1))

    def encoder_norm(self, dtype: str) -> npt.NDArray:
        return self._array("encoder_norm")

    def attention(self, layer: int, dtype: str) -> dict[str, npt.NDArray]:
        return {part: self._array(f"attention.{layer}.{part}") for part in mapping.attention_parts(self.spec, layer)}

    def routing(self, layer: int, dtype: str) -> dict[str, npt.NDArray]:
        return {name: self._array(f"routing.{layer}.{name}") for name in mapping.routing_parts(self.spec, layer)}

    def fill_bundle(self, layer: int, out: npt.NDArray) -> None:
        stored = self.shard.tensors[f"units.{layer}"]
        if out.shape != stored.shape or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 {stored.shape}, got {out.dtype} {out.shape}")
        read_bytes_into(stored, out)

    def _array(self, name: str) -> npt.NDArray:
        stored = self.shard.tensors[name]
        out = np.empty(stored.shape, _TYPES[stored.dtype])
        read_bytes_into(stored, out)
        return out


def packed_copy(checkpoint: Checkpoint, dtype: str, progress: Progress) -> Checkpoint | PackedCheckpoint:
    """The copy of these weights in a packed type, made if there is none that is whole; without room for one the
    checkpoint itself, which packs while it is read. progress("quantise", layers done, layers)."""
    try:
        path = quantised_file(checkpoint.fingerprint(), dtype)
        if path.exists():
            try:
                return PackedCheckpoint.open(path, checkpoint, dtype)
            except ModelError as error:
                log.warning("%s: quantising again", error)
        _write(path, checkpoint, dtype, progress)
        return PackedCheckpoint.open(path, checkpoint, dtype)
    except StorageError as error:
        log.warning("quantising again every time: %s", error)
        return checkpoint


def _write(path: Path, checkpoint: Checkpoint, dtype: str, progress: Progress) -> None:
    """StorageError if there is no room, before anything is written where that can be known. Layer after layer: the
    library's own writer wants all of it in memory at once."""
    needed = _needed_bytes(checkpoint, dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise StorageError(f"cannot write {located(path)}: {error.strerror or error}") from error
    if free < needed:
        raise StorageError(f"{located(path)} needs {needed} bytes of disk, {free} are free: make room")
    room = _HEADER_BYTES * (1 + checkpoint.spec.layers // 8)
    with draft_file(path, needed) as file:
        file.write(bytes(room))
        entries: dict[str, Any] = {}
        for name, array in _arrays(checkpoint, dtype, progress):
            start = file.tell() - room
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            kind = next(kind for kind, stored in _TYPES.items() if stored == array.dtype)
            offsets = [start, start + array.nbytes]
            entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        _finish(file, room, entries, _identity(checkpoint.fingerprint(), dtype))


def _finish(file: BinaryIO, room: int, entries: dict[str, Any], identity: dict[str, str]) -> None:
    """The header, padded to the room that was left for it, with a digest of the data behind it."""
    file.flush()
    metadata = identity | {"digest": sampled(Path(file.name), room)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    assert len(header) <= room - 8, f"a header of {len(header)} bytes does not fit {room}"
    file.seek(0)
    file.write((room - 8).to_bytes(8, "little") + header.ljust(room - 8))


def _identity(fingerprint: str, dtype: str) -> dict[str, str]:
    return {"format": FORMAT, "fingerprint": fingerprint, "dtype": dtype}


def _needed_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """About as many as a copy takes: all packed, the tables in the checkpoint's type, and the header."""
    spec = checkpoint.spec
    group = stored_bytes(32, dtype)
    tables = stored_bytes(spec.vocab * spec.hidden + spec.position_parameters, spec.dtype)
    return checkpoint.parameters // 32 * group + tables + _HEADER_BYTES * (1 + spec.layers // 8)


def _arrays(checkpoint: Checkpoint, dtype: str, progress: Progress) -> Iterator[tuple[str, npt.NDArray]]:
    """Name and values of all there is, one layer after the other."""
    spec = checkpoint.spec
    assert dtype in PACKED_BITS, dtype
    yield "embed", checkpoint.embed(dtype if spec.tied else spec.dtype)
    if (positions := checkpoint.positions(dtype if spec.tied else spec.dtype)) is not None:
        yield "positions", positions
    for layer in range(spec.layers):
        for part, array in checkpoint.attention(layer, dtype).items():
            yield f"attention.{layer}.{part}", array
        for name, array in checkpoint.routing(layer, dtype).items():
            yield f"routing.{layer}.{name}", array
        if layer in spec.unit_layers:
            units = (spec.units, spec.ffn_parts, spec.unit_rows, spec.unit_width)
            arena = np.empty(*stored_as(units, dtype))
            checkpoint.fill_bundle(layer, arena)
            yield f"units.{layer}", arena
        progress("quantise", layer + 1, spec.layers)
    for i, part in enumerate(checkpoint.norm(dtype)):
        yield f"norm.{i}", part
    if spec.encoder is not None:
        yield "encoder_norm", checkpoint.encoder_norm(dtype)
    if (head := checkpoint.head(dtype)) is not None:
        yield "head", head
