"""Synthetic routing: which experts rows of text are sent to, drawn so that published statistics of real models hold.

No model is run, and no figure from it is a measurement of one. In every layer a row scores expert e with

    sqrt(popular) p_e + sqrt(topic) q_e + sqrt(passing) a_e + sqrt(rest) noise,

all standard normal: p the layer's, q the row's sequence's, a moving from token to token (autoregressive, `memory`),
the noise anew for every token; rest = 1 - popular - topic - passing. The K largest are chosen. Sequences have `length`
tokens, then the row gets another topic. Rows are independent but for p.

`repeating`: 52.5 % of the experts carry 95 % of the traffic and neighbouring tokens share twice as many experts as
unrelated ones of the layer do. Both figures are published, of different models; "twice chance" is taken against the
layer's own traffic, which skew alone does not reach. `measured-lru`: an LRU of 15 to 45 % of the experts hits about as
often as reported for Qwen3-30B-A3B (arXiv 2609.12978: 60, 74, 85, 86 and 89 %). `popular`: the same skew and next to
nothing else, where twice the chance of a blind choice is exceeded by skew alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from numpy.random import Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Shares of the variance of a score, and how long its parts last."""

    popular: float
    topic: float
    passing: float
    memory: float
    length: int = 128  # tokens


RECIPES: Mapping[str, Routing] = MappingProxyType(
    {
        "repeating": Routing(popular=0.41, topic=0.22, passing=0.13, memory=0.7),
        "measured-lru": Routing(popular=0.36, topic=0.13, passing=0.16, memory=0.8),
        "popular": Routing(popular=0.44, topic=0.02, passing=0.0, memory=0.0),
    }
)


def draw_routing(
    recipe: Routing, steps: int, layers: int, experts: int, top_k: int, rows: int, rng: Generator
) -> npt.NDArray[np.int32]:
    """[steps, L, E] tokens at each expert: `rows` tokens a step, `top_k` experts each."""
    shape = (rows, layers, experts)
    rest = 1 - recipe.popular - recipe.topic - recipe.passing
    popular = np.sqrt(recipe.popular) * rng.standard_normal(shape[1:], np.float32)
    topic, passing = rng.standard_normal((2, *shape), np.float32)
    left = rng.integers(1, recipe.length + 1, rows)
    trace = np.zeros((steps, layers, experts), np.int32)
    moves = np.float32(np.sqrt(1 - recipe.memory**2))
    for step in range(steps):
        new = left == 0
        if new.any():
            topic[new], passing[new] = rng.standard_normal((2, int(new.sum()), *shape[1:]), np.float32)
            left[new] = recipe.length
        left -= 1
        passing = np.float32(recipe.memory) * passing + moves * rng.standard_normal(shape, np.float32)
        score = popular + np.sqrt(recipe.topic) * topic + np.sqrt(recipe.passing) * passing
        score += np.sqrt(rest) * rng.standard_normal(shape, np.float32)
        chosen = np.argpartition(-score, top_k - 1, axis=-1)[..., :top_k]  # [rows, L, K]
        layer = np.broadcast_to(np.arange(layers)[:, None], chosen.shape)
        np.add.at(trace[step], (layer, chosen), 1)
    return trace
