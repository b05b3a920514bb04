"""What an open engine computes and holds, for comparison with a reference. Not for generating."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.mapping import LEARNED_OFFSET, fused_rows, routing_parts, shape_of, stored_as, unit_parts
from dynajax.config import ModelSpec
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.mixture.runner import MixtureRunner
from dynajax.engine.opening import Parts
from dynajax.engine.threads import ThreadsRunner
from dynajax.programs import MixturePrograms

Floats = npt.NDArray[np.float32]
See = Callable[[int, Floats], None]  # layer, the FFN input of some tokens [T, W]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What one sequence of T tokens went through."""

    hidden: Mapping[int, Floats]  # layer: [T, D], what its units read; empty where a token is one program
    logits: Floats  # [decoded, V], at the last positions


def trace(parts: Parts, ids: Sequence[int], decoded: int) -> Trace:
    """Prefill all but the last `decoded` tokens, then feed those one by one; the caller has the engine to itself."""
    batch, first = parts.config.batch, len(ids) - decoded
    active, logits = np.arange(batch) == 0, []
    hidden: dict[int, list[Floats]] = defaultdict(list)
    tokens: int | None = None  # of those that are shown, the ones that count

    def see(layer: int, h: Floats) -> None:
        hidden[layer].append(h[:tokens, : parts.prepared.spec.hidden].copy())

    try:
        _watch(parts, see)
        if first:
            parts.stepper.prefill(0, ids[:first], lambda done, total: None)
        tokens = 1
        for position in range(first, len(ids)):
            fed, where = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
            fed[0], where[0] = ids[position], position
            logits.append(parts.stepper.step(fed, where, active)[0])
    finally:
        _watch(parts, None)
    return Trace({layer: np.concatenate(chunks) for layer, chunks in hidden.items()}, np.stack(logits))


def _watch(parts: Parts, see: See | None) -> None:
    """Show `see` what units read from now on, where layers run one by one anyway; None: nobody."""
    runner, layers = parts.runner, parts.layers
    if isinstance(runner, ThreadsRunner):
        runner.watch = see
    elif isinstance(runner, MixtureRunner) and isinstance(layers, MixtureLayers):
        layers.watch = None if see is None else lambda seen: see(seen.layer, seen.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A weight in host memory, in the order of its published tensor; of units one row each, whatever the tensor has."""

    part: str  # as `Checkpoint.tensors` names it, with `layer`; of an expert gate, up or down
    layer: int | None
    values: npt.NDArray
    rounded: str  # the type that its values were rounded to
    where: str  # "device" or "host"
    first: int = 0  # the tensor's first row that the engine holds
    turned: bool = False  # rows are the tensor's columns
    units: npt.NDArray[np.int32] | None = None  # the neurons whose rows the values are; None: no neurons
    expert: int | None = None  # whose weights these are


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
        yield from _neurons(parts, layer) if spec.experts is None else _mixture(parts, layer)
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


def _published(leaves: Mapping[str, jax.Array], spec: ModelSpec) -> Iterator[tuple[str, npt.NDArray]]:
    """A layer's leaves by the tensors they come from; what is stored as one is put together again."""
    together: dict[str, list[str]] = defaultdict(list)
    for name in leaves:
        together[stored_as(name, spec)].append(name)
    for stored, names in together.items():
        if len(names) == 1:
            yield stored, _values(leaves[names[0]])
            continue
        whole = np.empty(shape_of(stored, spec), leaves[names[0]].dtype)
        for name in names:
            values, first = _values(leaves[name]), 0
            for rows in fused_rows(name, spec):
                count = rows.stop - rows.start
                whole[rows], first = values[first : first + count], first + count
        yield stored, whole


def _neurons(parts: Parts, layer: int) -> Iterator[Held]:
    """A layer's FFN where every neuron is a unit."""
    spec, rounded = parts.prepared.spec, parts.prepared.host_dtype
    for index, part in enumerate(unit_parts(spec)):
        for rows, where, units in _neuron_rows(parts, layer, index):
            weights, biases = rows[:, : spec.hidden], rows[:, spec.hidden :]
            yield Held(part, layer, weights, rounded, where, turned=part == "down", units=units)
            if spec.ffn_bias and part != "down":
                yield Held(f"{part}_bias", layer, biases[:, 0], rounded, where, units=units)


def _neuron_rows(parts: Parts, layer: int, index: int) -> Iterator[tuple[npt.NDArray, str, npt.NDArray[np.int32]]]:
    """(rows [G, W], place, units [G]) of one part of a layer's units, in host memory and in the pool."""
    if parts.store.arenas:
        arena = parts.store.arenas[layer]
        yield arena[:, index, 0], "host", np.arange(len(arena), dtype=np.int32)
    bucket = parts.pool.bucket(layer)
    if len(bucket):
        yield _pool_rows(parts, layer, index), "device", bucket


def _mixture(parts: Parts, layer: int) -> Iterator[Held]:
    """What a layer of a mixture of experts has for every token, then its experts, each wherever it lies."""
    spec, programs, weights = parts.prepared.spec, parts.prepared.programs, parts.stepper.weights
    assert isinstance(programs, MixturePrograms)
    stored, names = routing_parts(spec, layer), programs.routing_names[programs.kind(layer)]
    for name, leaf in zip(names, weights.routing[layer], strict=True):
        rounded = spec.routing_dtype(name, programs.shapes.dtype)
        yield Held(stored[name], layer, _values(leaf), rounded, "device", turned=name == "down")
    if layer not in spec.unit_layers:
        return
    number, rounded = spec.unit_layers.index(layer), parts.prepared.host_dtype
    slot_of = {int(unit): slot for slot, unit in enumerate(parts.pool.bucket(number))}
    for index, part in enumerate(unit_parts(spec)):
        slots = _pool_rows(parts, number, index).reshape(-1, spec.unit_rows, spec.hidden) if slot_of else ()
        for expert in range(spec.units):
            places = [(parts.store.arenas[number][expert, index], "host")] if parts.store.arenas else []
            places += [(slots[slot_of[expert]], "device")] if expert in slot_of else []
            for rows, where in places:
                yield Held(part, layer, rows, rounded, where, turned=part == "down", expert=expert)


def _pool_rows(parts: Parts, number: int, index: int) -> npt.NDArray:
    """One part of a layer's pool."""
    with parts.pool.lock:
        rows = _values(parts.pool.parts(number)[index])
    bits = parts.prepared.programs.shapes.dtype == "bfloat16"  # such pools are uint16
    return rows.view(ml_dtypes.bfloat16) if bits else rows


def _values(array: jax.Array) -> npt.NDArray:
    """The array's values in host memory; the array itself remembers no copy, which would last as long as it does."""
    return np.asarray(array.addressable_data(0))
