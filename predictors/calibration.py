"""From scores to probabilities and back to thresholds, and how good they are. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NEWTON_STEPS = 50
_FACTORS = (1.0, 1.3, 1.6, 2.0)  # of the true density, at which recall is told
_RIDGE = 1e-3  # observations that pull at a slope and an intercept which the data leave open


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reliability:
    """Ten bins of equal width over p: pairs in each, their mean prediction, the share of them that was live."""

    count: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.float64]
    live: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of the two, by pairs."""
        return float((np.abs(self.predicted - self.live) * self.count).sum() / max(self.count.sum(), 1))


def fit_platt(z: npt.NDArray[np.floating], live: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """(a, b) for which sigmoid(a z + b) is most likely to have given `live`; any shapes, equal. Newton with halving.

    A score that separates perfectly gets a steep but finite slope.
    """
    z64, y = np.asarray(z, np.float64).ravel(), np.asarray(live, bool).ravel()
    if z64.size != y.size or not z64.size:
        raise ValueError(f"z and live must have the same size > 0, got {z64.size} and {y.size}")
    centre, spread = z64.mean(), z64.std()
    unit = (z64 - centre) / (spread or 1.0)
    rate = (y.sum() + 0.5) / (y.size + 1)
    point = np.array([0.0, np.log(rate / (1 - rate))])
    start = point.copy()

    def loss(at: npt.NDArray) -> float:
        t = at[0] * unit + at[1]
        return float((np.logaddexp(0, t) - y * t).sum() + 0.5 * _RIDGE * ((at - start) ** 2).sum())

    best = loss(point)
    for _ in range(NEWTON_STEPS):
        p = sigmoid(point[0] * unit + point[1])
        w = p * (1 - p)
        grad = np.array([((p - y) * unit).sum(), (p - y).sum()]) + _RIDGE * (point - start)
        hessian = np.array([[(w * unit * unit).sum(), (w * unit).sum()], [(w * unit).sum(), w.sum()]])
        step = np.linalg.solve(hessian + _RIDGE * np.eye(2), grad)
        while (new := loss(point - step)) > best and np.abs(step).max() > 1e-9:
            step = step / 2
        if new > best:
            break
        point, gain, best = point - step, best - new, new
        if gain <= 1e-12 * max(best, 1):
            break
    slope = point[0] / (spread or 1.0)
    return float(slope), float(point[1] - slope * centre)


def sigmoid(t: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(t, np.float64)))


def reliability(p: npt.NDArray[np.floating], live: npt.NDArray[np.bool_]) -> Reliability:
    p, y = np.asarray(p, np.float64).ravel(), np.asarray(live, bool).ravel()
    bins = np.minimum((p * 10).astype(np.int64), 9)
    count = np.bincount(bins, minlength=10)
    some = np.maximum(count, 1)
    return Reliability(
        count=count,
        predicted=np.bincount(bins, weights=p, minlength=10) / some,
        live=np.bincount(bins, weights=y, minlength=10) / some,
    )


def entropy(p: npt.NDArray[np.floating] | float, live: npt.NDArray[np.bool_]) -> float:
    """Mean binary cross-entropy, nats a neuron; p may be one number (a prior)."""
    p = np.clip(np.asarray(p, np.float64), 1e-9, 1 - 1e-9)
    return float(-np.where(live, np.log(p), np.log1p(-p)).mean())


def histogram(p: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Shares [256] of the probabilities at each p x 255, rounded as `scoring.to_uint8` does."""
    codes = np.rint(np.asarray(p, np.float32) * np.float32(255)).astype(np.uint8)
    return (np.bincount(codes.ravel(), minlength=256) / max(codes.size, 1)).astype(np.float32)


def threshold_for(shares: npt.NDArray[np.floating], density: float) -> int:
    """The highest threshold t such that at least `density` of all neurons has p x 255 >= t.

    Example: shares of 0.9 at 0 and 0.1 at 255: 255 for density 0.1, 0 for 0.2.
    """
    if not 0 <= density <= 1:
        raise ValueError(f"density must be from 0 to 1, got {density}")
    above = np.cumsum(np.asarray(shares, np.float64)[::-1])[::-1]  # [t]: share at or above t
    return int(np.flatnonzero(above >= min(density, above[0]) - 1e-9)[-1])


def top_mask(values: npt.NDArray[np.floating], density: float) -> npt.NDArray[np.bool_]:
    """Per row of [T, F], its largest `density` share (at least one): the wanted set where nothing is exactly zero."""
    count = max(1, round(density * values.shape[1]))
    chosen = np.argpartition(values, values.shape[1] - count, axis=1)[:, values.shape[1] - count :]
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, chosen, True, axis=1)
    return mask


def recall_at(z: npt.NDArray[np.floating], live: npt.NDArray[np.bool_], factor: float) -> tuple[float, float]:
    """(recall, precision) when as many of all the pairs as `factor` x the live ones are predicted, best first."""
    z, y = np.asarray(z).ravel(), np.asarray(live, bool).ravel()
    wanted = int(y.sum())
    count = min(round(factor * wanted), y.size)
    if not wanted:
        return 1.0, 0.0
    if not count:
        return 0.0, 1.0
    hits = int(y[np.argpartition(z, y.size - count)[y.size - count :]].sum())
    return hits / wanted, hits / count


def judge(z: npt.NDArray[np.float32], live: npt.NDArray[np.bool_], slope: float, intercept: float) -> dict:
    """Everything that is told of a predictor on tokens [N, F], for JSON."""
    p = sigmoid(slope * z + intercept)
    density = float(live.mean())
    table = reliability(p, live)
    at = {str(factor): recall_at(z, live, factor) for factor in _FACTORS}
    return {
        "tokens": len(live),
        "density": density,
        "recall": {factor: pair[0] for factor, pair in at.items()},
        "precision": {factor: pair[1] for factor, pair in at.items()},
        "entropy": entropy(p, live),
        "prior_entropy": entropy(density, live),
        "calibration_error": table.error,
        "reliability": [
            {"count": int(n), "predicted": float(a), "live": float(b)}
            for n, a, b in zip(table.count, table.predicted, table.live, strict=True)
        ],
    }
