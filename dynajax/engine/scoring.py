"""How likely a text is to a model, with every position's own mask in predicted mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.engine.masked import Masked, MaskedPrompt, PredictedScores, Source
from dynajax.engine.opening import Parts
from dynajax.engine.stepper import Piece, Rows
from dynajax.errors import FitError
from dynajax.programs.shapes import CHUNKS

HEAD_ROWS = CHUNKS[0]  # tokens whose logits are computed at a time: a vocabulary is wide


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
    programs, weights, state = parts.prepared.programs, parts.stepper.weights, parts.stepper.state
    program = programs.get("next_logprobs", HEAD_ROWS)
    found = []
    for (start, size, count), y in zip(pieces, y_cold, strict=True):
        for at in range(0, min(size, -(-count // HEAD_ROWS) * HEAD_ROWS), HEAD_ROWS):
            wanted = np.zeros(HEAD_ROWS, np.int32)
            following = ids[start + at + 1 : start + min(at + HEAD_ROWS, count) + 1]
            wanted[: len(following)] = following
            rows = program(
                weights.norm, weights.table, state.xs, y[at : at + HEAD_ROWS].copy(), wanted, np.int32(start + at)
            )
            found.append(np.asarray(rows)[: len(following)])
    return np.concatenate(found)


def check_room(parts: Parts) -> None:
    """FitError if the programs of scoring need more scratch memory than the budget granted."""
    granted, programs = parts.prepared.temporaries, parts.prepared.programs
    if parts.prepared.unlimited:
        return
    needed = programs.temp_bytes("next_logprobs", HEAD_ROWS)
    if needed > granted:
        more = needed - granted
        raise FitError(f"scoring needs {more} bytes more scratch memory than the budget leaves: raise --vram-budget")


def _nobody(done: int, total: int) -> None:
    """No progress wanted."""
