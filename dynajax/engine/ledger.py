"""What the layers did, counted: where live units were found, what was computed, and what predictions missed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from dynajax.programs.bodies import ADMITTED, LIVE
from dynajax.scheduler import Ran

CHECK_EVERY = 32  # tokens from one exact check of a layer to the next
Counts = npt.NDArray[np.int64]  # [L]


@dataclass(slots=True)
class Books:
    """Sums over decoded rows, by layer. `seen_*`: over those rows of which all live units are known."""

    rows: Counts
    hot_computed: Counts
    cold_computed: Counts
    seen_rows: Counts
    seen_live: Counts
    seen_hot: Counts  # live and on the device
    seen_computed: Counts  # live and computed

    @classmethod
    def empty(cls, layers: int) -> Books:
        return cls(*(np.zeros(layers, np.int64) for _ in fields(cls)))


def live_of(ran: Ran, marks: npt.NDArray[np.uint8] | None, units: int) -> npt.NDArray[np.bool_]:
    """[R, F] what was live in a layer; on the host of what was computed, if nobody looked. marks [R, G]."""
    if ran.truth is not None:
        return ran.truth
    live = np.zeros((len(ran.cold_live), units), np.bool_)
    live[:, ran.cold_units] = ran.cold_live
    if marks is not None:
        live[:, ran.bucket] = marks & LIVE
    return live


class Ledger:
    """Fed by the scheduler's thread, read by the main one once that has settled."""

    def __init__(self, layers: int, *, skips: bool):
        self._layers, self._skips = layers, skips
        self.books = Books.empty(layers)

    def reset(self) -> None:
        """Count anew."""
        self.books = Books.empty(self._layers)

    def add(self, ran: Ran, marks: npt.NDArray[np.uint8] | None) -> None:
        """A layer has run; marks [R, G] of the rows that count."""
        books, layer, rows = self.books, ran.layer, len(ran.cold_live)
        marks = np.zeros((rows, 0), np.uint8) if marks is None else marks
        books.rows[layer] += rows
        books.hot_computed[layer] += np.count_nonzero(marks & ADMITTED)
        books.cold_computed[layer] += rows * len(ran.cold_units) if ran.admit is None else np.count_nonzero(ran.admit)
        if ran.truth is not None:
            books.seen_rows[layer] += rows
            books.seen_live[layer] += np.count_nonzero(ran.truth)
            books.seen_hot[layer] += np.count_nonzero(ran.truth[:, ran.bucket])
            computed = np.zeros(ran.truth.shape, np.bool_)
            computed[:, ran.cold_units] = True if ran.admit is None else ran.admit
            computed[:, ran.bucket] = marks & ADMITTED
            books.seen_computed[layer] += np.count_nonzero(ran.truth & computed)
        elif not self._skips:
            hot, cold = np.count_nonzero(marks & LIVE), np.count_nonzero(ran.cold_live)
            books.seen_rows[layer] += rows
            books.seen_live[layer] += hot + cold
            books.seen_hot[layer] += hot
            books.seen_computed[layer] += hot + cold
