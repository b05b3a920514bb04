"""What is measured of activity, and what the normal distribution says of it. Pure functions.

`live` is True where a neuron is active, `counts` how often each neuron was within some tokens. T tokens, F neurons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

HOT = 0.4  # of a layer's neurons: see sentence_distance

_SLACK = 1e-9  # so that 0.4 of 10 is 4
_QUANTILES = 1000  # neurons that stand for a layer in normal_coverage
_NODES = 96  # of the integral over one variable in normal_both
_FAR = 9.0  # standard deviations beyond which nothing lies


def top_counts(value: npt.NDArray, share: float) -> npt.NDArray[np.int64]:
    """How often each neuron [F] is among the `share` of neurons with the largest values of its token [T, F].

    This is how PowerInfer's activation files count: a fixed number of neurons in every token, whether live or not.
    Equal values at the boundary all count. Example: [[3, 1, 2], [0, 5, 4]], share 1/3: [1, 1, 0].
    """
    most = max(1, math.floor(share * value.shape[1] + _SLACK))
    place = value.shape[1] - most
    bound = np.partition(value, place, axis=1)[:, place, None]
    return (value >= bound).sum(axis=0)


def coverage(counts: npt.NDArray, share: float) -> float:
    """The least fraction of neurons whose counts [F] make up `share` of all that was counted.

    ValueError if nothing was. Example: counts [2, 5, 3], share 0.8: two of the three neurons, 2/3.
    """
    total = counts.sum()
    if not total > 0:
        raise ValueError("the coverage of nothing is not defined: no neuron was counted")
    covered = np.cumsum(np.sort(counts)[::-1], dtype=np.float64)
    return (int(np.searchsorted(covered, (share - _SLACK) * total)) + 1) / len(counts)


def jaccard_distance(a: Bools, b: Bools) -> float:
    """1 - |a and b| / |a or b| of two sets of neurons [F]; 0 if both are empty."""
    either = np.count_nonzero(a | b)
    return 1 - np.count_nonzero(a & b) / either if either else 0.0


def adjacent_distance(live: Bools) -> float:
    """The mean Jaccard distance of a token's live set to the next token's, of one layer in one sequence [T, F].

    Example: {0, 1}, {1, 2}, {1, 2}: (2/3 + 0) / 2 = 1/3. ValueError with fewer than two tokens.
    """
    if len(live) < 2:
        raise ValueError(f"neighbouring tokens need at least 2 tokens, got {len(live)}")
    before, after = live[:-1], live[1:]
    both, either = (before & after).sum(axis=1), (before | after).sum(axis=1)
    return float(np.mean(1 - np.where(either, both / np.maximum(either, 1), 1.0)))


def hot_set(counts: npt.NDArray, share: float = HOT) -> Bools:
    """bool [F]: the `share` of neurons that were live most often, of equals the first; one that never was is not hot.

    Example: counts [1, 7, 0, 7, 3], share 0.4: neurons 1 and 3.
    """
    hot = np.zeros(len(counts), np.bool_)
    hot[np.argsort(-counts, kind="stable")[: math.floor(share * len(counts) + _SLACK)]] = True
    return hot & (counts > 0)


def sentence_distance(counts: Sequence[npt.NDArray], share: float = HOT) -> float:
    """The mean Jaccard distance of the hot sets of all pairs of sentences, of one layer; counts [F] of each sentence.

    DynamicInfer publishes 0.53-0.57 without saying what is hot. Ours: the 40 % of the neurons that are live in most
    tokens of the sentence (`hot_set`), a sentence having 128 tokens. 40 % is the share that the same paper calls hot
    elsewhere. With the other candidate, the neurons that cover 80 % of a sentence's activity, its figure and its
    0.70-0.75 between tokens exclude each other at ReluLLaMA-7B's density. ValueError with fewer than two sentences.
    """
    if len(counts) < 2:
        raise ValueError(f"pairs of sentences need at least 2 sentences, got {len(counts)}")
    sets = [hot_set(each, share) for each in counts]
    return float(np.mean([jaccard_distance(a, b) for a, b in combinations(sets, 2)]))


def cosine_of_neighbours(hidden: npt.NDArray) -> float:
    """The mean cosine between a token's hidden states in one layer and the next, of hidden [L, T, D]."""
    if len(hidden) < 2:
        raise ValueError(f"neighbouring layers need at least 2 layers, got {len(hidden)}")
    unit = hidden / np.linalg.norm(hidden, axis=2, keepdims=True)
    return float((unit[:-1] * unit[1:]).sum(axis=2).mean())


def predicted_ratio(predicted: Bools, live: Bools) -> float:
    """Predicted neurons for each live one, of arrays of one shape; ValueError if none is live."""
    if not (count := np.count_nonzero(live)):
        raise ValueError("no neuron is live")
    return np.count_nonzero(predicted) / count


def recall(predicted: Bools, live: Bools) -> float:
    """The share of live neurons that is predicted, of arrays of one shape; ValueError if none is live."""
    return predicted_ratio(predicted & live, live)


def normal_cdf(x: npt.NDArray) -> npt.NDArray:
    """Phi(x), the share of a unit normal distribution below x, in x's type; off by less than 1e-6 in float32.

    Abramowitz and Stegun, 7.1.26.
    """
    size = np.abs(x)
    t = 1 / (1 + size * (0.3275911 / math.sqrt(2)))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail *= np.exp(size * size * -0.5)
    return np.where(x < 0, tail, 1 - tail)


def normal_cdf_exact(x: npt.NDArray) -> F64:
    """Phi(x) to double precision, in the tails too; slow."""
    flat = [0.5 * math.erfc(-value * math.sqrt(0.5)) for value in np.ravel(x).tolist()]
    return np.asarray(flat, np.float64).reshape(np.shape(x))


def normal_quantile(share: npt.NDArray | float) -> F64:
    """x with Phi(x) = share, for shares above 0 and below 1; slow."""
    inverse = NormalDist().inv_cdf
    return np.asarray([inverse(value) for value in np.ravel(share).tolist()], np.float64).reshape(np.shape(share))


def normal_both(x: npt.NDArray | float, y: npt.NDArray | float, correlation: npt.NDArray | float) -> F64:
    """P(X > x and Y > y) of unit normal X and Y with a correlation in [0, 1), elementwise, to about 1e-6.

    Example: x = y = 0, correlation 0.5: 1/3.
    """
    x, y, correlation = (np.asarray(value, np.float64)[..., None] for value in (x, y, correlation))
    low = np.maximum(x, -_FAR)
    node, weight = _nodes()
    half = (_FAR - low) / 2
    at = low + half * (node + 1)
    above = normal_cdf((correlation * at - y) / np.sqrt(1 - correlation * correlation))
    return (half * weight * np.exp(at * at * -0.5) * above).sum(axis=-1) / math.sqrt(2 * math.pi)


@lru_cache(maxsize=1)
def _nodes() -> tuple[F64, F64]:
    """Of Gauss and Legendre on [-1, 1], with their weights; they take longer to find than to use."""
    return np.polynomial.legendre.leggauss(_NODES)


def normal_coverage(spread: npt.NDArray, counted: float, share: float) -> F64:
    """`coverage` of `top_counts` over endless tokens, for layers [L] of endless neurons.

    A neuron's value is its bias, normal over neurons with that spread, plus a unit normal over tokens; the largest
    `counted` of the neurons count in every token. Without spread all are equal, and it takes `share` of the neurons.
    """
    spread = np.asarray(spread, np.float64)[:, None]
    bias = -normal_quantile((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    bound = normal_quantile(1 - counted) * np.sqrt(1 + spread * spread)
    covered = np.cumsum(normal_cdf(spread * bias - bound), axis=1)
    at = np.arange(1, _QUANTILES + 1) / _QUANTILES
    return np.asarray([np.interp(share, row / row[-1], at) for row in covered])
