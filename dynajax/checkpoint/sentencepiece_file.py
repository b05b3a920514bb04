"""A SentencePiece model file, read without the library: its format is protocol buffers, of which it needs little.

A message is a row of fields: the field's number and its wire type in one varint, then the value. Unknown fields are
skipped, as the format demands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.wording import located
from dynajax.errors import ModelError, StorageError

FILE_BYTES = 2**26
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of a piece
_KINDS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A SentencePiece vocabulary with the rules for its text. The index of a piece is its id."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    kind: Literal["unigram", "bpe"]
    dummy_prefix: bool = True  # a space is put in front of the text
    remove_extra_spaces: bool = False
    charsmap: bytes = b""  # the compiled normalization rules; empty: text stays as it is
    unknown_id: int = 0
    bos_id: int | None = 1
    eos_id: int | None = 2


def read_pieces(path: Path) -> Pieces:
    """Parse `path`. ModelError: not such a file, damaged, or of a kind that is not supported."""
    if problem := stray_link(path):
        raise ModelError(problem)
    try:
        if not path.is_file():
            raise ModelError(f"{located(path)} is missing or not a plain file")
        if path.stat().st_size > FILE_BYTES:
            raise ModelError(f"{located(path)} has more than {FILE_BYTES} bytes: no SentencePiece model is so large")
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error
    try:
        return _pieces(raw)
    except (ValueError, IndexError, struct.error) as error:
        raise ModelError(f"{located(path)} is not a SentencePiece model this version reads: {error}") from error


def _pieces(raw: bytes) -> Pieces:
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    rules: dict[int, int | bytes] = {}
    for number, value in _fields(raw):
        if number == _PIECES:
            piece = dict(_fields(_raw(value)))
            texts.append(_raw(piece.get(1, b"")).decode("utf-8"))
            scores.append(struct.unpack("<f", _raw(piece.get(2, b"\0\0\0\0")))[0])
            types.append(_integer(piece.get(3, NORMAL)))
        elif number == _TRAINER:
            trainer |= _fields(_raw(value))
        elif number == _NORMALIZER:
            rules |= _fields(_raw(value))
    kind = _integer(trainer.get(3, 1))
    if not texts or kind not in _KINDS:
        raise ValueError(f"it has {len(texts)} pieces of kind {kind}, BPE (2) and unigram (1) are supported")
    if trainer.get(24, 0) or not rules.get(5, 1):
        raise ValueError("spaces that are suffixes or not escaped are not supported")
    ids = {name: _integer(trainer.get(field, default)) for name, field, default in _IDS}
    return Pieces(
        texts=texts,
        scores=scores,
        types=types,
        kind=_KINDS[kind],
        dummy_prefix=bool(rules.get(3, 1)),
        remove_extra_spaces=bool(rules.get(4, 1)),
        charsmap=_raw(rules.get(2, b"")),
        unknown_id=ids["unknown"] if 0 <= ids["unknown"] < len(texts) else 0,
        bos_id=ids["bos"] if 0 <= ids["bos"] < len(texts) else None,
        eos_id=ids["eos"] if 0 <= ids["eos"] < len(texts) else None,
    )


_IDS = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2))


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: an integer, or the bytes of anything longer or not an integer."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(raw, at)
        elif wire in (_FOUR, _EIGHT):
            size = 4 if wire == _FOUR else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(raw):
            raise ValueError("it is cut short")
        yield tag >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends): seven bits a byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _raw(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text was expected")
    return value


def _integer(value: int | bytes) -> int:
    """A varint as a signed integer."""
    if not isinstance(value, int):
        raise ValueError("text where a number was expected")
    return value - 2**64 if value >= 2**63 else value
