"""Switch Transformers: an encoder that reads, a decoder that writes, one expert a token and a limit of tokens each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.reference.layers import linear, rms, split
from dynajax.reference.tensors import Array, Config, Tensors

Integers = npt.NDArray[np.int64]


def encoded_forward(
    config: Config,
    tensors: Mapping[str, npt.NDArray[Any]],
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    *,
    at_once: bool = False,
) -> Array:
    """source [S] for the encoder, target [T] for the decoder, its first token included -> logits [T, V].

    at_once: experts take at most `expert_capacity` of the target's tokens too, as where all of them are given together;
    else one comes after the other, as in a generation, and never meets a full expert.
    """
    w, limit = Tensors(tensors), config["expert_capacity"]
    seen = _stack(config, w, "encoder", np.asarray(source), None, limit)
    x = _stack(config, w, "decoder", np.asarray(target), seen, limit if at_once else None)
    if config.get("tie_word_embeddings", True):
        return w.scores("shared.weight", x / math.sqrt(config["d_model"]))
    return w.scores("lm_head.weight", x)


def _stack(config: Config, tensors: Tensors, name: str, ids: Integers, seen: Array | None, limit: int | None) -> Array:
    """One stack, its last norm included. seen: what came out of the encoder; None: this is the encoder."""
    eps, decodes = config["layer_norm_epsilon"], seen is not None
    x = tensors.rows("shared.weight", ids)
    table = tensors[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    bias = relative_bias(config, table, len(ids), causal=decodes)
    for layer in range(stack_layers(config, name)):
        at = f"{name}.block.{layer}.layer."
        w = tensors.below(f"{at}0.")
        h = rms(x, w["layer_norm.weight"], eps)
        x = x + _attention(config, w.below("SelfAttention."), h, h, bias)
        if seen is not None:
            w = tensors.below(f"{at}1.")
            h = rms(x, w["layer_norm.weight"], eps)
            x = x + _attention(config, w.below("EncDecAttention."), h, seen, None)
        w = tensors.below(f"{at}{1 + decodes}.")
        h = rms(x, w["layer_norm.weight"], eps)
        w = w.below("mlp.")
        x = x + (_experts(config, w, h, limit) if is_sparse(config, name, layer) else _dense(w, h))
    return rms(x, tensors[f"{name}.final_layer_norm.weight"], eps)


def stack_layers(config: Config, name: str) -> int:
    """How many layers a stack has."""
    behind = config.get("num_decoder_layers")
    return config["num_layers"] if name == "encoder" or behind is None else behind


def is_sparse(config: Config, name: str, layer: int) -> bool:
    """Whether a layer has experts: the second of every `step`; all where the step is 1."""
    step, layers = config.get(f"{name}_sparse_step"), stack_layers(config, name)
    if step is None:
        wanted = config[f"num_sparse_{name}_layers"]
        step = layers // wanted if wanted > 0 else layers
    return step == 1 or (step > 0 and layer % step == 1)


def relative_bias(config: Config, table: Array, length: int, *, causal: bool) -> Array:
    """[N, T, T]: what is added to the score of a query (row) and a key; -inf for keys that a decoder has not yet."""
    apart = np.arange(length)[None, :] - np.arange(length)[:, None]
    numbers = [[bucket(config, int(d), causal=causal) for d in row] for row in apart]
    bias = table[np.array(numbers)].transpose(2, 0, 1)
    return np.where(apart > 0, -np.inf, bias) if causal else bias


def bucket(config: Config, distance: int, *, causal: bool) -> int:
    """The bucket of a key `distance` tokens behind (> 0) or before the query: one each for half of them, then wider and
    wider ones. Without a causal order those behind have the second half of the buckets."""
    count, most = config["relative_attention_num_buckets"], config.get("relative_attention_max_distance", 128)
    first = 0
    if causal:
        distance = max(0, -distance)
    else:
        count //= 2
        first = count if distance > 0 else 0
        distance = abs(distance)
    exact = count // 2
    if distance < exact:
        return first + distance
    wider = math.log(distance / exact) / math.log(most / exact) * (count - exact)
    return first + min(exact + int(wider + 1e-6), count - 1)


def _attention(config: Config, w: Tensors, h: Array, keys: Array, bias: Array | None) -> Array:
    """Queries of h [T, D] over keys and values of another stream [S, D]; scores are not scaled."""
    q, k, v = (split(linear(x, w, part), config["num_heads"]) for part, x in (("q", h), ("k", keys), ("v", keys)))
    scores = q @ k.swapaxes(1, 2) + (0.0 if bias is None else bias)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = share / share.sum(axis=-1, keepdims=True) @ v  # [N, T, H]
    return linear(mixed.swapaxes(0, 1).reshape(len(h), -1), w, "o")


def _dense(w: Tensors, h: Array) -> Array:
    return linear(np.maximum(linear(h, w, "wi"), 0), w, "wo")


def _experts(config: Config, w: Tensors, h: Array, limit: int | None) -> Array:
    """Each token's best expert, times its probability; nothing for tokens that come to an expert which is full."""
    logits = h @ w["router.classifier.weight"].T
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    best, weight = np.argmax(logits, axis=1), (share / share.sum(axis=1, keepdims=True)).max(axis=1)
    out = np.zeros_like(h)
    for expert in np.unique(best):
        tokens = np.nonzero(best == expert)[0][:limit]
        out[tokens] = weight[tokens, None] * _dense(w.below(f"experts.expert_{expert}."), h[tokens])
    return out
