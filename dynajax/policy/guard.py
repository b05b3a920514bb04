"""Whether moving units pays on this machine: the same work with and without, compared while it runs. NumPy only."""

from __future__ import annotations

import numpy as np

WARM_UP = 16  # tokens before anything counts
BLOCK = 16  # tokens in a row with moves, then as many without
ROUNDS = 3
LOSS = 1.05  # how many times slower tokens with moves may be; those without still profit from the moves before


class Guard:
    """Counts tokens: `moving` says what the next one should do, `add` how long it took; then it has decided.

    Medians, so that a token disturbed by something else decides nothing. One generation may end and another begin
    between two tokens.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self.pays: bool | None = None  # None: not known yet

    @property
    def moving(self) -> bool:
        """Whether units may move during the next token."""
        if self.pays is not None:
            return self.pays
        return self._tokens < WARM_UP or (self._tokens - WARM_UP) // BLOCK % 2 == 0

    @property
    def slowdown(self) -> float:
        """Median time of a token with moves / of one without."""
        return float(np.median(self._times[True]) / np.median(self._times[False]))

    def add(self, seconds: float) -> None:
        """The token that `moving` spoke of took so long."""
        if self.pays is not None:
            return
        if self._tokens >= WARM_UP:
            self._times[self.moving].append(seconds)
        self._tokens += 1
        if self._tokens == WARM_UP + 2 * ROUNDS * BLOCK:
            self.pays = self.slowdown <= LOSS
