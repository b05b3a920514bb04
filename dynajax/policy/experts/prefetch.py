"""Which expert of a later layer to bring in early: at most one, and only where that is expected to pay. NumPy only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynajax.policy.experts.assign import Assign
from dynajax.policy.experts.records import F64, I32, ExpertCosts, Ints, Work, makespan

LIKELY = 0.5  # predicted tokens from which an expert counts as live


def predicted_tokens(predicted: F64) -> Ints:
    """[E] whole tokens of a predicted workload [E]: rounded, and at least one from half a token on."""
    tokens = np.rint(predicted).astype(np.int64)
    return np.where(predicted >= LIKELY, np.maximum(tokens, 1), 0)


def heaviest_absent(work: Work, predicted: F64) -> int | None:
    """The place in the Work of the absent expert of which most is predicted [A], of equal ones the first; None if all
    are here."""
    absent = np.flatnonzero(~work.resident)
    return int(absent[np.argmax(predicted[absent])]) if len(absent) else None


def saved_s(work: Work, place: int, assign: Assign, costs: ExpertCosts) -> float:
    """Seconds by which the layer is done earlier if the expert at that place is here, in a slot that `room` counts.

    Both times under the assignment that will be made then, so an expert that would be fetched on demand saves little.
    """
    resident = work.resident.copy()
    resident[place] = True
    after = replace(work, resident=resident, room=work.room - 1)
    seconds = [makespan(case, assign(case, costs).on_gpu, costs) for case in (work, after)]
    return float(seconds[0] - seconds[1])


def choose_prefetch(
    work: Work,  # of the later layer as predicted; room: slots that it may give up
    place: int | None,  # in the work, of the expert that may come; see `heaviest_absent`
    victims: I32,  # those slots, first to last
    confidence: float,  # probability that the chosen expert will be live
    price_s: float,  # what a prefetch must be expected to save
    assign: Assign,
    costs: ExpertCosts,
) -> tuple[int, int] | None:
    """(unit, slot) of the one prefetch to make, or None. Only on an idle link: `work.copy_busy_s` is 0.

    DALI (arXiv 2602.03495) prefetches the absent expert of highest predicted workload, always, and found one to be
    best; here it must also pay: confidence times the seconds saved above the price.
    """
    if place is None or not len(victims) or work.room < 1 or work.copy_busy_s > 0:
        return None
    if confidence * saved_s(work, place, assign, costs) <= price_s:
        return None
    return int(work.experts[place]), int(victims[0])


class CountPredictor:
    """The naive baseline: a layer's next workload is its decayed past one. decay 0: the last step again."""

    def __init__(self, layers: int, experts: int, decay: float) -> None:
        self._decay = decay
        self._workload = np.zeros((layers, experts))

    def observe(self, layer: int, tokens: Ints) -> None:
        """The layer has run; tokens [E]."""
        self._workload[layer] *= self._decay
        self._workload[layer] += (1 - self._decay) * tokens

    def predict(self, layer: int) -> F64:
        """[E], a copy."""
        return self._workload[layer].copy()
