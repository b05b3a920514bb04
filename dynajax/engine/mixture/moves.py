"""What moves while a mixture decodes: fetches that a step waits for, and one expert at a time for later steps."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.mixture.books import Books
from dynajax.engine.mixture.foretelling import Foretellers
from dynajax.engine.mixture.groups import Routed
from dynajax.mover import Mover, Ticket
from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.prefetch import CountPredictor
from dynajax.pool import DevicePool
from predictors.routing import expected_tokens

I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.int64]  # [E] of every expert
Asked = tuple[int, jax.Array]  # number of a later layer, the experts that tokens are expected to go to there [B, K]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a mixture's runner decides."""

    moves: bool  # experts may come and go
    always_waits: bool  # for every move, before the layer it concerns


class Moves:
    """Asks the mover, tells the planner what arrived, and counts. Layers go by their number among those that have
    experts."""

    def __init__(
        self,
        pool: DevicePool,
        planner: ExpertPlanner,
        estimator: ExpertCostEstimator,
        wishes: Wishes,
        foretellers: Foretellers | None,
        units: int,
    ):
        self.pool, self.planner, self.estimator, self.wishes = pool, planner, estimator, wishes
        self.mover: Mover | None = None  # set before anything moves
        self.foretellers, self._units, count = foretellers, units, len(pool.slots)
        self.books = Books.empty(count)
        self._open: list[list[tuple[Ticket, str]]] = [[] for _ in range(count)]
        self._passing: list[tuple[int, Ticket]] = []  # through buffers, in the last step
        self._guesses: dict[int, tuple[Routed, npt.NDArray[np.float64]]] = {}  # of a layer's next step, and its tokens
        self._brought: dict[int, list[int]] = {}  # prefetched for a layer's next step
        self._count: CountPredictor | None = None
        if planner.policy.prefetch == "count":
            self._count = CountPredictor(count, units, planner.config.count_decay)

    @property
    def foretold(self) -> str:
        """By what experts are prefetched: `mixed` where layers differ, `none` where nothing is."""
        if self._count is not None:
            return "count"
        kinds = set() if self.foretellers is None else set(self.foretellers.kinds.values())
        return "none" if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"

    def start(self) -> None:
        """Count anew."""
        self.settle()
        self.books = Books.empty(len(self._open))

    def fetch(self, m: int, units: I32, slots: I32, buffers: DevicePool | None) -> list[tuple[Ticket, DevicePool]]:
        """Bring in what this step needs, before anything else that moves: -> where to. Slot -1: into a buffer, which
        nobody else uses during the step."""
        tickets, passing = [], 0
        for unit, slot in zip(units, slots, strict=True):
            if slot >= 0:
                tickets.append((self._move(m, unit, slot, "fetched"), self.pool))
                continue
            assert buffers is not None, "there is nothing to pass through"
            ticket = Ticket(passing, int(unit), 0)
            tickets.append((self.working.move(buffers, m, ticket, urgent=True), buffers))
            self._passing.append((m, ticket))
            passing += 1
        return tickets

    def _move(self, m: int, unit: int, slot: int, why: str) -> Ticket:
        ticket = Ticket(m, int(unit), int(slot))
        self.working.move(self.pool, m, ticket, urgent=why == "fetched")
        self._open[m].append((ticket, why))
        return ticket

    def land(self, m: int) -> None:
        """Tell the planner of the moves in a layer that are done, and count them."""
        for at, ticket in self._passing:
            assert ticket.moved is not None, "whoever asked for it has waited"
            self._arrived(at, ticket, "passed")
        self._passing.clear()
        still = []
        for ticket, why in self._open[m]:
            if ticket.moved is None and self.wishes.always_waits:
                self.working.wait(ticket)
            if ticket.moved is None:
                still.append((ticket, why))
                continue
            self.planner.applied(m, np.array([ticket.unit], np.int32), np.array([ticket.slot], np.int32))
            if why == "prefetched":
                self._brought.setdefault(m, []).append(ticket.unit)
            self._arrived(m, ticket, why)
        self._open[m] = still

    def _arrived(self, m: int, ticket: Ticket, why: str) -> None:
        assert ticket.moved is not None
        self.estimator.observe_move(ticket.moved.gather_s + ticket.moved.transfer_s)
        counts: npt.NDArray[np.int64] = getattr(self.books, why)
        counts[m] += 1
        self.books.moved_bytes[m] += ticket.moved.nbytes

    def foretell(self, m: int, h: jax.Array) -> Asked | None:
        """Ask where the tokens of h [B, D] go in a later layer; the answer is on its way to the host."""
        if self.foretellers is None or (target := self.foretellers.target(m)) is None:
            return None
        if not self.planner.asks(target):
            return None
        ids = self.foretellers.ids(m, h)
        ids.copy_to_host_async()
        return target, ids

    def ahead(self, m: int, asked: Asked | None, active: Bools, tokens: Tokens) -> None:
        """Layer m has run with these tokens: a prefetch for the layer that was asked about, else what the cache policy
        wants here. Only on an idle link."""
        counted = None
        if self._count is not None:
            self._count.observe(m, tokens)
            counted = m + 1 if m + 1 < len(self._open) and self.planner.asks(m + 1) else None
        if self.busy_s() > 0:
            return
        costs = self.estimator.costs()
        if asked is not None or counted is not None:
            target, predicted = self._predicted(asked, counted, active)
            self.land(target)
            found = self.planner.prefetch(target, predicted, costs)
            if found is not None:
                self._move(target, found.units[0], found.slots[0], "prefetched")
                return
        swaps = self.planner.background(m, costs, costs.copy_s)
        for unit, slot in zip(swaps.units, swaps.slots, strict=True):
            self._move(m, unit, slot, "swapped")

    def _predicted(
        self, asked: Asked | None, counted: int | None, active: Bools
    ) -> tuple[int, npt.NDArray[np.float64]]:
        """(number of a layer, tokens [E] that its experts are expected to get)."""
        if asked is not None:
            target, ids = asked
            guess = Routed(np.asarray(ids)[active], np.ones((int(active.sum()), ids.shape[1]), np.float32))
            expected = expected_tokens(guess.ids, self._units)
            self._guesses[target] = guess, expected
            return target, expected
        assert counted is not None and self._count is not None
        return counted, self._count.predict(counted)

    def look_back(self, m: int, there: Routed, tokens: Tokens, bucket: I32) -> None:
        """What came of what was foretold of this step, and of what was brought in for it. bucket: the pool as it is."""
        books = self.books
        for ticket, why in self._open[m]:
            books.late[m] += why == "prefetched" and tokens[ticket.unit] > 0
        for unit in self._brought.pop(m, ()):
            books.useful[m] += tokens[unit] > 0
        if (found := self._guesses.pop(m, None)) is None:
            return
        guess, expected = found
        if len(guess.ids) == len(there.ids):
            hits = (guess.ids[:, :, None] == there.ids[:, None, :]).any(axis=2)
            books.foretold[m] += there.ids.size
            books.foretold_hits[m] += np.count_nonzero(hits)
        absent = np.ones(len(tokens), np.bool_)
        absent[bucket[bucket >= 0]] = False
        if (tokens[absent] > 0).any() and (expected[absent] > 0).any():
            first = np.flatnonzero(absent)[np.argmax(expected[absent])]
            books.top1[m] += 1
            books.top1_hits[m] += tokens[first] == tokens[absent].max()

    def busy_s(self) -> float:
        """For how long the link has work; who always waits asks when it has none."""
        if self.mover is None:
            return 0.0
        if self.wishes.always_waits:
            self.mover.settle()
        return self.mover.busy_s

    def settle(self) -> None:
        """Wait for everything that moves, and tell the planner."""
        if self.mover is not None:
            self.mover.settle()
        for m in range(len(self._open)):
            self.land(m)

    def forget(self) -> None:
        """After a failure: what was moving does not arrive."""
        self.mover, self._open, self._passing = None, [[] for _ in self._open], []

    @property
    def working(self) -> Mover:
        assert self.mover is not None, "nothing can move"
        return self.mover
