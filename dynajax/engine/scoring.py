"""How likely a text is to a model, with every position's own mask in predicted mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.engine.masked import Masked, MaskedPrompt, Source
from dynajax.engine.opening import Parts
from dynajax.engine.stepper import Piece, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Log-probabilities of a text's tokens, natural logarithm; the first token has none."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]  # [T - 1], of token_ids[1:]
    counts: Masked | None  # what was computed, where neurons were skipped


def score(parts: Parts, ids: Sequence[int], source: Source | None, *, check: bool) -> Scored:
    """The caller has the engine to itself; ids fit the context. source None: the engine's own masks, if it skips."""
    stepper, layers = parts.stepper, parts.layers
    counts, fed = None, list(ids[:-1])
    if not fed:
        return Scored(token_ids=tuple(ids), logprobs=np.zeros(0, np.float32), counts=None)
    pieces = stepper.embed(fed)
    source = source or parts.masks
    if source is None:
        y_cold = layers.prompt(stepper.state, 0, pieces, _nobody, whole=True)
    else:
        masked = MaskedPrompt(parts.loaded, parts.check_live if check else None)
        y_cold = masked.run(stepper.state, 0, pieces, source, _nobody, whole=True)
        counts = masked.counts
    return Scored(token_ids=tuple(ids), logprobs=_logprobs(parts, ids, pieces, y_cold), counts=counts)


def _logprobs(parts: Parts, ids: Sequence[int], pieces: list[Piece], y_cold: list[Rows]) -> npt.NDArray[np.float32]:
    """By the program that decoding ends with, as many positions at a time as that has rows: no further memory."""
    programs, weights, state = parts.prepared.programs, parts.stepper.weights, parts.stepper.state
    head, batch, count = programs.get("head"), programs.shapes.batch, len(ids) - 1
    y = np.concatenate([part[:tokens] for part, (_, _, tokens) in zip(y_cold, pieces, strict=True)])
    found = np.empty(count, np.float32)
    for first in range(0, count, batch):
        rows = np.minimum(np.arange(first, first + batch), count - 1)  # of too many the last one again and again
        logits = np.asarray(head(weights.norm, weights.table, state.xs[rows], y[rows]))
        for row, position in enumerate(range(first, min(first + batch, count))):
            found[position] = _log_softmax_at(logits[row], ids[position + 1])
    return found


def _log_softmax_at(logits: npt.NDArray[np.float32], token: int) -> float:
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top, dtype=np.float64).sum()))


def _nobody(done: int, total: int) -> None:
    """No progress wanted."""
