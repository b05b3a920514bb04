"""How likely a text is to a model, with every position's own mask in predicted mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.masked import Masked, MaskedPrompt, PredictedScores, Source
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
    if source is None and parts.plans is not None and parts.prepared.strategy.skips:
        predictors = parts.plans.runner.predictors
        assert predictors is not None
        source = PredictedScores(predictors, parts.plans.runner.wishes.theta)
    if source is None:
        y_cold = layers.prompt(stepper.state, 0, pieces, _nobody, whole=True)
    else:
        looker = parts.plans.check_live if check and parts.plans is not None else None
        masked = MaskedPrompt(parts.loaded, looker)
        y_cold = masked.run(stepper.state, 0, pieces, source, _nobody, whole=True)
        counts = masked.counts
    return Scored(token_ids=tuple(ids), logprobs=_logprobs(parts, ids, pieces, y_cold), counts=counts)


def _logprobs(parts: Parts, ids: Sequence[int], pieces: list[Piece], y_cold: list[Rows]) -> npt.NDArray[np.float32]:
    """By the program that decoding ends with, as many positions at a time as that has rows: no further memory."""
    programs, weights, state = parts.prepared.programs, parts.stepper.weights, parts.stepper.state
    head, batch = programs.get("head"), programs.shapes.batch
    found = np.empty(len(ids) - 1, np.float32)
    for (start, size, count), y in zip(pieces, y_cold, strict=True):
        for at in range(0, count, batch):
            first = min(at, size - batch)  # the last rows of a chunk are asked for twice where they are no whole batch
            x = jax.lax.dynamic_slice_in_dim(state.xs, np.int32(start + first), batch)
            logits = np.asarray(head(weights.norm, weights.table, x, y[first : first + batch].copy()))
            for row in range(at - first, min(batch, count - first)):
                position = start + first + row
                found[position] = _log_softmax_at(logits[row], ids[position + 1])
    return found


def _log_softmax_at(logits: npt.NDArray[np.float32], token: int) -> float:
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top, dtype=np.float64).sum()))


def _nobody(done: int, total: int) -> None:
    """No progress wanted."""
