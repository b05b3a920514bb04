"""Which weights that an engine holds are not those of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.mapping import expert_part
from dynajax.checkpoint.reading import QUANTISED, numpy_dtype
from dynajax.checkpoint.shards import Stored
from dynajax.engine.opening import Parts
from dynajax.engine.probe import Held, held_weights
from dynajax.verify.files import read_tensor

ROUND_OFF = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8, "float32": 2.0**-24}  # relative, half a last digit
ROUND_OFF |= {"float16": ROUND_OFF["F16"], "bfloat16": ROUND_OFF["BF16"]}
HALF_SUBNORMAL = 2.0**-24  # float16's numbers end there
FLUSHED = float(np.finfo(np.float32).tiny)  # XLA may take what is smaller for zero
QUANTISED_TOLERANCE = 0.02  # Q8_0 costs 0.7 %
UNEVEN = 64  # times the usual difference: the largest that quantisation makes in a tensor; 36 measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that is off, in one of the places where it lies."""

    tensor: str  # as the model's file names it
    layer: int | None
    where: str  # device or host
    values: int  # how many are off
    of: int
    error: float  # |held - wanted| / |wanted|, over all values; infinite if one is not finite


def differences(parts: Parts, model: Checkpoint, reference: Checkpoint, tolerance: float | None) -> list[Difference]:
    """What is off among the weights of an engine of `model`, layer by layer; see `differing`."""
    found = []
    for held, wanted in _pairs(parts, reference):
        mine, theirs = stored_of(model, held), stored_of(reference, held)
        relative, absolute = slack(mine.dtype, theirs.dtype, held.rounded)
        limit = tolerance
        if limit is None and model is not reference and {mine.dtype, theirs.dtype} & set(QUANTISED):
            limit = QUANTISED_TOLERANCE
        with np.errstate(over="ignore"):
            rounded = wanted.astype(numpy_dtype(held.rounded))
        off, error = differing(held.values, rounded, relative, absolute, limit)
        if off:
            where = {"tensor": mine.name, "layer": held.layer, "where": held.where}
            found.append(Difference(**where, values=off, of=rounded.size, error=error))
    return found


def _pairs(parts: Parts, reference: Checkpoint) -> Iterator[tuple[Held, npt.NDArray[np.float32]]]:
    """What the engine holds and what the file says of it, in the same order; each tensor is read once."""
    key, tensor = None, np.empty(0, np.float32)
    for held in held_weights(parts):
        if key != (held.part, held.layer, held.expert):
            key = held.part, held.layer, held.expert
            tensor = read_tensor(stored_of(reference, held))
        wanted = tensor.T if held.turned else tensor[held.first :]
        yield held, wanted if held.units is None else wanted[held.units]


def stored_of(checkpoint: Checkpoint, held: Held) -> Stored:
    """Where the file has it; of an expert its own tensor, or its piece of a layer's, which is named by its number."""
    if held.expert is None:
        return checkpoint.tensors[held.part, held.layer]
    alone = checkpoint.tensors.get((expert_part(held.part, held.expert), held.layer))
    if alone is not None:
        return alone
    shape = checkpoint.spec.unit_rows, checkpoint.spec.hidden
    if held.part == "down":
        return checkpoint.tensors["experts_down", held.layer].piece(held.expert, shape[::-1])
    both = checkpoint.tensors["experts_gate_up", held.layer]
    piece = both.piece(2 * held.expert + (held.part == "up"), shape)
    return replace(piece, name=f"{both.name}[{held.expert}].{held.part}")


def slack(mine: str, theirs: str, rounded: str) -> tuple[float, float]:
    """By how much a value may differ: relative to it, and at least.

    Files of equal types hold the same values, and an engine rounds them to the same bits. Files of different types may
    both be roundings of a third, each by half a last digit of its type at most; what the engine then holds is rounded
    on both sides once more. Twice the sum is allowed. Quantised values are float32 numbers here.
    """
    if mine == theirs:
        return 0.0, FLUSHED
    kinds = [mine, theirs, rounded]
    relative = 2 * sum(ROUND_OFF.get(kind, ROUND_OFF["F32"]) for kind in kinds)
    return relative, 2 * HALF_SUBNORMAL if {"F16", "float16"} & set(kinds) else FLUSHED


def differing(
    held: npt.NDArray, wanted: npt.NDArray, relative: float, absolute: float, tolerance: float | None
) -> tuple[int, float]:
    """How many values differ by more than `relative` |wanted| + `absolute`, and the error of the whole tensor.

    Rounding is relative to each value, so each is looked at: one flipped bit of an exponent in a large tensor changes
    its norm by next to nothing. With a tolerance, as between a file and its quantised copy, differences beyond rounding
    are forgiven, (0, 0), if the error of the whole is within it and no difference is more than UNEVEN times the root
    mean square of all: quantisation spreads evenly, damage does not. So a single wrong value of n is found if it is off
    by more than UNEVEN usual differences, and n is at least their number squared, 4096.
    """
    if np.array_equal(held, wanted):
        return 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is off
        truth = wanted.astype(np.float32)
        difference = np.abs(held.astype(np.float32) - truth)
        off = int(np.count_nonzero(~(difference <= relative * np.abs(truth) + absolute)))
        if not off:
            return 0, 0.0
        length = _length(difference)
        error = length / (_length(truth) or 1.0)
        even = float(difference.max()) <= UNEVEN * length / difference.size**0.5
    if tolerance is not None and error <= tolerance and even:
        return 0, 0.0
    return off, error if np.isfinite(error) else float("inf")


def _length(values: npt.NDArray[np.float32]) -> float:
    """The norm, added up in float64, where no square of a float32 overflows, and without a copy."""
    flat = values.ravel()
    return float(np.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64)))
