"""Live sets and lead-1 scores of a model over text, or over made-up ids: what `placement.py` replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from benchmarks.layers import Layers, layers_of
from benchmarks.make_checkpoint import topic_ids
from dynajax.checkpoint import Checkpoint
from dynajax.cli.prompts import prompt_ids
from dynajax.config import ModelSpec
from dynajax.models.decoder import Decoder, Ffn
from dynajax.testing import load_decoder
from predictors.calibration import top_mask
from predictors.forms import Form, Shape
from predictors.gate import GateSource, gate_params, gate_scores

TOKENS = 256  # a document of text
OTHER_SEEDS = 1000  # where the seeds of documents for statistics start
BATCH_TOKENS = 2048  # in one forward
PULL = 5.0  # tokens that a neuron's own calibration curve has to outweigh
NEWTON_STEPS = 10

F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Run = Callable[[npt.NDArray], Layers]
Predict = Callable[[int, F32], F32]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What the replay needs: the test documents, and statistics from other text."""

    live: Bools  # [docs, T, L, F]
    score: npt.NDArray[np.uint8]  # [docs, T, L, F] probabilities x 255, predicted a layer ahead; 0 in layer 0
    frequency: F32  # [L, F] share of the other text's tokens
    mass: F32  # [L, F] mean |act| x |down row| where live, mean 1 a layer


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a forward over documents shows; lists over layers."""

    streams: list[F32]  # [docs, T, D]
    live: list[Bools]  # [docs, T, F]
    mass: F32  # [L, F] as in a Trace


def documents(ids: Mapping[str, npt.NDArray[np.integer]], count: int) -> tuple[npt.NDArray, npt.NDArray]:
    """(test [count, T], other [n, T]): windows of all sources, every second one for the test, spread evenly."""
    windows = [rows[i : i + TOKENS] for rows in ids.values() for i in range(0, len(rows) - TOKENS + 1, TOKENS)]
    odd, even = windows[1::2], windows[::2]
    chosen = np.linspace(0, len(odd) - 1, min(count, len(odd))).astype(int)
    return np.stack([odd[i] for i in chosen]).astype(np.int32), np.stack(even).astype(np.int32)


def made_up(source: str, spec: ModelSpec, count: int, others: int) -> tuple[npt.NDArray, npt.NDArray]:
    """(test, other) of `count` and `others` documents: `topics:N` and `random:N` as `--prompt-ids` makes them, with
    other seeds; `topic:N` keeps to one topic a document, as the tokens do that synthetic weights are calibrated with.
    """
    seeds = range(count), range(OTHER_SEEDS, OTHER_SEEDS + others)
    if source.startswith("topic:"):
        tokens = int(source.removeprefix("topic:"))
        draws = [[topic_ids(np.random.default_rng(seed), 1, tokens, spec.vocab)[0] for seed in half] for half in seeds]
    else:
        draws = [[prompt_ids(source, spec, seed) for seed in half] for half in seeds]
    return np.stack(draws[0]).astype(np.int32), np.stack(draws[1]).astype(np.int32)


def record(
    folder: Path, test: npt.NDArray, other: npt.NDArray, bits: Sequence[int], density: float | None
) -> dict[int, Trace]:
    """Run the model over both; residual, calibration and frequencies come from `other`.

    bits: of the gates that predict; -> a trace for each. density: the share of a layer's neurons that counts as live,
    those with the largest |act| x |down row|; None: those whose activation is not zero.
    """
    model = load_decoder(Checkpoint.open(folder))
    if density is None and not model.spec.activation.has_zeros:
        raise ValueError(f"density must be given, {model.spec.activation.kind} has no zeros")
    down = np.stack([np.linalg.norm(_array(_neurons(model, layer).down), axis=1) for layer in range(model.spec.layers)])
    sources = [source_of(model, layer, row) for layer, row in enumerate(down)]
    run = layers_of(model)
    seen = see(run, down, other, density)
    residual = [np.zeros(model.spec.hidden, np.float32)]
    residual += [(b - a).mean(axis=(0, 1)) for a, b in pairwise(seen.streams)]
    predicts = {count: predictor(Shape.of(model.spec), sources, residual, count) for count in bits}
    curves = {
        count: [calibrate(predict(i, seen.streams[i - 1]), seen.live[i]) for i in range(1, model.spec.layers)]
        for count, predict in predicts.items()
    }
    frequency = np.stack([part.mean(axis=(0, 1), dtype=np.float32) for part in seen.live])
    mass, seen = seen.mass, see(run, down, test, density)
    live = np.stack(seen.live, axis=2)
    return {
        count: Trace(live, score(predict, curves[count], seen.streams), frequency, mass)
        for count, predict in predicts.items()
    }


def score(predict: Predict, curves: list[tuple[F32, F32]], streams: list[F32]) -> npt.NDArray[np.uint8]:
    """[docs, T, L, F] from the streams of all layers and the curves of layers >= 1."""
    found = []
    for i, (slope, shift) in enumerate(curves, start=1):
        p = 1 / (1 + np.exp(-(slope * predict(i, streams[i - 1]) + shift)))
        found.append(np.rint(255 * p).astype(np.uint8))
    return np.stack([np.zeros_like(found[0]), *found], axis=2)


def source_of(model: Decoder, layer: int, down_norm: F32) -> GateSource:
    """What predictors need of a layer's weights."""
    ffn, norm = _neurons(model, layer), model.attention[layer].ffn_norm
    if ffn.gate is None or norm is None:
        raise ValueError("only gated models with a norm before each FFN can be recorded")
    rows = [ffn.gate, ffn.up][: Shape.of(model.spec).matrices]
    return GateSource(rows=tuple(_array(row) for row in rows), norm=_array(norm), down_norm=down_norm)


def _neurons(model: Decoder, layer: int) -> Ffn:
    ffn = model.ffn[layer]
    assert isinstance(ffn, Ffn), "a mixture of experts has no neurons to record"
    return ffn


def _array(weight: nnx.Param) -> F32:
    return np.asarray(weight[...], np.float32)


def see(run: Run, down: F32, ids: npt.NDArray, density: float | None) -> Seen:
    """Streams, live sets and masses of documents ids [docs, T], a few at a time. down [L, F]: norms of down rows."""
    streams: list[list[F32]] = [[] for _ in down]
    live: list[list[Bools]] = [[] for _ in down]
    total, count = np.zeros(down.shape), np.zeros(down.shape)
    step = max(1, BATCH_TOKENS // ids.shape[1])
    for at in range(0, len(ids), step):
        layers = run(ids[at : at + step])
        for i, row in enumerate(down):
            weight = np.abs(np.asarray(layers.values[i])) * row
            marks = np.asarray(layers.live[i])
            if density is not None:
                marks = top_mask(weight.reshape(-1, len(row)), density).reshape(marks.shape)
            streams[i].append(np.asarray(layers.streams[i]))
            live[i].append(marks)
            total[i] += (weight * marks).sum(axis=(0, 1))
            count[i] += marks.sum(axis=(0, 1))
    mass = total / np.maximum(count, 1)
    mass = (mass / mass.mean(axis=1, keepdims=True)).astype(np.float32)
    return Seen([np.concatenate(parts) for parts in streams], [np.concatenate(parts) for parts in live], mass)


def predictor(shape: Shape, sources: list[GateSource], residual: list[F32], bits: int) -> Predict:
    """(layer, stream before it [..., D]) -> raw scores [..., F] of its low-bit gate on stream + residual."""
    form = Form(kind="gate", bits=bits, weighted=shape.activation.kind == "silu").at(1)
    scores = jax.jit(partial(gate_scores, shape=shape, form=form))

    def predict(layer: int, before: F32) -> F32:
        params = gate_params(shape, form, sources[layer], trained={"shift": residual[layer]})
        found = scores(params, before.reshape(-1, shape.hidden))
        return np.asarray(found).reshape(*before.shape[:-1], shape.ffn)

    return predict


def calibrate(z: F32, live: Bools) -> tuple[F32, F32]:
    """(a, b), each [F], such that sigmoid(a z + b) is how often a neuron with score z is live (Platt scaling).

    One curve for the layer first, from a share of the sample; then one for each neuron, drawn towards it.
    """
    z, live = z.reshape(-1, z.shape[-1]), live.reshape(-1, live.shape[-1])
    centre, scale = z.mean(), 1 / z.std()
    unit, some = (z - centre) * scale, slice(0, None, 16)
    shared = _logistic(unit[some].reshape(-1, 1), live[some].reshape(-1, 1), np.array([1.0, -1.0], np.float32), 0.0)
    slope, shift = np.asarray(_logistic(unit, live, shared[:, 0], PULL))
    return slope * scale, shift - slope * scale * centre


@partial(jax.jit, static_argnames="pull")
def _logistic(z: jax.Array, live: jax.Array, start: jax.Array, pull: float) -> jax.Array:
    """Newton's method for every column of z [n, columns] at once -> (slopes, shifts) [2, columns].

    `pull`: observations' worth of staying at `start`. Steps are cut, so that a column that separates stays finite.
    """

    def step(_: int, point: jax.Array) -> jax.Array:
        p = jax.nn.sigmoid(point[0][None, :] * z + point[1][None, :])
        weight, missing = p * (1 - p), live - p
        pulled = pull * (point - start[:, None])
        up, right = (missing * z).sum(0) - pulled[0], missing.sum(0) - pulled[1]
        aa, ab, bb = (weight * z * z).sum(0) + pull, (weight * z).sum(0), weight.sum(0) + pull
        det = aa * bb - ab * ab
        moved = (bb * up - ab * right) / det, (aa * right - ab * up) / det
        return point + jnp.stack([jnp.clip(moved[0], -0.5, 0.5), jnp.clip(moved[1], -1, 1)])

    return jax.lax.fori_loop(0, NEWTON_STEPS, step, jnp.broadcast_to(start[:, None], (2, z.shape[1])))
