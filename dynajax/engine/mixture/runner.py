"""Decoding a mixture of experts by plans: who computes which expert, what is fetched for it, what moves meanwhile.

main   attend, route(i) | plan(i): experts on the device | cold experts | fetched experts | attend, route(i+1)
mover                   | fetch for this step, then for later ones ------^
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.mixture.books import Books
from dynajax.engine.mixture.foretelling import Foretellers
from dynajax.engine.mixture.groups import Routed
from dynajax.engine.mixture.layers import MixtureLayers, Side, seen_of
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.engine.threads import HotTimer
from dynajax.mover import Mover, Ticket
from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.planner import ExpertPlanner, StepPlan
from dynajax.policy.experts.prefetch import CountPredictor
from dynajax.policy.experts.records import Work, makespan
from dynajax.policy.experts.scan import scan
from dynajax.policy.guard import Guard
from dynajax.pool import DevicePool
from dynajax.timeline import Lanes

log = logging.getLogger(__name__)

I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
JUDGED_EVERY = 16  # steps of a layer from one look at what its assignment cost to the next

OnStep = Callable[[int, Routed, npt.NDArray[np.int32], npt.NDArray[np.int64]], None]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a MixtureRunner decides."""

    moves: bool  # experts may come and go
    always_waits: bool  # for every move, before the layer it concerns


class MixtureRunner:
    """See the head of this file."""

    def __init__(
        self,
        layers: MixtureLayers,
        planner: ExpertPlanner,
        estimator: ExpertCostEstimator,
        wishes: Wishes,
        buffers: DevicePool | None,  # two slots that a prompt's experts are streamed through
        foretellers: Foretellers | None,
    ):
        self.layers, self.planner, self.estimator, self.wishes = layers, planner, estimator, wishes
        self._buffers, self._foretellers = buffers, foretellers
        self.mover: Mover | None = None  # set before anything moves
        self.guard: Guard | None = None
        self.lanes: Lanes | None = None
        self.on_step: OnStep | None = None  # number of the layer, where its rows go, the pool's bucket then, tokens
        count = len(layers.spec.unit_layers)
        self.books = Books.empty(count)
        self._open: list[list[tuple[Ticket, str]]] = [[] for _ in range(count)]
        self._guesses: dict[int, tuple[Routed, npt.NDArray[np.float64]]] = {}  # of a layer's next step, and its tokens
        self._brought: dict[int, list[int]] = {}  # prefetched for a layer's next step
        self._prompt = np.zeros((count, layers.spec.units), np.int64)
        self._timer = HotTimer()
        self._count: CountPredictor | None = None
        if planner.policy.prefetch == "count":
            self._count = CountPredictor(count, layers.spec.units, planner.config.count_decay)
        layers.planner = self

    @property
    def gave_up(self) -> bool:
        """Whether moving experts lost to leaving them on this machine."""
        return self.guard is not None and self.guard.pays is False

    @property
    def _moving(self) -> bool:
        return self.wishes.moves and (self.guard is None or self.guard.moving)

    # --- the stepper's side ---

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> None:
        """Prefill of one row; see `Runner`. Where its tokens go seeds what the cache policy knows."""
        self.settle()
        self.layers.prompt(state, row, pieces, on_part)

    def reset_counters(self) -> None:
        """A new generation, or the end of its prefill."""
        self.settle()
        self.planner.start_sequence(self._prompt if self._prompt.any() else None)
        self._prompt = np.zeros_like(self._prompt)
        self.books = Books.empty(len(self._open))
        self._timer = HotTimer()

    def hot_s(self, steps: int) -> float:
        """Estimated seconds of the device's experts in that many decode steps since the last reset."""
        return self._timer.total_s(steps)

    def rows(self, state: DeviceState, ids: I32, positions: I32, active: Bools) -> jax.Array:
        """One token in each row through the model; see `Runner`."""
        layers, programs = self.layers, self.layers.programs
        begin, compiled_s = time.perf_counter(), programs.compile_s
        x, prefix = layers.embed_rows(ids, positions)
        self._timer.next_step()
        y_cold = layers.zeros
        for layer in range(layers.spec.layers):
            x, h, routed = layers.attend_rows(state, layer, x, y_cold, positions, prefix)
            y_cold = layers.zeros
            if (m := layers.number(layer)) is not None:
                x, y_cold = self._experts(m, x, h, routed, active)
        logits = layers.logits(x, y_cold)
        self._judge(time.perf_counter() - begin - (programs.compile_s - compiled_s))
        return logits

    # --- one layer ---

    def _experts(self, m: int, x: jax.Array, h: jax.Array, routed, active: Bools) -> tuple[jax.Array, Rows]:
        """Both halves: -> x with the device's, y_cold."""
        numbers, asked = np.flatnonzero(active), self._foretell(m, h)
        there = Routed(np.asarray(routed[0])[active], np.asarray(routed[1])[active], numbers)
        tokens, costs = there.counts(self.layers.spec.units), self.estimator.costs()
        busy_s, room = self._busy_s(), None if self._moving else 0
        self._land(m)
        plan = self.planner.plan_step(m, tokens, costs, room=room, copy_busy_s=busy_s)
        bucket = self.layers.pool.bucket(m)
        self._look_back(m, there, tokens, bucket)
        tickets = [self._move(m, u, s, "fetched") for u, s in zip(plan.units, plan.slots, strict=True)]
        x = self._hot(m, x, h, plan.hot, there, tokens)
        hidden = np.asarray(h)[active]
        begin = time.perf_counter()
        y = self.layers.cold.run(m, hidden, there, plan.cold)
        spent = time.perf_counter() - begin
        if len(plan.cold):
            self.estimator.observe("cpu", len(plan.cold), int(tokens[plan.cold].sum()), spent)
            if self.lanes is not None:
                self.lanes.host(f"cold experts {self.layers.spec.unit_layers[m]}", begin)
        for ticket in tickets:
            self._mover().wait(ticket)
        if tickets:
            self._land(m)
            x = self.layers.hot_rows(m, x, h, plan.units, there)
        if self.layers.watch is not None:
            self.layers.watch(seen_of(self.layers.spec, m, hidden, there))
        self._account(m, plan, tokens, bucket, spent, len(numbers))
        if self.on_step is not None:
            self.on_step(m, there, bucket, tokens)
        self.planner.observe(m, tokens)
        if self._count is not None:
            self._count.observe(m, tokens)
        self._ahead(m, asked, active)
        return x, self.layers.for_all(y, active)

    def _hot(self, m: int, x: jax.Array, h: jax.Array, experts: I32, routed: Routed, tokens) -> jax.Array:
        if not len(experts):
            return x
        if self._timer.due:
            jax.block_until_ready((x, h))
        begin = time.perf_counter()
        x = self.layers.hot_rows(m, x, h, experts, routed)
        if self._timer.due:
            x.block_until_ready()
            spent = time.perf_counter() - begin
            self._timer.add(spent)
            self.estimator.observe("gpu", len(experts), int(tokens[experts].sum()), spent)
        return x

    # --- what moves ---

    def _move(self, m: int, unit: int, slot: int, why: str) -> Ticket:
        ticket = Ticket(m, int(unit), int(slot))
        self._mover().move(self.layers.pool, m, ticket, urgent=why == "fetched")
        self._open[m].append((ticket, why))
        return ticket

    def _land(self, m: int) -> None:
        """Tell the planner of the moves in a layer that are done."""
        still = []
        for ticket, why in self._open[m]:
            if ticket.moved is None and self.wishes.always_waits:
                self._mover().wait(ticket)
            if ticket.moved is None:
                still.append((ticket, why))
                continue
            self.planner.applied(m, *_one(ticket.unit, ticket.slot))
            if why == "prefetched":
                self._brought.setdefault(m, []).append(ticket.unit)
            self.estimator.observe_move(ticket.moved.gather_s + ticket.moved.transfer_s)
            counts: npt.NDArray[np.int64] = getattr(self.books, why)
            counts[m] += 1
            self.books.moved_bytes[m] += ticket.moved.nbytes
        self._open[m] = still

    def _foretell(self, m: int, h: jax.Array) -> tuple[int, jax.Array] | None:
        """Ask where these tokens go in a later layer: its number, and the experts [B, K] on their way to the host."""
        if self._foretellers is None or not self._moving or (target := self._foretellers.target(m)) is None:
            return None
        ids = self._foretellers.ids(m, h)
        ids.copy_to_host_async()
        return target, ids

    def _ahead(self, m: int, asked: tuple[int, jax.Array] | None, active: Bools) -> None:
        """Moves for later: a prefetch for the layer that was asked about, else what the cache policy wants here."""
        if not self._moving or self._busy_s() > 0:
            return
        costs = self.estimator.costs()
        target, predicted = self._predicted(m, asked, active)
        if predicted is not None:
            self._land(target)
            found = self.planner.prefetch(target, predicted, costs)
            if found is not None:
                self._move(target, found.units[0], found.slots[0], "prefetched")
                return
        swaps = self.planner.background(m, costs, costs.copy_s)
        for unit, slot in zip(swaps.units, swaps.slots, strict=True):
            self._move(m, unit, slot, "swapped")

    def _predicted(self, m: int, asked: tuple[int, jax.Array] | None, active: Bools):
        """(number of a layer, tokens [E] that its experts are expected to get), or (m, None)."""
        units = self.layers.spec.units
        if asked is not None:
            target, ids = asked
            guess = Routed(np.asarray(ids)[active], np.ones((int(active.sum()), ids.shape[1]), np.float32))
            expected = guess.counts(units).astype(np.float64)
            self._guesses[target] = guess, expected
            return target, expected
        return (m + 1, self._count.predict(m + 1)) if self._count and m + 1 < len(self._open) else (m, None)

    def _busy_s(self) -> float:
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
            self._land(m)

    def forget(self) -> None:
        """After a failure: what was moving does not arrive."""
        self.mover, self._open = None, [[] for _ in self._open]
        self._prompt = np.zeros_like(self._prompt)

    def _mover(self) -> Mover:
        assert self.mover is not None, "nothing can move"
        return self.mover

    # --- a prompt ---

    def sides(self, m: int, tokens: npt.NDArray[np.int64]) -> Side:
        """See `PromptPlanner`. A prompt moves nothing in the pool."""
        self._prompt[m] += tokens
        room = 0 if self._buffers is None or self.mover is None else len(tokens)
        live = np.flatnonzero(tokens).astype(np.int32)
        resident = self.planner.resident(m)[live]
        work = Work(experts=live, tokens=tokens[live], resident=resident, room=room)
        made = ASSIGN[self.planner.policy.assign](work, self.estimator.costs())
        return Side(live[made.on_gpu & resident], live[~made.on_gpu], live[made.fetch])

    def stream(self, m: int, experts: I32, use: Callable[[int, DevicePool, int], None]) -> None:
        """See `PromptPlanner`: while one buffer is read the other is filled."""
        assert self._buffers is not None
        tickets = []
        for index, expert in enumerate(experts):
            ticket = Ticket(index % 2, int(expert), 0)
            if index >= 2:
                self._mover().wait(tickets[index - 2])
                use(tickets[index - 2].unit, self._buffers, tickets[index - 2].layer)
            tickets.append(self._mover().move(self._buffers, m, ticket))
        for ticket in tickets[-2:]:
            self._mover().wait(ticket)
            use(ticket.unit, self._buffers, ticket.layer)

    # --- the books ---

    def _look_back(self, m: int, there: Routed, tokens: npt.NDArray[np.int64], bucket: I32) -> None:
        """What came of what was foretold of this step, and of what was brought in for it."""
        for ticket, why in self._open[m]:
            self.books.late[m] += why == "prefetched" and tokens[ticket.unit] > 0
        for unit in self._brought.pop(m, ()):
            self.books.useful[m] += tokens[unit] > 0
        if (found := self._guesses.pop(m, None)) is None:
            return
        guess, expected = found
        if len(guess.ids) == len(there.ids):
            hits = (guess.ids[:, :, None] == there.ids[:, None, :]).any(axis=2)
            self.books.foretold[m] += there.ids.size
            self.books.foretold_hits[m] += np.count_nonzero(hits)
        absent = np.ones(len(tokens), np.bool_)
        absent[bucket[bucket >= 0]] = False
        if (tokens[absent] > 0).any() and (expected[absent] > 0).any():
            first = np.flatnonzero(absent)[np.argmax(expected[absent])]
            self.books.top1[m] += 1
            self.books.top1_hits[m] += tokens[first] == tokens[absent].max()

    def _account(
        self, m: int, plan: StepPlan, tokens: npt.NDArray[np.int64], bucket: I32, host_s: float, rows: int
    ) -> None:
        books, live = self.books, np.flatnonzero(tokens)
        resident = np.zeros(len(tokens), np.bool_)
        resident[bucket[bucket >= 0]] = True
        books.steps[m] += 1
        books.rows[m] += rows
        books.pairs[m] += tokens.sum()
        books.hit_pairs[m] += tokens[resident].sum()
        books.hot_pairs[m] += tokens[plan.hot].sum() + tokens[plan.units].sum()
        books.live[m] += len(live)
        books.hits[m] += np.count_nonzero(resident[live])
        books.host_s[m] += host_s if len(plan.cold) else 0.0
        if books.steps[m] % JUDGED_EVERY == 1:
            costs = self.estimator.costs()
            here = makespan(plan.work, plan.on_gpu, costs)
            books.judged[m] += 1
            books.device_s[m] += costs.gpu(tokens[np.concatenate((plan.hot, plan.units))]).sum()
            books.cold_s[m] += costs.cpu(tokens[plan.cold]).sum()
            books.makespan_s[m] += here
            books.best_s[m] += min(here, makespan(plan.work, scan(plan.work, costs).on_gpu, costs))

    def _judge(self, token_s: float) -> None:
        if self.guard is not None and self.guard.pays is None:
            self.guard.add(token_s)
            if self.gave_up:
                log.warning("moving experts makes a token %.2f times slower here: from now on they stay where they "
                            "are (--policy scan moves them all the same)", self.guard.slowdown)  # fmt: skip


def _one(unit: int, slot: int) -> tuple[I32, I32]:
    return np.array([unit], np.int32), np.array([slot], np.int32)
