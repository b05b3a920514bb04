"""What an open engine computes and holds, for comparison with a reference. Not for generating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.mapping import tensor_name, unit_parts
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
    hidden: list[list[Floats]] = [[] for _ in range(parts.prepared.spec.layers)]
    width, batch = parts.prepared.spec.hidden, parts.config.batch
    active = np.arange(batch) == 0

    def prompt(layer: int, h: Floats) -> None:
        hidden[layer].append(h[:, :width].copy())

    def row(layer: int, h: Floats) -> None:
        hidden[layer].append(h[:1, :width].copy())

    first = len(ids) - decoded
    runner, logits = parts.runner, []
    watched = isinstance(runner, ThreadsRunner)
    try:
        if watched:
            runner.watch = prompt
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


def weight_errors(parts: Parts, reference: Checkpoint) -> Iterator[tuple[int | None, str, float]]:
    """(layer, tensor, relative error) of every weight the engine holds, against the reference rounded to the same
    type; a unit counts where it lies, in host memory or in the pool. In order of layers, the ends last."""
    spec, shapes = parts.prepared.spec, parts.prepared.programs.shapes
    units = np.empty((spec.ffn, spec.ffn_parts, 1, spec.unit_width), ml_dtype(parts.prepared.host_dtype))
    for layer in range(spec.layers):
        wanted = reference.attention(layer, shapes.dtype)
        for name, leaf in zip(parts.prepared.programs.leaf_names, parts.stepper.weights.layers[layer], strict=True):
            yield layer, tensor_name(name, spec, layer), relative_error(np.asarray(leaf), wanted[name])
        reference.fill_bundle(layer, units)
        for index, part in enumerate(unit_parts(spec)):
            yield layer, tensor_name(part, spec, layer), _unit_error(parts, layer, index, units[:, index, 0])
    weights = parts.stepper.weights
    for part, held, wanted in zip(("norm", "norm_bias"), weights.norm, reference.norm(shapes.dtype), strict=False):
        yield None, tensor_name(part, spec), relative_error(np.asarray(held), wanted)
    dtype = shapes.dtype if spec.tied else parts.prepared.host_dtype
    embed = np.asarray(weights.tables[0]) if spec.tied else weights.host_tables[0]
    yield None, tensor_name("embed", spec), relative_error(embed, reference.embed(dtype))
    if (head := reference.head(shapes.dtype)) is not None:
        yield None, tensor_name("head", spec), relative_error(np.asarray(weights.table), head)
    if (learned := reference.positions(dtype)) is not None:
        held = np.asarray(weights.tables[1]) if spec.tied else weights.host_tables[1]
        yield None, tensor_name("positions", spec), relative_error(held, learned)


def _unit_error(parts: Parts, layer: int, index: int, wanted: npt.NDArray) -> float:
    """The larger error of a part's rows [F, W] in host memory and in the pool."""
    errors = [0.0]
    if parts.store.arenas:
        errors.append(relative_error(parts.store.arenas[layer][:, index, 0], wanted))
    bucket = parts.pool.bucket(layer)
    if len(bucket):
        dtype = parts.prepared.programs.shapes.dtype
        with parts.pool.lock:
            rows = np.asarray(jax.device_get(parts.pool.parts(layer)[index])).view(ml_dtype(dtype))
        errors.append(relative_error(rows, wanted[bucket].astype(ml_dtype(dtype))))
    return max(errors)


def ml_dtype(name: str) -> np.dtype:
    """float32, float16 or bfloat16 -> the NumPy type."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def relative_error(held: npt.NDArray, wanted: npt.NDArray) -> float:
    """|held - wanted| / |wanted|, both as long vectors; 0 where the bits are equal."""
    if np.array_equal(held, wanted):
        return 0.0
    difference = held.astype(np.float32) - wanted.astype(np.float32)
    length = float(np.linalg.norm(wanted.astype(np.float32)))
    error = float(np.linalg.norm(difference)) / (length or 1.0)
    return error if np.isfinite(error) else float("inf")
