"""Routing traces: which experts every token went to in every layer, and which of them were on the device. NumPy only.

One npz file per recording, of the kind "expert": T tokens in the order in which they ran, M layers that have experts, E
experts a layer, K of them for a token. The members are listed in docs/simulator.md.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.drafts import draft_file
from dynajax.checkpoint.wording import quoted
from dynajax.errors import MismatchError
from dynajax.trace import DECODE, MOST_BYTES, PREFILL, VERSION, Members, check_owner, joined, unpack, write_member

log = logging.getLogger(__name__)

KIND = "expert"
MOST_EXPERTS = 2**16 - 1  # so that an id, and one more for "none", fit 16 bits
MOST_MOVES = 2**28
LAST = 0.7  # what a foretold token counts at the last of its experts, 1 at the first, as the engine counts them
MOVE = 4  # numbers of a move: step, layer, slot, expert

Ids = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHead:
    """What was recorded."""

    fingerprint: str  # of the weights; "" where a trace comes from elsewhere
    unit_layers: tuple[int, ...]  # numbers of the M layers that have experts, among the model's
    width: int  # experts of a layer
    top_k: int
    settings: Mapping[str, Any]  # how the engine ran

    @property
    def layers(self) -> int:
        """M."""
        return len(self.unit_layers)

    @property
    def ids(self) -> type[np.unsignedinteger]:
        """The type that experts are stored in; the number E stands for "none"."""
        return np.uint8 if self.width < 2**8 else np.uint16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """A routing trace, recorded or imported. Of a source that only counts, `experts` is None and `counts` is given."""

    head: RoutingHead
    token_pos: I32  # [T] in its sequence
    phase: U8  # [T] PREFILL or DECODE
    generation: I32  # [T] which call of generate, or which request
    step: I32  # [T] tokens of a prompt, or decoded together, have the same; never falls
    row: I32  # [T] of the batch
    experts: Ids | None  # [T, M, K]
    counts: I32 | None = None  # [S, M, E] tokens at each expert, of traces that know no more
    weights: F16 | None = None  # [T, M, K] of the experts in the token's output
    predicted: Ids | None = None  # [T, M, K] as foretold by an earlier layer of the same token; E: nothing was
    slots: I32 | None = None  # [M] of the pool; None: nothing is known of it
    start: I32 | None = None  # [M, most slots] the expert in each slot at first, -1 where there is none
    moves: I32 | None = None  # [N, 4] step, layer, slot, and the expert that it holds from then on, -1 while one comes
    frequency: F32 | None = None  # [M, E] share of other text's tokens that choose the expert, by which it was placed
    costs: dict[str, float] | None = None  # at the end; None: nothing was planned

    @property
    def steps(self) -> int:
        """S."""
        if self.counts is not None:
            return len(self.counts)
        return int(self.step[-1]) + 1 if len(self.step) else 0

    def workload(self) -> I32:
        """[S, M, E] tokens at each expert in every step."""
        if self.counts is not None:
            return self.counts
        assert self.experts is not None
        return counted(self.experts, self.step, self.steps, self.head.width)

    def foretold(self) -> I32 | None:
        """[S, M, E] the workload that was predicted; None: none was. A layer without predictions has no tokens."""
        if self.predicted is None:
            return None
        return counted(self.predicted, self.step, self.steps, self.head.width)

    def expected(self) -> npt.NDArray[np.float64] | None:
        """[S, M, E] the same as plans go by it: a token counts less at experts that it was less sure of."""
        if self.predicted is None:
            return None
        return weighed(self.predicted, self.step, self.steps, self.head.width)

    def resident_of(self, layer: int) -> npt.NDArray[np.bool_] | None:
        """[S, E] what was on the device when the layer ran; None: nothing is known."""
        if self.start is None or self.moves is None or self.slots is None:
            return None
        bucket = self.start[layer, : self.slots[layer]].copy()
        mine = self.moves[self.moves[:, 1] == layer]
        there = np.zeros((self.steps, self.head.width), np.bool_)
        first = np.searchsorted(mine[:, 0], np.arange(self.steps + 1))
        for step in range(self.steps):
            some = mine[first[step] : first[step + 1]]
            bucket[some[:, 2]] = some[:, 3]
            there[step, bucket[bucket >= 0]] = True
        return there


def counted(experts: Ids, step: I32, steps: int, width: int) -> I32:
    """[S, M, E] tokens of experts [T, M, K] in every step; ids of E and more are left out."""
    return _summed(experts, step, (steps, width), np.ones(experts.shape[2])).astype(np.int32)


def weighed(experts: Ids, step: I32, steps: int, width: int) -> npt.NDArray[np.float64]:
    """[S, M, E] the same of experts foretold [T, M, K], best first: from 1 at the first to LAST at the last."""
    return _summed(experts, step, (steps, width), np.linspace(1.0, LAST, experts.shape[2]))


def _summed(experts: Ids, step: I32, size: tuple[int, int], weights: npt.NDArray[np.float64]) -> npt.NDArray:
    steps, width = size
    found = np.zeros((steps, experts.shape[1], width + 1))
    where = np.minimum(experts, width).astype(np.int64)
    for layer in range(experts.shape[1]):
        flat = step[:, None].astype(np.int64) * (width + 1) + where[:, layer]
        told = np.bincount(flat.ravel(), np.tile(weights, len(flat)), minlength=steps * (width + 1))
        found[:, layer] = told.reshape(steps, width + 1)
    return found[:, :, :width]


# --- recording ---


@dataclass(slots=True, eq=False)
class _Step:
    """A prompt, or the tokens that were decoded together: n of them."""

    position: I32  # [n]
    row: I32  # [n]
    phase: int
    generation: int
    experts: Ids  # [n, M, K]
    predicted: Ids | None  # [n, M, K]
    layers: int = 0  # that have run

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes + (0 if self.predicted is None else self.predicted.nbytes)


@dataclass(slots=True, eq=False)
class RoutingRecord:
    """Collects what an engine of a mixture tells; see `trace.Recorder`, whose `take` it is given to.

    A token takes M x K bytes, twice that with predictions (two bytes an id from 256 experts on). Layers are told of by
    their number among those that have experts.
    """

    head: RoutingHead
    predicts: bool = False
    frequency: F32 | None = None  # [M, E] that the engine placed by
    costs: dict[str, float] | None = None
    most_bytes: int = MOST_BYTES
    _generation: int = 0
    _bytes: int = 0
    _steps: list[_Step] = field(default_factory=list)
    _open: _Step | None = None
    _start: list[I32] = field(default_factory=list)
    _now: list[I32] = field(default_factory=list)
    _moves: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Recorded so far."""
        return sum(len(step.position) for step in self._steps)

    def start(self) -> None:
        """A new generation begins."""
        self._generation += 1
        self._open = None

    def begin(self, position: I32, row: I32, phase: int) -> None:
        """These tokens run next. What was begun before and did not pass every layer is forgotten."""
        self._open = None
        if self._bytes < self.most_bytes:
            head = self.head
            shape = (len(position), head.layers, head.top_k)
            predicted = np.full(shape, head.width, head.ids) if self.predicts else None
            ids, rows = position.astype(np.int32), row.astype(np.int32)
            self._open = _Step(ids, rows, phase, self._generation, np.zeros(shape, head.ids), predicted)

    def add(self, layer: int, experts: npt.NDArray[np.integer]) -> None:
        """A layer's router has chosen: [n, K] of the step's tokens. Layers come in order."""
        step = self._open
        if step is None:
            return
        assert (layer, len(experts)) == (step.layers, len(step.position)), (
            "layers come in order, with the step's tokens"
        )
        step.experts[:, layer] = experts
        step.layers += 1
        if step.layers == self.head.layers:
            self._open = None
            self._steps.append(step)
            self._bytes += step.nbytes
            if self._bytes >= self.most_bytes:
                log.warning("the record is full after %d tokens: what comes now is not in it", self.tokens)

    def foretell(self, layer: int, experts: npt.NDArray[np.integer]) -> None:
        """A later layer of the step that is open is expected to choose these [n, K]."""
        if self._open is not None and self._open.predicted is not None:
            self._open.predicted[:, layer] = experts

    def place(self, layer: int, bucket: I32) -> None:
        """What a layer's slots hold as it runs, before `add` of its tokens; the first call of each layer in order."""
        if layer == len(self._now):
            self._start.append(bucket.astype(np.int32))
            self._now.append(bucket.astype(np.int32))
            return
        for slot in np.flatnonzero(bucket != self._now[layer]).tolist():
            self._moves.append((len(self._steps), layer, slot, int(bucket[slot])))
            self._now[layer][slot] = bucket[slot]

    def write(self, path: Path) -> None:
        """The file, whole or not at all. StorageError if it cannot be written."""
        head, steps = self.head, self._steps
        sizes, kind = [len(step.position) for step in steps], np.dtype(head.ids)
        shape = (sum(sizes), head.layers, head.top_k)
        small = self._scalars(shape[0]) | {
            "unit_layers": np.asarray(head.unit_layers, np.int32),
            "token_pos": joined([step.position for step in steps]),
            "row": joined([step.row for step in steps]),
            "generation": np.repeat(np.asarray([step.generation for step in steps], np.int32), sizes),
            "step": np.repeat(np.arange(len(steps), dtype=np.int32), sizes),
            "phase": np.repeat(np.asarray([step.phase for step in steps], np.uint8), sizes),
            **self._places(),
        }
        if self.frequency is not None:
            small["frequency"] = self.frequency.astype(np.float32)
        with draft_file(path, self._bytes) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, value in small.items():
                write_member(archive, name, value.dtype, value.shape, [np.ascontiguousarray(value)])
            write_member(archive, "experts", kind, shape, (step.experts for step in steps))
            if self.predicts:
                guesses = (step.predicted for step in steps if step.predicted is not None)
                write_member(archive, "predicted", kind, shape, guesses)

    def _scalars(self, tokens: int) -> dict[str, npt.NDArray[Any]]:
        head = self.head
        values = {
            "version": VERSION,
            "kind": KIND,
            "fingerprint": head.fingerprint,
            "layers": head.layers,
            "width": head.width,
            "top_k": head.top_k,
            "tokens": tokens,
            "settings": json.dumps(dict(head.settings)),
            "costs": json.dumps(self.costs),
        }
        return {name: np.asarray(value) for name, value in values.items()}

    def _places(self) -> dict[str, npt.NDArray[Any]]:
        """Slots, the buckets at first, and the moves; nothing if the pool was never told of."""
        if len(self._start) < self.head.layers:
            return {}
        slots = np.asarray([len(bucket) for bucket in self._start], np.int32)
        start = np.full((self.head.layers, int(slots.max(initial=0))), -1, np.int32)
        for layer, bucket in enumerate(self._start):
            start[layer, : len(bucket)] = bucket
        moves = np.asarray([move for move in self._moves if move[0] < len(self._steps)], np.int32).reshape(-1, MOVE)
        return {"slots": slots, "start": start, "moves": moves, "move_count": np.asarray(len(moves))}


# --- reading ---


def trace_kind(path: Path) -> str:
    """ "neuron" or "expert", whatever the file says; MismatchError if it is no trace."""
    return unpack(path, lambda members, _: members.word("kind"))


def read_routing(path: Path, fingerprint: str | None = None) -> RoutingTrace:
    """A recording. MismatchError if it is another version's, or of another model than `fingerprint`, or damaged."""
    trace = unpack(path, _unpacked, "a routing trace")
    check_owner(path, trace.head.fingerprint, fingerprint)
    return trace


def _unpacked(members: Members, where: str) -> RoutingTrace:
    """Every member, with the shapes that the others imply; ValueError where they do not fit each other."""
    if (version := members.number("version", 0, 2**31)) != VERSION:
        raise MismatchError(f"{where} has version {version}, this program reads {VERSION}: record it again")
    if (kind := members.word("kind")) != KIND:
        raise ValueError(f"kind must be {KIND}, got {quoted(kind)}")
    settings, costs = json.loads(members.word("settings")), json.loads(members.word("costs"))
    if not isinstance(settings, dict) or not isinstance(costs, dict | None):
        raise ValueError("settings and costs must be JSON objects")
    layers, width = members.number("layers", 1, 2**10), members.number("width", 1, MOST_EXPERTS)
    numbers = members.take("unit_layers", (layers,), np.int32)
    if numbers[0] < 0 or (np.diff(numbers) <= 0).any():
        raise ValueError("unit_layers must rise from 0 or more")
    head = RoutingHead(
        fingerprint=members.word("fingerprint"),
        unit_layers=tuple(numbers.tolist()),
        width=width,
        top_k=members.number("top_k", 1, width),
        settings=settings,
    )
    count = members.number("tokens", 0, 2**31)
    known, shape = members.sizes, (count, layers, head.top_k)
    trace = RoutingTrace(
        head=head,
        phase=members.take("phase", (count,), np.uint8),
        **{name: members.take(name, (count,), np.int32) for name in ("token_pos", "generation", "step", "row")},
        experts=members.take("experts", shape, head.ids),
        weights=members.take("weights", shape, np.float16) if "weights" in known else None,
        predicted=members.take("predicted", shape, head.ids) if "predicted" in known else None,
        frequency=members.take("frequency", (layers, width), np.float32) if "frequency" in known else None,
        **(_read_places(members, layers) if "slots" in known else {}),
        costs=costs,
    )
    check_routing(trace)
    return trace


def _read_places(members: Members, layers: int) -> dict[str, I32]:
    slots = members.take("slots", (layers,), np.int32)
    most = int(slots.max(initial=0))
    if slots.min() < 0 or most > MOST_EXPERTS:
        raise ValueError(f"slots must be from 0 to {MOST_EXPERTS}")
    moves = members.take("moves", (members.number("move_count", 0, MOST_MOVES), MOVE), np.int32)
    return {"slots": slots, "start": members.take("start", (layers, most), np.int32), "moves": moves}


def check_routing(trace: RoutingTrace) -> None:
    """ValueError, in one line, for ids out of range and steps that cannot be."""
    head, count = trace.head, len(trace.token_pos)
    for name in ("token_pos", "generation", "row"):
        if count and getattr(trace, name).min() < 0:
            raise ValueError(f"{name} must be 0 or more")
    steps = np.diff(trace.step, prepend=0)
    if count and (steps.min() < 0 or steps.max() > 1 or trace.step[0] != 0):
        raise ValueError("step must rise from 0, by one at a time")
    if count and (trace.phase > DECODE).any():
        raise ValueError(f"phase must be {PREFILL} or {DECODE}")
    if trace.experts is not None:
        _check_ids("experts", trace.experts, head.width)
        if count and head.top_k > 1:
            ordered = np.sort(trace.experts, axis=2)
            if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
                raise ValueError("experts of a token must be distinct")
    if trace.predicted is not None:
        _check_ids("predicted", trace.predicted, head.width + 1)
    if trace.start is not None and trace.slots is not None and trace.moves is not None:
        _check_places(trace.slots, trace.start, trace.moves, (trace.steps, head.width))


def _check_ids(name: str, ids: Ids, limit: int) -> None:
    if ids.size and int(ids.max()) >= limit:
        raise ValueError(f"{name} must be below {limit}, got {int(ids.max())}")


def _check_places(slots: I32, start: I32, moves: I32, size: tuple[int, int]) -> None:
    steps, width = size
    if start.size and (start.min() < -1 or start.max() >= width):
        raise ValueError(f"start must name experts below {width}")
    if not len(moves):
        return
    limits: Sequence[tuple[str, int, int]] = (("step", 0, steps), ("layer", 0, len(slots)), ("expert", -1, width))
    for column, (name, low, high) in zip((0, 1, 3), limits, strict=True):
        if moves[:, column].min() < low or moves[:, column].max() >= high:
            raise ValueError(f"moves must have a {name} from {low} to {high - 1}")
    if moves[:, 2].min() < 0 or (moves[:, 2] >= slots[moves[:, 1]]).any():
        raise ValueError("moves must name slots that a layer has")
    if (np.diff(moves[:, 0]) < 0).any():
        raise ValueError("moves must come in the order of steps")
