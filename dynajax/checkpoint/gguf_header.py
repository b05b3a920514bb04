"""The header of a GGUF file: metadata, and where each tensor lies. Bounded plain reads; no number in it is trusted.

Layout (version 2 and 3, little-endian): "GGUF", version u32, tensors u64, keys u64; then every key (string, type
u32, value), then every tensor (string, rank u32, sizes u64 fastest first, type u32, offset u64), then the
data, aligned. A string is its length u64 and its bytes.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dynajax.checkpoint.shards import Stamp, Stored
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.errors import ModelError, StorageError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES = 2**26  # the largest header read: a vocabulary of 256,000 with its merges takes 15 MB
KEY_BYTES = 2**16
MOST_RANKS = 4
LARGEST_SIZE = 2**40  # elements of one dimension
ALIGNMENT = 32  # unless general.alignment says otherwise

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_KEY = 8 + 4 + 1  # bytes of the shortest key with its value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class GgufHeader:
    """One validated header. Arrays of numbers in `metadata` are NumPy's, arrays of strings lists."""

    path: Path
    stamp: Stamp
    raw: bytes  # the file up to its data
    metadata: dict[str, Any]
    tensors: dict[str, Stored]  # under their GGUF names, shapes in the checkpoint's [out, in] order


def is_gguf(path: Path) -> bool:
    """True if `path` is a file named or marked as GGUF; its content is not judged."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix.lower() == ".gguf" or file.read(4) == MAGIC
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of `path`. ModelError: not GGUF, cut short, or numbers that contradict the file."""
    try:
        if not path.is_file():
            raise ModelError(f"{located(path)} is missing or not a plain file")
        with path.open("rb", buffering=_CHUNK) as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            return _parse(path, stamp, _Cursor(file, stamp.size, plain(path.name)))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error


class _Cursor:
    """Reads values one after the other, never past the file or HEADER_BYTES."""

    def __init__(self, file: BinaryIO, size: int, name: str):
        self._file = file
        self._buffer = bytearray()
        self.size, self.name, self.at = size, name, 0

    def refuse(self, why: str) -> ModelError:
        return ModelError(f"{self.name} is truncated or corrupt: {why}")

    def _advance(self, count: int) -> int:
        """Have `count` more bytes in the buffer; where they start."""
        start, end = self.at, self.at + count
        if end > self.size:
            raise self.refuse(f"its header needs at least {end} bytes, the file has {self.size}")
        if end > HEADER_BYTES:
            raise self.refuse(f"its header is longer than {HEADER_BYTES} bytes")
        while len(self._buffer) < end:
            chunk = self._file.read(max(_CHUNK, end - len(self._buffer)))
            if not chunk:
                raise self.refuse("it became shorter while it was being read")
            self._buffer += chunk
        self.at = end
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._buffer, self._advance(struct.calcsize("<" + code)))[0]

    def string(self, most: int = HEADER_BYTES) -> str:
        length = self.number("Q")
        if length > most:
            raise self.refuse(f"a string of {length} bytes at byte {self.at - 8}")
        start = self._advance(length)
        try:
            return self._buffer[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"the string at byte {start} is not UTF-8") from error

    def count(self, least_bytes: int, what: str) -> int:
        """How many of something follow, each of at least `least_bytes`: no more than the file has room for."""
        count = self.number("Q")
        if count * least_bytes > min(self.size, HEADER_BYTES) - self.at:
            raise self.refuse(f"{count} {what} are announced, there is no room for so many")
        return count

    def value(self) -> Any:
        """One typed value."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.number(self._code(kind))

    def _array(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return [self.string() for _ in range(self.count(8, "strings"))]
        code = self._code(kind)
        width = struct.calcsize(code)
        count = self.count(width, "numbers")
        start = self._advance(count * width)
        dtype = np.dtype(code).newbyteorder("<")
        return np.frombuffer(bytes(self._buffer[start : self.at]), dtype)

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.refuse(f"a value of the unknown type {kind} at byte {self.at - 4}")
        return _SCALARS[kind]

    def before(self, end: int) -> bytes:
        """The file up to `end`, at or a little after what was read."""
        if end > self.at:
            self._advance(end - self.at)
        return bytes(self._buffer[:end])


def _parse(path: Path, stamp: Stamp, cursor: _Cursor) -> GgufHeader:
    if stamp.size < 8 or cursor.before(4) != MAGIC:
        raise ModelError(f"{cursor.name} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = cursor.number("I")
    if version not in VERSIONS:
        why = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise ModelError(f"{cursor.name} is a GGUF file of {why}, this version reads little-endian 2 and 3")
    tensor_count = cursor.count(_LEAST_TENSOR, "tensors")
    key_count = cursor.count(_LEAST_KEY, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string(KEY_BYTES)
        if key in metadata:
            raise cursor.refuse(f"the key {quoted(key)} appears twice")
        metadata[key] = cursor.value()
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 8 <= alignment <= 2**16 or alignment % 8:
        raise cursor.refuse(f"general.alignment must be a multiple of 8, got {quoted(alignment)}")
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    raw = cursor.before(start) if entries else cursor.before(cursor.at)
    tensors: dict[str, Stored] = {}
    for name, type_name, shape, nbytes, offset in entries:
        if name in tensors:
            raise cursor.refuse(f"the tensor {quoted(name)} appears twice")
        if offset % alignment:
            raise cursor.refuse(f"{plain(name)} lies at {offset}, no multiple of {alignment}")
        tensors[name] = Stored(name, path, stamp, type_name, shape, start + offset, nbytes)
    _check_extent(cursor, tensors)
    return GgufHeader(path, stamp, raw, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """(name, type, shape, bytes, offset in the data) of the next tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string(KEY_BYTES)
    rank = cursor.number("I")
    if not 1 <= rank <= MOST_RANKS:
        raise cursor.refuse(f"{plain(name)} has {rank} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    if not all(1 <= size <= LARGEST_SIZE for size in shape):
        raise cursor.refuse(f"{plain(name)} has the shape {quoted(shape)}")
    if kind not in {int(known) for known in GGML_QUANT_SIZES}:
        raise ModelError(f"{cursor.name}: {plain(name)} has the unknown type {kind}")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block:
        raise cursor.refuse(f"{plain(name)} has rows of {shape[-1]}, not a multiple of the type's block of {block}")
    return name, GGMLQuantizationType(kind).name, shape, prod(shape) // block * block_bytes, offset


def _check_extent(cursor: _Cursor, tensors: dict[str, Stored]) -> None:
    """Every tensor inside the file, none over another."""
    outside = [name for name, stored in tensors.items() if stored.offset + stored.nbytes > cursor.size]
    if outside:
        expected = max(stored.offset + stored.nbytes for stored in tensors.values())
        where = f"{len(outside)} tensors lie outside: {listing(outside)}"
        raise cursor.refuse(f"expected {expected} bytes, found {cursor.size}; {where}")
    end = 0
    for stored in sorted(tensors.values(), key=lambda stored: stored.offset):
        if stored.offset < end:
            raise cursor.refuse(f"{plain(stored.name)} overlaps another tensor")
        end = stored.offset + stored.nbytes
