"""Routing traces of other programs as the record that this program's own are read to. NumPy and the standard library.

None of the originals could be read here: the layouts are those that their descriptions give, and whatever fits them is
accepted. Everything that is read is checked as a recording is; ValueError, in one line, where it does not fit.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.routing_trace import MOST_EXPERTS, RoutingHead, RoutingTrace, check_routing
from dynajax.trace import DECODE, PREFILL

MOST_TOKENS = 2**16  # of an imported text; what comes behind them is left out
MOST_LAYERS = 2**10
_TAIL = re.compile(r"(\d+)\D*$")
_PHASES = (("prefill", PREFILL), ("prompt", PREFILL), ("decode", DECODE), ("generat", DECODE))

Grid = npt.NDArray[np.integer]


def imported(
    experts: Grid,  # [T, M, K]
    width: int | None,  # E; None: as many as are named
    *,
    phase: npt.NDArray[np.uint8] | None = None,  # [T]; None: all were decoded
    generation: npt.NDArray[np.int32] | None = None,  # [T]
    weights: npt.NDArray[np.floating] | None = None,  # [T, M, K]
) -> RoutingTrace:
    """Tokens one after the other, each by itself, prompts together."""
    if experts.ndim != 3 or not experts.size:
        raise ValueError(f"experts must be tokens x layers x experts of a token, got the shape {experts.shape}")
    count = len(experts)
    if experts.min() < 0 or experts.max() >= MOST_EXPERTS:
        raise ValueError(f"experts must be from 0 to {MOST_EXPERTS - 1}")
    phase = np.full(count, DECODE, np.uint8) if phase is None else phase.astype(np.uint8)
    generation = np.ones(count, np.int32) if generation is None else generation.astype(np.int32)
    begins = np.ones(count, np.bool_)
    begins[1:] = (phase[1:] == DECODE) | (phase[1:] != phase[:-1]) | (generation[1:] != generation[:-1])
    first = np.zeros(count, np.int64)
    new = np.flatnonzero(np.diff(generation, prepend=generation[0] - 1))
    first[new] = new
    position = np.arange(count) - np.maximum.accumulate(first)
    head = _head(experts.shape[1], width or int(experts.max()) + 1, experts.shape[2])
    trace = RoutingTrace(
        head=head,
        token_pos=position.astype(np.int32),
        phase=phase,
        generation=generation,
        step=(np.cumsum(begins) - 1).astype(np.int32),
        row=np.zeros(count, np.int32),
        experts=experts.astype(head.ids),
        weights=None if weights is None else weights.astype(np.float16),
    )
    check_routing(trace)
    return trace


def counted_steps(counts: Grid, top_k: int) -> RoutingTrace:
    """Steps [S, M, E] of which only the tokens at each expert are known; all count as decoded."""
    if counts.ndim != 3 or not counts.size:
        raise ValueError(f"counts must be steps x layers x experts, got the shape {counts.shape}")
    if not np.issubdtype(counts.dtype, np.integer) and not (np.mod(counts, 1) == 0).all():
        raise ValueError("counts must be whole numbers")
    if counts.min() < 0 or counts.max() >= 2**31:
        raise ValueError("counts must be from 0 to 2147483647")
    counts = counts[counts.any(axis=(1, 2))][:, counts.any(axis=(0, 2))].astype(np.int32)  # neither empty steps nor
    if not counts.size:  # layers without experts
        raise ValueError("nothing was counted")
    if counts.shape[2] < top_k:
        raise ValueError(f"there are {counts.shape[2]} experts, fewer than the {top_k} of a token")
    number = np.arange(len(counts), dtype=np.int32)
    return RoutingTrace(
        head=_head(*counts.shape[1:], top_k),
        token_pos=number,
        phase=np.full(len(counts), DECODE, np.uint8),
        generation=np.ones(len(counts), np.int32),
        step=number,
        row=np.zeros(len(counts), np.int32),
        experts=None,
        counts=counts,
    )


def _head(layers: int, width: int, top_k: int) -> RoutingHead:
    if layers > MOST_LAYERS:
        raise ValueError(f"there must be at most {MOST_LAYERS} layers, got {layers}")
    return RoutingHead(fingerprint="", unit_layers=tuple(range(layers)), width=width, top_k=top_k, settings={})


def layer_number(name: str) -> int | None:
    """The last number in a name: layer_07 -> 7; None: it has none."""
    found = _TAIL.search(name)
    return int(found.group(1)) if found else None


# --- core12345/MoE_expert_selection_trace: JSON ---


def read_json(path: Path, width: int | None) -> RoutingTrace:
    """A request: for every generated token, for every layer, a list of experts; by position or by the layers' names.

    Parts that are named after prompts and decoding are told apart.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    parts = _parts(value)
    sizes = {grid.shape[1:] for _, grid in parts}
    if len(sizes) != 1:
        raise ValueError(f"its parts have different layers or experts of a token: {sorted(sizes)}")
    experts = np.concatenate([grid for _, grid in parts])[:MOST_TOKENS]
    phase = np.concatenate([np.full(len(grid), kind, np.uint8) for kind, grid in parts])[:MOST_TOKENS]
    return imported(experts, width, phase=phase)


def _parts(value: Any) -> list[tuple[int, Grid]]:
    """(phase, [T, M, K]) of every part."""
    if isinstance(value, dict):
        named = [(phase, part) for word, phase in _PHASES for key, part in value.items() if word in key.lower()]
        if named:
            return [(phase, _grid(part)) for phase, part in named if part]
    return [(DECODE, _grid(value))]


def _grid(value: Any) -> Grid:
    """[T, M, K] of lists of tokens, of a record of layers, or of a record that holds one of them."""
    if isinstance(value, dict):
        if (layers := _by_layer(value)) is not None:
            grids = [_rows(part) for part in layers]
            if len({grid.shape for grid in grids}) != 1:
                raise ValueError("its layers have different numbers of tokens, or of experts of a token")
            return np.stack(grids, axis=1)
        inner = [part for part in value.values() if isinstance(part, list | dict) and part]
        if len(inner) != 1:
            raise ValueError(f"it holds {', '.join(map(str, value)) or 'nothing'}: not one list of tokens or layers")
        return _grid(inner[0])
    if isinstance(value, list) and value and all(isinstance(token, dict) for token in value):
        tokens = [_by_layer(token) for token in value]
        if any(token is None for token in tokens):
            return np.concatenate([_grid(token) for token in value])
        value = tokens
    grid = np.asarray(value if isinstance(value, list) else [])
    if grid.ndim != 3 or not np.issubdtype(grid.dtype, np.integer):
        raise ValueError("it must be a list of tokens, each a list of layers, each a list of as many experts")
    return grid


def _by_layer(value: Mapping[str, Any]) -> list[Any] | None:
    """The parts in the order of the layers' numbers; None: they are not named after layers."""
    numbers = {key: layer_number(key) for key in value}
    if not value or any(number is None for number in numbers.values()):
        return None
    if len(set(numbers.values())) < len(numbers):
        raise ValueError("two of its layers have the same number")
    return [value[key] for key in sorted(value, key=lambda key: numbers[key] or 0)]


def _rows(value: Any) -> Grid:
    rows = np.asarray(value)
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError("a layer must be a list of tokens, each a list of as many experts")
    return rows


# --- MoE-Infinity: .npy [request, layer, expert] ---


def read_npy(path: Path, top_k: int) -> RoutingTrace:
    """Tokens at each expert in each request; a request is taken for a step in which all of its tokens run together."""
    counts = np.load(path, allow_pickle=False)
    if counts.dtype.kind not in "iuf":
        raise ValueError(f"it must hold numbers, got {counts.dtype}")
    return counted_steps(counts, top_k)


# --- llama-moe-trace: CSV ---


def read_csv(path: Path, width: int | None, top_k: int, columns: Mapping[str, str]) -> RoutingTrace:
    """A line a token and layer, its experts in one field or several; or a line a layer and expert with its count.

    columns: token, layer, expert, count -> the file's names, where they are others.
    """
    text = path.read_text(encoding="utf-8")
    lines = list(csv.reader(io.StringIO(text)))
    if len(lines) < 2:
        raise ValueError("it has no lines")
    names = [word.strip().lower() for word in lines[0]]
    rows = [row for row in lines[1:] if row]
    layer = _column(names, columns.get("layer"), ("layer", "il", "blk"))
    counting = _columns(names, columns.get("count"), ("count", "hits", "freq"))
    chosen = _columns(names, columns.get("expert"), ("expert", "id"))
    if counting:
        return _histogram(rows, layer, chosen[0] if chosen else len(names), counting[0], width, top_k)
    token = _column(names, columns.get("token"), ("token", "pos", "step"))
    if not chosen:
        raise ValueError(f"none of its columns {', '.join(names)} names experts: give --columns expert=NAME")
    table = [(int(row[token]), int(row[layer]), _ids(row, chosen)) for row in rows]
    tokens, layers = sorted({key for key, _, _ in table})[:MOST_TOKENS], sorted({key for _, key, _ in table})
    sizes = {len(ids) for *_, ids in table}
    if sizes == {1}:  # a line for each expert of a token
        return imported(_gathered(table, tokens, layers), width)
    if len(sizes) != 1:
        raise ValueError(f"tokens must have as many experts everywhere, got {sorted(sizes)}")
    found = {(key, number): ids for key, number, ids in table}
    try:
        return imported(np.array([[found[key, number] for number in layers] for key in tokens]), width)
    except KeyError as error:
        raise ValueError(f"token and layer {error} are missing") from None


def _gathered(
    table: Sequence[tuple[int, int, list[int]]], tokens: Sequence[int], layers: Sequence[int]
) -> npt.NDArray[np.int64]:
    """[T, M, K] of a line for each expert."""
    found: dict[tuple[int, int], list[int]] = {}
    for key, number, ids in table:
        found.setdefault((key, number), []).extend(ids)
    lists = [[found.get((key, number), []) for number in layers] for key in tokens]
    if len(sizes := {len(ids) for token in lists for ids in token}) != 1:
        raise ValueError(f"tokens must have as many experts everywhere, got {sorted(sizes)}")
    return np.array(lists)


def _histogram(
    rows: Sequence[Sequence[str]], layer: int, expert: int, count: int, width: int | None, top_k: int
) -> RoutingTrace:
    """One step with what a profile counts."""
    if rows and expert >= len(rows[0]):
        raise ValueError("none of its columns names an expert: give --columns expert=NAME")
    numbers = np.array([[int(row[at]) for at in (layer, expert, count)] for row in rows])
    if numbers.min() < 0 or numbers[:, 1].max() >= MOST_EXPERTS:
        raise ValueError("layers, experts and counts must be 0 or more")
    names = np.unique(numbers[:, 0])
    units = width or int(numbers[:, 1].max()) + 1
    if numbers[:, 1].max() >= units:
        raise ValueError(f"experts must be below {units}, got {numbers[:, 1].max()}")
    place = np.searchsorted(names, numbers[:, 0]) * units + numbers[:, 1]
    found = np.bincount(place, numbers[:, 2], minlength=len(names) * units)
    return counted_steps(found.reshape(1, len(names), units), top_k)


def _column(names: Sequence[str], given: str | None, words: Sequence[str]) -> int:
    found = _columns(names, given, words)
    if not found:
        raise ValueError(f"none of its columns {', '.join(names)} is the {words[0]}: give --columns {words[0]}=NAME")
    return found[0]


def _columns(names: Sequence[str], given: str | None, words: Sequence[str]) -> list[int]:
    if given is not None:
        if given.lower() not in names:
            raise ValueError(f"it has no column {given!r}, only {', '.join(names)}")
        return [names.index(given.lower())]
    for word in words:
        if found := [at for at, name in enumerate(names) if word in name]:
            return found
    return []


def _ids(row: Sequence[str], columns: Sequence[int]) -> list[int]:
    return [int(word) for at in columns for word in re.split(r"[\s;|]+", row[at].strip(" []\"'")) if word]
