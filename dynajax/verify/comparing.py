"""The reference's answer, how far another one is from it, and how far it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.mapping import is_unit_part
from dynajax.checkpoint.reading import QUANTISED
from dynajax.checkpoint.spec import read_config
from dynajax.config import ModelSpec
from dynajax.reference import forward
from dynajax.verify.files import FromFile, OnStep

# What rounding may cost, by the coarsest type that weights or activations were rounded to: the largest error of a
# layer's FFN input and of the logits. Rounding itself is 2^-24, 2^-11 and 2^-8 of a value; measured on a CPU through
# models of 3 to 30 layers were errors up to 3e-6, 6e-3 and 3e-2, with a threshold (see `jumps`) 1.5e-2 and 6e-2.
TOLERANCES = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
ROUNDS_AS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"} | dict.fromkeys(QUANTISED, "bfloat16")
EXACT_AS = {"float32": frozenset(ROUNDS_AS), "float16": {"F16"}, "bfloat16": {"BF16"}}  # stored types it can hold
PER_WEIGHT_ERROR = 10  # an error of all weights grows so much on its way to the logits; 9 measured in 2 layers


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the reference computes for T tokens."""

    hidden: tuple[npt.NDArray[np.float32], ...]  # L arrays [T, D], the FFN's input
    logits: npt.NDArray[np.float64]  # [T, V]


def expected(checkpoint: Checkpoint, ids: Sequence[int], on_layer: OnStep) -> Expected:
    """The reference's answer; one tensor in memory at a time."""
    hidden: list[npt.NDArray[np.float32]] = []

    def watch(layer: int, h: npt.NDArray[np.float64]) -> None:
        hidden.append(h.astype(np.float32))
        on_layer(layer + 1, checkpoint.spec.layers)

    logits = forward(read_config(checkpoint.folder), FromFile(checkpoint), ids, watch)
    return Expected(tuple(hidden), logits)


def stored_types(checkpoint: Checkpoint) -> set[str]:
    """How the file spells the types of its tensors."""
    return {stored.dtype for stored in checkpoint.tensors.values()}


def host_types(checkpoint: Checkpoint) -> set[str]:
    """The same of the tensors that lie in host memory: units, and the tables of an untied embedding."""
    spec = checkpoint.spec
    tables = () if spec.tied else ("embed", "positions")
    return {
        stored.dtype for (part, _), stored in checkpoint.tensors.items() if is_unit_part(part, spec) or part in tables
    }


def allowed_error(
    dtype: str,  # of weights and activations on the device
    host_dtype: str,
    model: Checkpoint,
    reference: Checkpoint,  # the model itself, or another copy of its weights
    tolerance: float | None,  # relative error that every weight may have
) -> float:
    """The loosest of TOLERANCES among the types that round something between the file compared with and the logits.

    A host type that holds the file's values as they are rounds nothing. Two files may both be roundings of a third.
    """
    types = {dtype} if host_types(model) <= EXACT_AS[host_dtype] else {dtype, host_dtype}
    if reference is not model:
        types |= {ROUNDS_AS[kind] for kind in stored_types(model) | stored_types(reference)}
    return max(*(TOLERANCES[name] for name in types), PER_WEIGHT_ERROR * (tolerance or 0.0))


def jumps(spec: ModelSpec, allowed: float) -> bool:
    """Whether a rounded value may fall on the other side of a threshold, where the activation jumps, or choose another
    expert than the exact one.

    A neuron then has, or lacks, a threshold's worth, or a token goes elsewhere, and a position may be far off in one
    model of many correct ones: the middle position is judged instead of the worst. Without 16-bit types that is next to
    impossible.
    """
    return (spec.activation.threshold > 0 or spec.experts is not None) and allowed > TOLERANCES["float32"]


def hidden_errors(got: Sequence[npt.NDArray], wanted: Sequence[npt.NDArray], *, middle: bool) -> list[float]:
    """|got - wanted| / |wanted| of every layer [L], at the worst position or the middle one.

    Infinite if anything is not finite.
    """
    errors = []
    for a, b in zip(got, wanted, strict=True):
        far = np.linalg.norm(a.astype(np.float64) - b, axis=1)
        errors.append(_of_positions(far / _lengths(b), middle))
    return errors


def cosines(got: Sequence[npt.NDArray], wanted: Sequence[npt.NDArray]) -> list[float]:
    """The cosine of every layer [L], at the worst position; -1 if anything is not finite."""
    worst = []
    for a, b in zip(got, wanted, strict=True):
        with np.errstate(invalid="ignore"):
            cosine = (a.astype(np.float64) * b).sum(axis=1) / (_lengths(a) * _lengths(b))
        worst.append(float(np.nan_to_num(cosine, nan=-1.0).min()))
    return worst


def logits_error(got: npt.NDArray, wanted: npt.NDArray, *, middle: bool) -> float:
    """The largest difference at the worst position or the middle one, over the largest magnitude of all.

    Infinite if anything is not finite.
    """
    return _of_positions(np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(), middle)


def _lengths(rows: npt.NDArray) -> npt.NDArray[np.float64]:
    """The norm of every row, and next to nothing for a row of zeros."""
    return np.maximum(np.linalg.norm(rows.astype(np.float64), axis=1), 1e-30)


def _of_positions(errors: npt.NDArray, middle: bool) -> float:
    if not np.isfinite(errors).all():
        return float("inf")
    return float(np.median(errors) if middle else errors.max())
