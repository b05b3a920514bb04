"""Activation traces: which neurons were live in every layer of every token, and what was predicted of them. NumPy only.

One npz file per recording, T tokens in the order in which they ran; the members are listed in docs/design.md.
"""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.drafts import draft_file
from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.errors import MismatchError, StorageError, UsageError

log = logging.getLogger(__name__)

VERSION = 1
PREFILL, DECODE = 0, 1  # phases
MOST_BYTES = 2**31  # of host memory for a recording
MOST_READ_BYTES = 2**34
_HEADER_BYTES = 2**12  # of a member
_TAKEN = "this recorder holds what another engine did: take a new one"
_TEXT_BYTES = 2**16

Bools = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
Read = TypeVar("Read")
Taken = TypeVar("Taken", bound="Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What was recorded."""

    fingerprint: str
    layers: int
    width: int  # neurons of a layer
    settings: Mapping[str, Any]  # how the engine ran: sparsity, policy, predictor, lead, and the policy's constants

    @property
    def packed(self) -> int:
        """Bytes of a layer's bits."""
        return -(-self.width // 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A recording that was read. Bits are packed as by np.packbits, neuron 0 first."""

    head: Head
    token_pos: I32  # [T] in its sequence
    phase: U8  # [T] PREFILL or DECODE
    generation: I32  # [T] which call of generate
    step: I32  # [T] tokens of a prompt, or decoded together, have the same
    row: I32  # [T] of the batch
    live: U8  # [T, L, F / 8]
    resident: U8  # [T, L, F / 8] what was on the device
    score: U8 | None  # [T, L, F] what the layer's plan went by that was asked for in this token
    scored: Bools | None  # [T, L] where there is such a score
    skip: U8 | None  # [T, L, F] what decided which neurons of the layer itself are skipped, in decoded tokens
    costs: dict[str, float] | None  # at the end; None: nothing was planned

    def live_of(self, layer: int) -> Bools:
        """[T, F]."""
        return np.unpackbits(self.live[:, layer], axis=1, count=self.head.width).view(np.bool_)

    def resident_of(self, layer: int) -> Bools:
        """[T, F]."""
        return np.unpackbits(self.resident[:, layer], axis=1, count=self.head.width).view(np.bool_)


@dataclass(slots=True, eq=False)
class _Step:
    """A prompt, or the tokens that were decoded together: n of them."""

    position: I32  # [n]
    row: I32  # [n]
    phase: int
    generation: int
    live: U8  # [n, L, F / 8]
    resident: list[U8]  # L of [F / 8]; the same objects as a step before while nothing moves
    score: dict[int, U8] = field(default_factory=dict)  # layer: [n, F]
    skip: dict[int, U8] = field(default_factory=dict)
    layers: int = 0  # that have run

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self.live.nbytes + sum(
            part.nbytes for part in (*self.resident, *self.score.values(), *self.skip.values())
        )


class Record(Protocol):
    """What a Recorder holds of units that are no neurons."""

    head: Any

    @property
    def tokens(self) -> int:
        """See Recorder."""
        ...

    def start(self) -> None:
        """See Recorder."""

    def write(self, path: Path) -> None:
        """See Recorder."""


class Recorder:
    """Collects what an engine tells (`Engine.record`). A step counts once all its layers have run.

    A token takes L x F / 4 bytes, and up to 2 x L x F more with scores; once `most_bytes` are full, nothing is added.
    The engine calls the methods one at a time.
    """

    def __init__(self, most_bytes: int = MOST_BYTES):
        self.costs: dict[str, float] | None = None
        self._head: Head | None = None
        self._most, self._bytes = most_bytes, 0
        self._generation = 0
        self._scores = False
        self._steps: list[_Step] = []
        self._open: _Step | None = None
        self._last: list[U8] = []
        self.taken: Record | None = None  # what is written instead of neurons

    @property
    def tokens(self) -> int:
        """Recorded so far."""
        return sum(len(step.position) for step in self._steps) if self.taken is None else self.taken.tokens

    def open(self, head: Head, *, scores: bool) -> None:
        """What comes now is of this model. UsageError if it holds another one's tokens, or was set up otherwise."""
        if self._head not in (None, head) or self.taken is not None:
            raise UsageError(_TAKEN)
        self._head, self._scores = head, scores

    def take(self, record: Taken) -> Taken:
        """From now on it is this record that is written, or that which was taken before if it is of the same model."""
        known = self.taken
        if self._head is not None or (known is not None and (type(known), known.head) != (type(record), record.head)):
            raise UsageError(_TAKEN)
        if isinstance(known, type(record)):
            return known
        self.taken = record
        return record

    def start(self) -> None:
        """A new generation begins."""
        if self.taken is not None:
            self.taken.start()
        self._generation += 1
        self._open = None

    def begin(self, position: I32, row: I32, phase: int) -> None:
        """These tokens run next. What was begun before and did not pass every layer is forgotten."""
        head = self._opened()
        self._open = None
        if self._bytes < self._most:
            live = np.zeros((len(position), head.layers, head.packed), np.uint8)
            self._open = _Step(position.astype(np.int32), row.astype(np.int32), phase, self._generation, live, [])

    def add_scores(self, layer: int, scores: U8 | None) -> None:
        """What a layer's plan goes by [n, F]; None: nothing is predicted of it."""
        if self._open is not None and self._scores and scores is not None:
            self._open.score[layer] = np.array(scores)

    def add(self, layer: int, live: Bools, bucket: npt.NDArray[np.int32], skip: U8 | None = None) -> None:
        """A layer has run: what was live in it [n, F], and what was on the device. Layers come in order.

        skip [n, F]: the scores that decided which of its neurons are skipped.
        """
        step, head = self._open, self._opened()
        if step is None:
            return
        assert (layer, len(live)) == (step.layers, len(step.position)), "layers come in order, with the step's tokens"
        step.live[:, layer] = np.packbits(live, axis=1)
        if self._scores and skip is not None:
            step.skip[layer] = skip
        bits = np.zeros(head.width, np.bool_)
        bits[bucket] = True
        resident = np.packbits(bits)
        last = self._last[layer] if len(self._last) > layer else None
        step.resident.append(last if last is not None and np.array_equal(last, resident) else resident)
        step.layers += 1
        if step.layers == head.layers:
            self._open, self._last = None, step.resident
            self._steps.append(step)
            self._bytes += step.nbytes
            if self._bytes >= self._most:
                log.warning("the record is full after %d tokens: what comes now is not in it", self.tokens)

    def write(self, path: Path) -> None:
        """The file, whole or not at all. StorageError if it cannot be written."""
        if self.taken is not None:
            self.taken.write(path)
            return
        head, steps = self._opened(), self._steps
        sizes = [len(step.position) for step in steps]
        shape = (sum(sizes), head.layers, head.packed)
        scalars = {
            "version": VERSION,
            "kind": "neuron",
            "fingerprint": head.fingerprint,
            "layers": head.layers,
            "width": head.width,
            "tokens": sum(sizes),
            "settings": json.dumps(dict(head.settings)),
            "costs": json.dumps(self.costs),
        }
        small = {name: np.asarray(value) for name, value in scalars.items()}
        small["token_pos"] = joined([step.position for step in steps])
        small["row"] = joined([step.row for step in steps])
        for name, values in (("generation", [step.generation for step in steps]), ("step", range(len(steps)))):
            small[name] = np.repeat(np.asarray(values, np.int32), sizes)
        small["phase"] = np.repeat(np.asarray([step.phase for step in steps], np.uint8), sizes)
        with draft_file(path, self._bytes) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, value in small.items():
                write_member(archive, name, value.dtype, value.shape, [np.ascontiguousarray(value)])
            write_member(archive, "live", np.dtype(np.uint8), shape, (step.live for step in steps))
            write_member(archive, "resident", np.dtype(np.uint8), shape, (_residents(step) for step in steps))
            whole = (sum(sizes), head.layers, head.width)
            if any(step.skip for step in steps):
                write_member(
                    archive, "skip", np.dtype(np.uint8), whole, (_scores(step.skip, step, head) for step in steps)
                )
            if any(step.score for step in steps):
                parts = (_scores(step.score, step, head) for step in steps)
                write_member(archive, "score", np.dtype(np.uint8), whole, parts)
                flags = [np.repeat([[i in step.score for i in range(head.layers)]], n, axis=0)
                         for step, n in zip(steps, sizes, strict=True)]  # fmt: skip
                write_member(archive, "scored", np.dtype(np.bool_), whole[:2], flags)

    def _opened(self) -> Head:
        if self._head is None:
            raise UsageError("nothing was recorded: give the recorder to Engine.record first")
        return self._head


def joined(parts: list[I32]) -> I32:
    """One after the other; an empty array of none."""
    return np.concatenate([np.empty(0, np.int32), *parts])


def _residents(step: _Step) -> U8:
    return np.ascontiguousarray(np.broadcast_to(np.stack(step.resident), step.live.shape))


def _scores(known: Mapping[int, U8], step: _Step, head: Head) -> U8:
    found = np.zeros((len(step.position), head.layers, head.width), np.uint8)
    for layer, scores in known.items():
        found[:, layer] = scores
    return found


def write_member(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype, shape: tuple[int, ...], parts: Iterable[npt.NDArray]
) -> None:
    """An array of an npz file that is never whole in memory: its parts, one after the other."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_2_0(member, header)
        for part in parts:
            member.write(part.tobytes())


def read_trace(path: Path, fingerprint: str | None = None) -> Trace:
    """A recording. MismatchError if it is another version's, or of another model than `fingerprint`, or damaged."""
    trace = unpack(path, _unpacked)
    check_owner(path, trace.head.fingerprint, fingerprint)
    return trace


def unpack(path: Path, make: Callable[[Members, str], Read], name: str = "an activation trace") -> Read:
    """What `make` reads of an npz file, given its members and what to call it. MismatchError, a line, if it cannot."""
    where = located(path)
    if not path.is_file():
        raise StorageError(f"no trace {where}")
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        if sum(sizes.values()) > MOST_READ_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_READ_BYTES} bytes")
        with np.load(path, allow_pickle=False) as archive:
            return make(Members(archive, sizes), where)
    except OSError as error:
        raise StorageError(f"cannot read {where}: {error.strerror or error}") from error
    except MismatchError:
        raise
    except (ValueError, TypeError, KeyError, EOFError, MemoryError, SyntaxError, NotImplementedError, RecursionError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        raise MismatchError(f"{where} is not {name}: {plain(str(error))}: record it again") from error


def check_owner(path: Path, owner: str, fingerprint: str | None) -> None:
    """MismatchError if the trace of `owner` is asked for another model; fingerprint None: any will do."""
    if fingerprint not in (None, owner):
        who = plain(owner[:12])
        raise MismatchError(f"{located(path)} was recorded from the model {who}, this one is {fingerprint[:12]}")


@dataclass(frozen=True, slots=True)
class Members:
    """An npz file of which nothing is unpacked before its size is known to be right."""

    archive: Mapping[str, npt.NDArray]
    sizes: Mapping[str, int]

    def take(self, name: str, shape: tuple[int, ...], kind: type[np.generic]) -> npt.NDArray:
        """An array; ValueError if it is another than expected."""
        expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        if not expected <= self.sizes.get(name, 0) <= expected + _HEADER_BYTES:
            raise ValueError(f"{name} must have {expected} bytes, got {self.sizes.get(name)}")
        array = self.archive[name]
        if array.shape != shape or array.dtype != kind:
            raise ValueError(f"{name} must be {np.dtype(kind)} {shape}, got {array.dtype} {array.shape}")
        return array

    def word(self, name: str) -> str:
        """A text."""
        if self.sizes.get(name, 0) > _TEXT_BYTES:
            raise ValueError(f"{name} is too long")
        return str(self.archive[name][()])

    def number(self, name: str, low: int, high: int) -> int:
        """An integer."""
        value = self.archive[name][()] if self.sizes.get(name, 0) <= _HEADER_BYTES else None
        if not isinstance(value, np.integer) or not low <= value <= high:
            raise ValueError(f"{name} must be an integer from {low} to {high}, got {quoted(value)}")
        return int(value)


def _unpacked(members: Members, where: str) -> Trace:
    """Every member, with the shapes that the others imply; ValueError where they do not fit each other."""
    if (version := members.number("version", 0, 2**31)) != VERSION:
        raise MismatchError(f"{where} has version {version}, this program reads {VERSION}: record it again")
    if (kind := members.word("kind")) != "neuron":
        raise ValueError(f"kind must be neuron, got {quoted(kind)}")
    settings, costs = json.loads(members.word("settings")), json.loads(members.word("costs"))
    if not isinstance(settings, dict) or not isinstance(costs, dict | None):
        raise ValueError("settings and costs must be JSON objects")
    layers, width = members.number("layers", 1, 2**10), members.number("width", 1, 2**20)
    head = Head(fingerprint=members.word("fingerprint"), layers=layers, width=width, settings=settings)
    count = members.number("tokens", 0, 2**31)
    bits, scored = (count, layers, head.packed), "score" in members.sizes
    counts = {name: members.take(name, (count,), np.int32) for name in ("token_pos", "generation", "step", "row")}
    return Trace(
        head=head,
        phase=members.take("phase", (count,), np.uint8),
        **counts,
        live=members.take("live", bits, np.uint8),
        resident=members.take("resident", bits, np.uint8),
        score=members.take("score", (count, layers, width), np.uint8) if scored else None,
        scored=members.take("scored", (count, layers), np.bool_) if scored else None,
        skip=members.take("skip", (count, layers, width), np.uint8) if "skip" in members.sizes else None,
        costs=costs,
    )
