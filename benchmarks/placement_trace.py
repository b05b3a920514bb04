"""Live sets and lead-1 scores of a model over text: what `placement.py` replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from benchmarks.layers import Layers, layers_of
from dynajax.checkpoint import Checkpoint
from dynajax.models.decoder import Decoder
from dynajax.testing import load_decoder
from predictors.lowbit import dequantise, quantise

TOKENS = 256  # a document
BATCH = 8
PULL = 5.0  # tokens that a neuron's own calibration curve has to outweigh
NEWTON_STEPS = 10

F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Run = Callable[[npt.NDArray], Layers]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What the replay needs: the test documents, and statistics from other text."""

    live: Bools  # [docs, T, L, F]
    score: npt.NDArray[np.uint8]  # [docs, T, L, F] probabilities x 255, predicted a layer ahead; 0 in layer 0
    frequency: F32  # [L, F] share of the other text's tokens
    mass: F32  # [L, F] mean |act| x |down row| where live, mean 1 a layer


def documents(ids: Mapping[str, npt.NDArray[np.integer]], count: int) -> tuple[npt.NDArray, npt.NDArray]:
    """(test [count, T], other [n, T]): windows of all sources, every second one for the test, spread evenly."""
    windows = [rows[i : i + TOKENS] for rows in ids.values() for i in range(0, len(rows) - TOKENS + 1, TOKENS)]
    odd, even = windows[1::2], windows[::2]
    chosen = np.linspace(0, len(odd) - 1, min(count, len(odd))).astype(int)
    return np.stack([odd[i] for i in chosen]).astype(np.int32), np.stack(even).astype(np.int32)


def record(folder: Path, ids: Mapping[str, npt.NDArray[np.integer]], count: int) -> Trace:
    """Run the model over both halves; residual, calibration and frequencies come from the other half."""
    model = load_decoder(Checkpoint.open(folder))
    if model.spec.activation.kind != "relu":
        raise ValueError(f"live sets are those of relu, the model has {model.spec.activation.kind}")
    test, other = documents(ids, count)
    run = layers_of(model)
    stream, parts = _stacked(run, other)
    live = np.stack(parts, axis=2)
    residual = [np.zeros(stream[0].shape[-1], np.float32)]
    residual += [(b - a).mean(axis=(0, 1)) for a, b in pairwise(stream)]
    predict = _one_bit(model, residual)
    curves = [calibrate(predict(i, stream[i - 1]), live[:, :, i]) for i in range(1, len(stream))]
    mass = _masses(model, run, other)
    frequency = live.mean(axis=(0, 1)).astype(np.float32)
    del stream, parts, live
    stream, parts = _stacked(run, test)
    live = np.stack(parts, axis=2)
    score = np.zeros(live.shape, np.uint8)
    for i, (slope, shift) in enumerate(curves, start=1):
        score[:, :, i] = np.rint(255 / (1 + np.exp(-(slope * predict(i, stream[i - 1]) + shift))))
    return Trace(live, score, frequency, mass)


def _stacked(run: Run, ids: npt.NDArray) -> tuple[list[F32], list[Bools]]:
    """Streams [docs, T, D] and live sets [docs, T, F], lists over layers."""
    found = [run(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]
    parts = [jax.device_get((layers.streams, layers.live)) for layers in found]
    streams, live = zip(*parts, strict=True)
    return (
        [np.concatenate(layer) for layer in zip(*streams, strict=True)],
        [np.concatenate(layer) for layer in zip(*live, strict=True)],
    )


def _masses(model: Decoder, run: Run, ids: npt.NDArray) -> F32:
    """E |act| x |down row| of a neuron over the tokens where it is live, scaled to mean 1 in each layer."""
    total, count = 0.0, 0.0
    for i in range(0, len(ids), BATCH):
        layers = run(ids[i : i + BATCH])
        total = total + np.stack([np.abs(values).sum(axis=(0, 1)) for values in layers.values])
        count = count + np.stack([np.asarray(live).sum(axis=(0, 1)) for live in layers.live])
    rows = np.stack([np.linalg.norm(_array(ffn.down), axis=1) for ffn in model.ffn])
    mass = total / np.maximum(count, 1) * rows
    return (mass / mass.mean(axis=1, keepdims=True)).astype(np.float32)


def _array(weight: nnx.Param | None) -> F32:
    if weight is None:
        raise ValueError("only gated models with a norm before each FFN can be recorded")
    return np.asarray(weight[...], np.float32)


def _one_bit(model: Decoder, residual: list[F32]):
    """(layer, stream before it [..., D]) -> logits [..., F]: the gate as signs times group means, on h + residual."""
    spec = model.spec

    def predict(layer: int, before: F32) -> F32:
        gate = dequantise(quantise(_array(model.ffn[layer].gate), 1))
        x = before + residual[layer]
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + spec.norm_eps)
        x = x * _array(model.attention[layer].ffn_norm)
        return (x @ gate.T).astype(np.float32)

    return predict


def calibrate(z: F32, live: Bools) -> tuple[F32, F32]:
    """(a, b), each [F], such that sigmoid(a z + b) is how often a neuron with logit z is live (Platt scaling).

    One curve for the layer first, from a share of the sample; then one for each neuron, drawn towards it.
    """
    z, live = z.reshape(-1, z.shape[-1]), live.reshape(-1, live.shape[-1])
    some = slice(0, None, 16)
    start = np.array([1 / z.std()]), np.array([-1.0])
    shared = _logistic(z[some].reshape(-1, 1), live[some].reshape(-1, 1), start, 0.0)
    return _logistic(z, live, shared, PULL)


def _logistic(z: F32, live: Bools, start: tuple[npt.NDArray, npt.NDArray], pull: float) -> tuple[F32, F32]:
    """Newton's method for every column of z [n, columns] at once; `pull` observations' worth of staying at `start`."""
    columns, scale = z.shape[1], np.float32(start[0][0])
    slope, shift = np.ones(columns), np.full(columns, float(start[1][0]))
    z = z * scale  # so that a slope of 1 is where it starts
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-(slope.astype(np.float32) * z + shift.astype(np.float32))))
        weight, missing = p * (1 - p), live - p
        grad = (missing * z).sum(0) - pull * (slope - 1), missing.sum(0) - pull * (shift - float(start[1][0]))
        aa, ab, bb = (weight * z * z).sum(0) + pull, (weight * z).sum(0), weight.sum(0) + pull
        det = aa * bb - ab * ab
        slope = slope + np.clip((bb * grad[0] - ab * grad[1]) / det, -0.5, 0.5)
        shift = shift + np.clip((aa * grad[1] - ab * grad[0]) / det, -1, 1)
    return (slope * scale).astype(np.float32), shift.astype(np.float32)
