"""A random ReLU-sparse model, drawn layer by layer on the device and kept in host memory: no file of weights.

The construction is that of `benchmarks.make_checkpoint`, whose docstring explains it. The folder gets what an engine
looks for beside weights: config.json, statistics and predictors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.make_checkpoint import (
    GAIN,
    ROWS,
    THETA,
    TOKENS,
    TOPICS,
    Recipe,
    config_of,
    firing_probabilities,
    topic_ids,
)
from dynajax.bundles import HostStore, allocate_arena, arena_shape
from dynajax.checkpoint import write_stats
from dynajax.config import GROUP, PACKED_BITS, ModelSpec, is_packed
from dynajax.quant import CLIPS, ZERO, stored_as
from predictors.folder import Manifest, write_predictors
from predictors.forms import Entry, Form

LEADS = (0, 1)  # of the predictors
HIGHEST = jax.lax.Precision.HIGHEST


class Layer(NamedTuple):
    """What is drawn of one layer."""

    attention: dict[str, jax.Array]
    units: jax.Array  # [F, P, 1, D], or packed
    predictor: dict[str, jax.Array]  # fc1 [R, D], fc2 [F, R]
    frequency: jax.Array  # [F]
    x: jax.Array  # [B, T, D] the calibration's stream behind the layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """The verbs of a `Checkpoint` that opening an engine needs beside a store of units."""

    folder: Path
    spec: ModelSpec
    dtype: str  # of all that the engine holds
    recipe: Recipe
    store: HostStore
    layers: list[dict[str, npt.NDArray]]
    tables: dict[str, npt.NDArray]  # embed and head

    def fingerprint(self) -> str:
        """Of how it was drawn."""
        return hashlib.sha256(repr((self.spec, self.recipe, self.dtype)).encode()).hexdigest()

    def embed(self, dtype: str) -> npt.NDArray:
        """See `Checkpoint`; so for all below."""
        return self.tables["embed"].astype(dtype, copy=False)

    def positions(self, dtype: str) -> None:
        return None

    def head(self, dtype: str) -> npt.NDArray:
        return self.tables["head"]

    def norm(self, dtype: str) -> tuple[npt.NDArray, ...]:
        return (np.ones(self.spec.hidden, np.float32 if is_packed(dtype) else dtype),)

    def attention(self, layer: int, dtype: str) -> dict[str, npt.NDArray]:
        return dict(self.layers[layer])


def draw(folder: Path, spec: ModelSpec, dtype: str, recipe: Recipe, *, predictors: bool) -> Drawn:
    """The whole model, in the type an engine will hold it in; the folder must be empty."""
    (folder / "config.json").write_text(json.dumps(config_of(spec, recipe), indent=1), encoding="utf-8")
    ids = topic_ids(np.random.default_rng(recipe.seed), ROWS, TOKENS, spec.vocab)
    keys = jax.random.split(jax.random.key(recipe.seed), spec.layers + 1)
    embed, head = draw_tables(keys[-1], spec=spec)
    x = embed[ids].astype(jnp.float32)
    probabilities = jnp.asarray(firing_probabilities(spec.ffn, recipe), jnp.float32)
    arenas, layers, known, frequency = [], [], {}, []
    for number in range(spec.layers):
        layer = draw_layer(keys[number], x, probabilities, spec=spec, recipe=recipe, dtype=dtype)
        x = layer.x
        arenas.append(allocate_arena(*stored_as(arena_shape(spec), dtype)))
        arenas[-1][:] = np.asarray(layer.units)
        layers.append({name: np.asarray(part) for name, part in layer.attention.items()})
        frequency.append(np.asarray(layer.frequency))
        if predictors:
            known[number] = {name: np.asarray(part) for name, part in layer.predictor.items()}
    if not np.isfinite(np.asarray(x)).all():
        raise RuntimeError("the stream of the drawn model is not finite: its recipe has to change")
    tables = {"embed": np.asarray(embed), "head": np.asarray(as_held(head.astype(jnp.float32), dtype))}
    drawn = Drawn(folder=folder, spec=spec, dtype=dtype, recipe=recipe, store=HostStore(arenas), layers=layers,
                  tables=tables)  # fmt: skip
    stats = {"frequency": np.stack(frequency), "tokens": ROWS * TOKENS}
    write_stats(folder / "activations.npz", fingerprint=drawn.fingerprint(), **stats)
    if predictors:
        keep_predictors(drawn, known)
    return drawn


def keep_predictors(drawn: Drawn, known: dict[int, dict[str, npt.NDArray]]) -> None:
    """A folder of predictors beside config.json. Those of lead 1 are the same, asked a layer earlier."""
    spec = drawn.spec
    entries = tuple(
        Entry(layer=layer, lead=lead, form=Form(kind="mlp", rank=len(known[layer]["fc1"]), reads="stream"))
        for lead in LEADS
        for layer in range(lead, spec.layers)
    )
    manifest = Manifest(
        fingerprint=drawn.fingerprint(),
        layers=spec.layers,
        hidden=spec.hidden,
        ffn=spec.ffn,
        ranks=(),
        dtype="float16",
        source="drawn with the model",
        kind="mixed",
        entries=entries,
    )
    even = np.full(256, 1 / 256, np.float32)
    write_predictors(
        drawn.folder / "predictors",
        manifest,
        {entry.key: {**known[entry.layer], "histogram": even} for entry in entries},
    )


@partial(jax.jit, static_argnames="spec")
def draw_tables(key: jax.Array, *, spec: ModelSpec) -> tuple[jax.Array, jax.Array]:
    """Embeddings (bias, topic and token, of RMS 0.5 together) and head, float16 [V, D]."""
    keys = jax.random.split(key, 3)
    topics = jax.random.normal(keys[0], (TOPICS, spec.hidden))
    topics = (topics / jnp.linalg.norm(topics, axis=1, keepdims=True))[jnp.arange(spec.vocab) % TOPICS]
    tokens = without_bias(jax.random.normal(keys[1], (spec.vocab, spec.hidden)))
    tokens *= 0.64 / jnp.linalg.norm(tokens, axis=1, keepdims=True)
    embed = without_bias(tokens + 0.54 * topics) + 0.55 * spec.hidden**-0.5
    head = jax.random.normal(keys[2], (spec.vocab, spec.hidden)) * (1.2 * spec.hidden**-0.5) + 1.2 * topics
    return (embed * (0.5 * spec.hidden**0.5)).astype(jnp.float16), without_bias(head).astype(jnp.float16)


@partial(jax.jit, static_argnames=("spec", "recipe", "dtype"))
def draw_layer(
    key: jax.Array, x: jax.Array, probabilities: jax.Array, *, spec: ModelSpec, recipe: Recipe, dtype: str
) -> Layer:
    """One layer, and the stream carried through it."""
    hidden, keys_width = spec.hidden, spec.kv_heads * spec.head_dim
    drawing = iter(jax.random.split(key, 10))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(drawing), shape) * scale

    def added(x: jax.Array, inner: jax.Array) -> tuple[jax.Array, jax.Array]:
        """An output projection [D, columns], scaled to GAIN, and the stream with its product."""
        weight = without_bias(normal(hidden, inner.shape[1], scale=inner.shape[1] ** -0.5).T).T
        weight = half(weight * (GAIN * rms(x) / jnp.maximum(rms(product(inner, weight)), 1e-12)))
        return weight, x + product(inner, weight).reshape(x.shape)

    size = hidden**-0.5
    attention = {
        name: half(normal(rows, hidden, scale=scale * size))
        for name, rows, scale in (("q", hidden, 1.3), ("k", keys_width, 1.3), ("v", keys_width, 1.0))
    }
    attention["o"], x = added(x, attend(x, attention, spec))
    h = normed(x).reshape(-1, hidden)
    rank = min(recipe.rank, hidden // 4)
    basis = without_bias(normal(rank, hidden, scale=size))
    mix = normal(spec.ffn, rank, scale=rank**-0.5 * (1 - recipe.noise**2) ** 0.5)
    gate = without_bias(product(mix, basis.T) + normal(spec.ffn, hidden, scale=recipe.noise * size))
    wanted = jax.random.permutation(next(drawing), probabilities)
    beta = quantiles(product(h, gate) / (h.sum(axis=1) * size)[:, None], 1 - wanted)
    gate, up = half(gate - beta[:, None] * size), half(normal(spec.ffn, hidden, scale=size))
    pre = product(h, gate)
    down, x = added(x, jnp.maximum(pre, 0) * product(h, up))
    first = jnp.concatenate([basis, jnp.full((1, hidden), size)])  # relu(z) - relu(-z) = z: an exact product of two
    second = jnp.concatenate([mix, -beta[:, None]], axis=1)
    held = {name: as_held(weight, dtype) for name, weight in attention.items()}
    ones = jnp.ones(hidden, jnp.float32 if is_packed(dtype) else dtype)
    return Layer(
        attention=held | {"attention_norm": ones, "ffn_norm": ones},
        units=as_held(jnp.stack([gate, up, down.T], axis=1)[:, :, None], dtype),
        predictor={
            "fc1": jnp.concatenate([first, -first]).astype(jnp.float16),
            "fc2": jnp.concatenate([second, -second], axis=1).astype(jnp.float16),
        },
        frequency=(pre > 0).mean(axis=0),
        x=x,
    )


def half(values: jax.Array) -> jax.Array:
    """As they will be read."""
    return values.astype(jnp.float16).astype(jnp.float32)


def product(a: jax.Array, weight: jax.Array) -> jax.Array:
    """a @ weight.T, not in TF32."""
    return jnp.einsum("TD,ND->TN", a, weight, precision=HIGHEST)


def rms(x: jax.Array) -> jax.Array:
    """The size of a stream: the mean over its tokens of their root mean squares."""
    return jnp.sqrt((x * x).mean(-1)).mean()


def normed(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def without_bias(rows: jax.Array) -> jax.Array:
    """Rows [n, D] without their part along the constant vector."""
    return rows - rows.mean(axis=-1, keepdims=True)


def quantiles(values: jax.Array, share: jax.Array) -> jax.Array:
    """Column i of values [n, F] at its own share[i], interpolated -> [F]."""
    ordered = jnp.sort(values, axis=0)
    at = jnp.clip(share * (len(values) - 1), 0, len(values) - 1)
    low = jnp.floor(at).astype(jnp.int32)
    ends = [jnp.take_along_axis(ordered, i[None], axis=0)[0] for i in (low, jnp.minimum(low + 1, len(values) - 1))]
    return ends[0] + (ends[1] - ends[0]) * (at - low)


def attend(x: jax.Array, weights: dict[str, jax.Array], spec: ModelSpec) -> jax.Array:
    """Causal attention over the normed stream [B, T, D], before the output projection -> [B*T, D]."""
    rows, length, hidden = x.shape
    flat, size = normed(x).reshape(-1, hidden), spec.head_dim
    q, k, v = (product(flat, weights[name]).reshape(rows, length, -1, size) for name in "qkv")
    q, k = rotate(q), rotate(k)
    k, v = (jnp.repeat(part, spec.heads // spec.kv_heads, axis=2) for part in (k, v))
    scores = jnp.einsum("BQNH,BKNH->BNQK", q, k, precision=HIGHEST) * size**-0.5
    causal = jnp.tril(jnp.ones((length, length), jnp.bool_))
    shares = jax.nn.softmax(jnp.where(causal[None, None], scores, -1e30), axis=-1)
    return jnp.einsum("BNQK,BKNH->BQNH", shares, v, precision=HIGHEST).reshape(-1, hidden)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions 0.. in the rotate-half form. x [B, T, N, H]."""
    length, size = x.shape[1], x.shape[3]
    angle = jnp.arange(length)[:, None] / THETA ** (jnp.arange(0, size, 2)[None, :] / size)
    cos, sin = (jnp.concatenate([f(angle)] * 2, axis=1)[None, :, None] for f in (jnp.cos, jnp.sin))
    return x * cos + jnp.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1) * sin


def as_held(values: jax.Array, dtype: str) -> jax.Array:
    """Values [..., D] in an engine's type; packed ones by the first scale that `quant` would try."""
    return packed(values, PACKED_BITS[dtype]) if is_packed(dtype) else values.astype(dtype)


def packed(values: jax.Array, bits: int) -> jax.Array:
    """`quant.pack` with one scale a group tried -> uint8 [..., groups, 4 * bits + 2]."""
    blocks = values.reshape(-1, values.shape[-1] // GROUP, GROUP)
    at = jnp.argmax(jnp.abs(blocks), axis=2, keepdims=True)
    scales = (jnp.take_along_axis(blocks, at, axis=2)[:, :, 0] * CLIPS[bits][0]).astype(jnp.float16)
    wide = scales.astype(jnp.float32)[:, :, None]
    levels = jnp.where(wide == 0, 0, blocks / jnp.where(wide == 0, 1, wide))
    codes = jnp.clip(jnp.rint(levels + ZERO[bits]), 0, 2**bits - 1).astype(jnp.uint8)
    parts = codes.reshape(*codes.shape[:2], 8 // bits, 4 * bits)
    coded: Any = parts[:, :, 0]
    for part in range(1, 8 // bits):
        coded |= parts[:, :, part] << (bits * part)
    ends = jax.lax.bitcast_convert_type(scales, jnp.uint8)  # [rows, groups, 2]
    rows = jnp.concatenate([coded.reshape(len(blocks), -1), ends.reshape(len(blocks), -1)], axis=1)
    return rows.reshape(*values.shape[:-1], blocks.shape[1], -1)
