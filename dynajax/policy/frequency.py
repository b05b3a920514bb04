"""How often each neuron has been live lately: the paper's macro level. NumPy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FLOOR = np.float32(1e-20)  # keeps decayed values out of the denormal range, where arithmetic is slow

F32 = npt.NDArray[np.float32]


def seed_frequency(
    offline: F32,  # [L, F] share of tokens, from statistics
    counts: npt.NDArray | None,  # [L, F] prompt tokens for which each neuron was live
    tokens: int,  # of the prompt
    decay: float,
) -> F32:
    """f [L, F] at the start of a sequence: the mean of a Beta distribution.

    The statistics count as many tokens as the decayed f remembers, 1 / (1 - decay), the prompt's its own number.
    Example: decay 0.9, offline 0.2, live for 5 of 10 prompt tokens: (10 x 0.2 + 5) / (10 + 10) = 0.35.
    """
    if counts is None:
        return np.maximum(offline, FLOOR)
    memory = 1 / (1 - decay)
    blend = (memory * offline.astype(np.float64) + counts) / (memory + tokens)
    return np.maximum(blend.astype(np.float32), FLOOR)


def update_frequency(f: F32, live: npt.NDArray[np.bool_], decay: float, scratch: F32) -> None:
    """One token has passed: f [F] moves towards live [F] by 1 - decay. Writes f and scratch."""
    f *= np.float32(decay)
    np.multiply(live, np.float32(1 - decay), out=scratch)
    f += scratch
    np.maximum(f, FLOOR, out=f)


def update_recency(f: F32, live: npt.NDArray[np.bool_], decay: float) -> None:
    """The same for `lru`: what is live gets 1, everything else fades, so f orders by last use."""
    f *= np.float32(decay)
    np.maximum(f, FLOOR, out=f)
    np.maximum(f, live, out=f)
