"""What a trained model is like: loss on text it never saw, how sparse its layers are, what its FFNs are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

from dynajax.config import ModelSpec
from dynajax.models.decoder import Decoder, MixtureFfn
from dynajax.ops.routing import spread

WINDOW = 256  # tokens; windows do not overlap, and the first token of each is not predicted
BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSparsity:
    """One layer's neurons over all measured tokens; live: relu(gate) > 0."""

    active: float  # mean share of neurons that are live for a token
    dead: float  # share of neurons that are live for no token
    top40_covers: float  # share of all activations that the most frequent 40 % of the neurons make
    jaccard_distance: float  # 1 - |A and B| / |A or B| of the live sets of adjacent tokens, mean


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer's experts over all measured tokens; a load is a share of all choices."""

    least: float  # load of the least used expert
    most: float
    repeated: float  # share of a token's experts that the token before had too
    gate_reuse: float | None  # share that this layer's router finds from the layer before's input; None: the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The figures of a model card; losses in nats per token, the mean is over sources."""

    tokens: int
    loss: dict[str, float]
    loss_mean: float
    loss_without_ffn: float  # mean over sources with the FFNs of layers >= 1 removed
    layers: list[LayerSparsity]  # of neurons
    loads: list[LayerLoad]  # of experts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(model: Decoder, texts: Mapping[str, npt.NDArray[np.integer]]) -> Measurements:
    """texts: token ids [T] by source."""
    spec = model.spec
    layers, width = spec.layers, spec.units
    evaluate = _evaluator(model)
    keep_all = np.ones(layers, np.float32)
    keep_first = np.array([1.0] + [0.0] * (layers - 1), np.float32)
    loss, without = {}, {}
    counts, tokens = np.zeros((layers, width), np.int64), 0
    distances, reused = np.zeros(layers, np.float64), np.zeros(layers, np.float64)
    for name, ids in texts.items():
        batches = _windows(ids)
        weights = [len(batch) for batch in batches]
        seen = [evaluate(batch, keep_all) for batch in batches]
        loss[name] = float(np.average([s["loss"] for s in seen], weights=weights))
        without[name] = float(np.average([evaluate(b, keep_first)["loss"] for b in batches], weights=weights))
        counts += np.sum([s["live"] for s in seen], axis=0, dtype=np.int64)
        distances += np.sum([s["jaccard"] * len(b) for s, b in zip(seen, batches, strict=True)], axis=0)
        reused += np.sum([s["reused"] * len(b) for s, b in zip(seen, batches, strict=True)], axis=0)
        tokens += sum(batch[:, :-1].size for batch in batches)
    distances, reused = distances / (tokens / WINDOW), reused / (tokens / WINDOW)
    rows = range(layers)
    return Measurements(
        tokens=tokens,
        loss=loss,
        loss_mean=float(np.mean(list(loss.values()))),
        loss_without_ffn=float(np.mean(list(without.values()))),
        layers=[] if spec.experts else [_layer(counts[i], tokens, float(distances[i])) for i in rows],
        loads=[_load(counts[i], float(distances[i]), float(reused[i]) if i else None) for i in rows]
        if spec.experts
        else [],
    )


def frequencies(model: Decoder, ids: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.float32], int]:
    """Share of tokens for which each neuron is live [L, F], and how many tokens were seen."""
    evaluate = _evaluator(model)
    batches = _windows(ids)
    keep = np.ones(model.spec.layers, np.float32)
    counts = sum(evaluate(batch, keep)["live"].astype(np.int64) for batch in batches)
    tokens = sum(batch[:, :-1].size for batch in batches)
    return np.asarray(counts / tokens, np.float32), tokens


def _evaluator(model: Decoder):
    """A jitted (tokens [B, WINDOW + 1], keep [L]) -> loss, live counts [L, F], mean Jaccard distance [L]."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, keep):
        whole = nnx.merge(graphdef, state)
        logits, gates = whole(tokens[:, :-1], keep)
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        live = [_live(model.spec, gate) for gate in gates]
        counts = jnp.stack([jnp.sum(a, axis=(0, 1), dtype=jnp.int32) for a in live])
        measured = {"loss": loss, "live": counts, "jaccard": jnp.stack([_adjacent_distance(a) for a in live])}
        return measured | {"reused": _reused(whole, tokens[:, :-1], live)}

    return lambda tokens, keep: jax.device_get(run(state, tokens, keep))


def _live(spec: ModelSpec, gate: jax.Array) -> jax.Array:
    """Which units a token uses [B, T, units], of what its activation or its router says of them."""
    if spec.experts is None:
        return gate > 0
    flat = gate.reshape(-1, gate.shape[-1])
    _, ids = jax.lax.top_k(flat, spec.experts.router.top_k)
    return (spread(ids, jnp.ones(ids.shape, jnp.float32), spec.units) > 0).reshape(gate.shape)


def _reused(model: Decoder, tokens: jax.Array, live: list[jax.Array]) -> jax.Array:
    """[L] the share of each layer's experts that its router names when it reads the layer before's input; of the first
    and of neurons 0."""
    if model.spec.experts is None:
        return jnp.zeros(model.spec.layers)
    inputs, shares = model.ffn_inputs(tokens), [jnp.float32(0)]
    for before, ffn, truth in zip(inputs, list(model.ffn)[1:], live[1:], strict=False):
        assert isinstance(ffn, MixtureFfn)
        guess = _live(model.spec, ffn.block.logits(before))
        shares.append(jnp.sum(guess & truth, dtype=jnp.int32) / jnp.sum(truth, dtype=jnp.int32))
    return jnp.stack(shares)


def _adjacent_distance(live: jax.Array) -> jax.Array:
    """Mean Jaccard distance between neighbours along T of live [B, T, F]; two empty sets are equal."""
    before, after = live[:, :-1], live[:, 1:]
    both = jnp.sum(before & after, axis=-1, dtype=jnp.int32)
    either = jnp.sum(before | after, axis=-1, dtype=jnp.int32)
    return jnp.mean(jnp.where(either > 0, 1 - both / jnp.maximum(either, 1), 0.0))


def _windows(ids: npt.NDArray[np.integer]) -> list[npt.NDArray[np.int32]]:
    """[n, WINDOW + 1] batches of at most BATCH rows, neighbours sharing one token; a short tail is left out."""
    count = (len(ids) - 1) // WINDOW
    if count < 1:
        raise ValueError(f"a text must have more than {WINDOW} tokens to be measured, got {len(ids)}")
    rows = np.stack([ids[i * WINDOW : (i + 1) * WINDOW + 1] for i in range(count)]).astype(np.int32)
    return [rows[i : i + BATCH] for i in range(0, count, BATCH)]


def _load(counts: npt.NDArray[np.int64], distance: float, reused: float | None) -> LayerLoad:
    share = counts / counts.sum()
    overlap = 2 * (1 - distance) / (2 - distance)  # of two sets of one size, from their Jaccard distance
    return LayerLoad(least=float(share.min()), most=float(share.max()), repeated=overlap, gate_reuse=reused)


def _layer(counts: npt.NDArray[np.int64], tokens: int, distance: float) -> LayerSparsity:
    ordered = np.sort(counts)[::-1]
    return LayerSparsity(
        active=float(counts.sum() / (tokens * len(counts))),
        dead=float(np.mean(counts == 0)),
        top40_covers=float(ordered[: int(0.4 * len(counts))].sum() / max(1, counts.sum())),
        jaccard_distance=distance,
    )
