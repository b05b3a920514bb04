"""What an open engine computes and holds, for comparison with a reference. Not for generating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.mapping import LEARNED_OFFSET, stored_as, unit_parts
from dynajax.config import ModelSpec
from dynajax.engine.opening import Parts
from dynajax.engine.threads import ThreadsRunner

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What one sequence of T tokens went through."""

    hidden: tuple[Floats, ...]  # L arrays [T, D], the FFN's input; empty where a token is one program
    logits: Floats  # [decoded, V], at the last positions


def trace(parts: Parts, ids: Sequence[int], decoded: int) -> Trace:
    """Prefill all but the last `decoded` tokens, then feed those one by one; the caller has the engine to itself."""
    spec, batch = parts.prepared.spec, parts.config.batch
    hidden: list[list[Floats]] = [[] for _ in range(spec.layers)]
    first, active = len(ids) - decoded, np.arange(batch) == 0

    def prompt(layer: int, h: Floats) -> None:
        hidden[layer].append(h[:, : spec.hidden].copy())

    def row(layer: int, h: Floats) -> None:
        hidden[layer].append(h[:1, : spec.hidden].copy())

    runner, logits = parts.runner, []
    watched = isinstance(runner, ThreadsRunner)
    try:
        if watched:
            runner.watch = prompt
        if first:
            parts.stepper.prefill(0, ids[:first], lambda done, total: None)
        if watched:
            runner.watch = row
        for position in range(first, len(ids)):
            fed, where = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
            fed[0], where[0] = ids[position], position
            logits.append(parts.stepper.step(fed, where, active)[0])
    finally:
        if watched:
            runner.watch = None
    return Trace(tuple(np.concatenate(chunks) for chunks in hidden) if watched else (), np.stack(logits))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A weight in host memory, in the order of its published tensor; of units one row each, whatever the tensor has."""

    part: str  # as `Checkpoint.tensors` names it, with `layer`
    layer: int | None
    values: npt.NDArray
    rounded: str  # the type that its values were rounded to
    where: str  # "device" or "host"
    first: int = 0  # the tensor's first row that the engine holds
    units: npt.NDArray[np.int32] | None = None  # whose rows the values are; None: no units


def held_weights(parts: Parts) -> Iterator[Held]:
    """Every weight that the engine holds, layer by layer, the ends last; a unit in each place where it lies.

    Each is fetched when it is asked for and kept by nobody. Do not use the engine meanwhile: on the CPU backend the
    values are those of the device, not copies.
    """
    spec, weights = parts.prepared.spec, parts.stepper.weights
    dtype, names = parts.prepared.programs.shapes.dtype, parts.prepared.programs.leaf_names
    for layer, leaves in enumerate(weights.layers):
        for part, values in _published(dict(zip(names, leaves, strict=True)), spec):
            yield Held(part, layer, values, dtype, "device")
        for index, part in enumerate(unit_parts(spec)):
            for rows, where, units in _unit_rows(parts, layer, index):
                rounded = parts.prepared.host_dtype
                yield Held(part, layer, rows[:, : spec.hidden], rounded, where, units=units)
                if spec.ffn_bias and part != "down":
                    yield Held(f"{part}_bias", layer, rows[:, spec.hidden], rounded, where, units=units)
    for part, norm in zip(("norm", "norm_bias"), weights.norm, strict=False):
        yield Held(part, None, _values(norm), dtype, "device")
    if not spec.tied or weights.table is not weights.tables[0]:
        yield Held("embed" if spec.tied else "head", None, _values(weights.table), dtype, "device")
    if spec.tied:
        tables, rounded, where = [_values(table) for table in weights.tables], dtype, "device"
    else:
        tables, rounded, where = weights.host_tables, parts.prepared.host_dtype, "host"
    for part, table, first in zip(("embed", "positions"), tables, (0, LEARNED_OFFSET), strict=False):
        yield Held(part, None, table, rounded, where, first)


def _published(leaves: dict[str, jax.Array], spec: ModelSpec) -> Iterator[tuple[str, npt.NDArray]]:
    """A layer's leaves by the tensors they come from; what is stored as one is put together again."""
    if stored_as("q", spec) == "qkv":  # for every KV head its queries, its key, its value
        groups = (_values(leaves.pop(part)).reshape(spec.kv_heads, -1, spec.head_dim, spec.hidden) for part in "qkv")
        yield "qkv", np.concatenate(list(groups), axis=1).reshape(-1, spec.hidden)
    for name, leaf in leaves.items():
        yield stored_as(name, spec), _values(leaf)


def _unit_rows(parts: Parts, layer: int, index: int) -> Iterator[tuple[npt.NDArray, str, npt.NDArray[np.int32]]]:
    """(rows [G, W], place, units [G]) of one part of a layer's units, in host memory and in the pool."""
    if parts.store.arenas:
        arena = parts.store.arenas[layer]
        yield arena[:, index, 0], "host", np.arange(len(arena), dtype=np.int32)
    bucket = parts.pool.bucket(layer)
    if len(bucket):
        with parts.pool.lock:
            rows = _values(parts.pool.parts(layer)[index])
        bits = parts.prepared.programs.shapes.dtype == "bfloat16"  # such pools are uint16
        yield rows.view(ml_dtypes.bfloat16) if bits else rows, "device", bucket


def _values(array: jax.Array) -> npt.NDArray:
    """The array's values in host memory; the array itself remembers no copy, which would last as long as it does."""
    return np.asarray(array.addressable_data(0))
