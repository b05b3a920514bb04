"""Where in a zip archive each member's bytes lie. Uncompressed members only, nothing overlapping, nothing unpacked.

Stricter than the format, as strict as what torch.save writes: the directory ends the file, without a comment.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from dynajax.checkpoint.shards import Stamp
from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.errors import ModelError, StorageError

DIRECTORY_BYTES = 2**24  # the largest directory read; 100,000 members take 10 MB
BLOCK_BYTES = 2**21
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ZIP64_EXTRA = 1
_ENCRYPTED = 1
_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """One member: its bytes are `size` bytes from `offset` of the archive."""

    name: str
    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class Archive:
    """An archive whose directory was read; holds no open file. Refuses to read once the file has changed."""

    path: Path
    stamp: Stamp
    members: dict[str, Member]
    _sound: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path) -> Archive:
        """ModelError unless every member is stored uncompressed, once, within the file, under a plain name."""
        try:
            with path.open("rb", buffering=0) as file:
                stamp = Stamp.of(os.fstat(file.fileno()))
                reader = _Reader(path, file.fileno(), stamp.size)
                return cls(path, stamp, _members(reader))
        except OSError as error:
            raise _unreadable(path, error) from error

    def read(self, member: Member, most_bytes: int) -> bytes:
        """All of a small member, checked against its checksum."""
        if member.size > most_bytes:
            raise ModelError(f"{self._name} has {member.size} bytes of {plain(member.name)}, {most_bytes} are allowed")
        raw = bytearray(member.size)
        self.read_into(member, 0, memoryview(raw))
        if zlib.crc32(raw) != member.crc:
            raise self._damaged(member)
        return bytes(raw)

    def check(self, member: Member) -> None:
        """Compare the whole member with its checksum; at once from the second time on."""
        if member.name in self._sound:
            return
        block, crc = bytearray(min(BLOCK_BYTES, member.size)), 0
        with self._opened() as reader:
            for start in range(0, member.size, BLOCK_BYTES):
                view = memoryview(block)[: min(BLOCK_BYTES, member.size - start)]
                reader.fill(member.offset + start, view)
                crc = zlib.crc32(view, crc)
        if crc != member.crc:
            raise self._damaged(member)
        self._sound.add(member.name)

    def read_into(self, member: Member, start: int, out: memoryview) -> None:
        """Fill `out` from `start` bytes into the member; all of it must lie inside."""
        assert start >= 0 and start + len(out) <= member.size, (member, start, len(out))
        with self._opened() as reader:
            reader.fill(member.offset + start, out)

    @property
    def _name(self) -> str:
        return plain(self.path.name)

    def _damaged(self, member: Member) -> ModelError:
        return ModelError(f"{self._name}: the checksum of {plain(member.name)} does not match: download it again")

    def _opened(self) -> _Reader:
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if Stamp.of(os.fstat(file)) != self.stamp:
            os.close(file)
            raise ModelError(f"{self._name} changed while it was being read: start again")
        return _Reader(self.path, file, self.stamp.size)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads that stay inside the file, or say that it is truncated."""

    path: Path
    file: int
    size: int

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *what: object) -> None:
        os.close(self.file)

    def take(self, start: int, count: int) -> bytes:
        if start < 0 or start + count > self.size:
            raise self.corrupt("it ends too early")
        raw = bytearray(count)
        self.fill(start, memoryview(raw))
        return bytes(raw)

    def fill(self, start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self.file, [out[done:]], start + done)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if count == 0:
                raise self.corrupt("it became shorter")
            done += count

    def corrupt(self, why: str) -> ModelError:
        return ModelError(f"{plain(self.path.name)} is truncated or corrupt: {why}: download it again")


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot read {located(path)}: {error.strerror or error}")


def _members(reader: _Reader) -> dict[str, Member]:
    start, size, count = _directory(reader)
    raw = reader.take(start, size)
    members: dict[str, Member] = {}
    spans, at = [], 0
    for _ in range(count):
        if len(raw) - at < _ENTRY.size:
            raise reader.corrupt("its directory is too short")
        member, local, at = _entry(reader, raw, at)
        if member.name in members:
            raise ModelError(f"{plain(reader.path.name)} holds {plain(member.name)} twice: it was refused")
        members[member.name] = _placed(reader, member, local)
        spans.append((local, members[member.name].offset + member.size))
    if at != len(raw):
        raise reader.corrupt("its directory is longer than it says")
    ends = [0, *(end for _, end in sorted(spans))]
    for (first, _), end in zip(sorted(spans), ends, strict=False):
        if first < end:
            raise ModelError(f"{plain(reader.path.name)} has members that overlap: it was refused")
    if ends[-1] > start:
        raise ModelError(f"{plain(reader.path.name)} has a member that overlaps its directory: it was refused")
    return members


def _directory(reader: _Reader) -> tuple[int, int, int]:
    """Where the directory starts, its bytes, its entries."""
    end = reader.size - _END.size
    kind, disk, first_disk, here, count, size, start, comment = _END.unpack(reader.take(end, _END.size))
    if kind != b"PK\x05\x06" or comment:
        raise reader.corrupt("its last bytes are not the end of a zip archive")
    if end >= _LOCATOR.size and reader.take(end - _LOCATOR.size, 4) == b"PK\x06\x07":
        at = _LOCATOR.unpack(reader.take(end - _LOCATOR.size, _LOCATOR.size))[2]
        end -= _LOCATOR.size + _END64.size
        kind, _, _, _, disk, first_disk, here, count, size, start = _END64.unpack(reader.take(end, _END64.size))
        if kind != b"PK\x06\x06" or at != end:
            raise reader.corrupt("its 64-bit end record is not where it should be")
    if disk or first_disk or here != count or start + size != end:
        raise reader.corrupt("its directory is not where it should be")
    if size > DIRECTORY_BYTES:
        raise ModelError(f"{plain(reader.path.name)} has a directory of {size} bytes, {DIRECTORY_BYTES} are allowed")
    return start, size, count


def _entry(reader: _Reader, raw: bytes, at: int) -> tuple[Member, int, int]:
    """(member without its place, where its local header lies, where the next entry starts)."""
    kind, _, _, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, _, _, _, local = _ENTRY.unpack_from(
        raw, at
    )
    after = at + _ENTRY.size + n_name
    end = after + n_extra + n_comment
    if kind != b"PK\x01\x02" or end > len(raw):
        raise reader.corrupt("an entry of its directory is damaged")
    name = _safe_name(reader, raw[at + _ENTRY.size : after])
    large = iter(_large_numbers(raw[after : after + n_extra]))
    size, packed, local = (next(large, _FULL) if number == _FULL else number for number in (size, packed, local))
    if flags & _ENCRYPTED:
        raise ModelError(f"{plain(reader.path.name)}: {plain(name)} is encrypted")
    if method != 0 or packed != size:
        raise ModelError(f"{plain(reader.path.name)}: {plain(name)} is compressed, as torch.save never does: refused")
    return Member(name, 0, size, crc), local, end


def _large_numbers(extra: bytes) -> tuple[int, ...]:
    """The 64-bit numbers of an entry's extra field; () if it has none."""
    at = 0
    while at + 4 <= len(extra):
        kind, count = struct.unpack_from("<2H", extra, at)
        field_bytes = extra[at + 4 : at + 4 + count]
        if kind == _ZIP64_EXTRA:
            return struct.unpack(f"<{len(field_bytes) // 8}Q", field_bytes[: len(field_bytes) // 8 * 8])
        at += 4 + count
    return ()


def _safe_name(reader: _Reader, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        name = ""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ModelError(f"{plain(reader.path.name)} has a member with the name {quoted(raw)}: it was refused")
    return name


def _placed(reader: _Reader, member: Member, local: int) -> Member:
    """The member with the offset of its data, which its local header decides."""
    raw = reader.take(local, _LOCAL.size)
    kind, *_, n_name, n_extra = _LOCAL.unpack(raw)
    if kind != b"PK\x03\x04" or reader.take(local + _LOCAL.size, n_name) != member.name.encode():
        raise reader.corrupt(f"{plain(member.name)} is not where its directory says")
    offset = local + _LOCAL.size + n_name + n_extra
    if offset + member.size > reader.size:
        raise reader.corrupt(f"{plain(member.name)} ends beyond it")
    return Member(member.name, offset, member.size, member.crc)
