"""Decoding a mixture of experts by plans: who computes which expert, what is fetched for it, what moves meanwhile.

main   attend, route(i) | plan(i): experts on the device | cold experts | fetched experts | attend, route(i+1)
mover                   | fetch for this step, then for later ones ------^
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np

from dynajax.engine.mixture.groups import Routed
from dynajax.engine.mixture.layers import MixtureLayers, Place, Side, seen_of
from dynajax.engine.mixture.moves import I32, Bools, Moves, Tokens
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece, Rows
from dynajax.engine.threads import HotTimer
from dynajax.mover import Ticket
from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.planner import StepPlan
from dynajax.policy.experts.records import Work, makespan
from dynajax.policy.experts.scan import scan
from dynajax.policy.guard import Guard
from dynajax.pool import DevicePool
from dynajax.timeline import Lanes

log = logging.getLogger(__name__)

JUDGED_EVERY = 16  # steps of a layer from one look at what its assignment cost to the next

OnStep = Callable[[int, Routed, I32, Tokens], None]


class MixtureRunner:
    """See the head of this file."""

    def __init__(self, layers: MixtureLayers, moves: Moves, buffers: DevicePool | None):
        """buffers: slots that experts pass through, for a step or for a prompt; None: they stay where they are."""
        self.layers, self.moves, self._buffers = layers, moves, buffers
        self.guard: Guard | None = None
        self.lanes: Lanes | None = None
        self.on_step: OnStep | None = None  # number of the layer, where its rows go, the pool's bucket then, tokens
        self._prompt = np.zeros((len(layers.pool.slots), layers.spec.units), np.int64)
        self._timer = HotTimer()
        layers.planner = self

    @property
    def gave_up(self) -> bool:
        """Whether moving experts lost to leaving them on this machine."""
        return self.guard is not None and self.guard.pays is False

    @property
    def _moving(self) -> bool:
        return self.moves.wishes.moves and (self.guard is None or self.guard.moving)

    # --- the stepper's side ---

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> None:
        """Prefill of one row; see `Runner`. Where its tokens go seeds what the cache policy knows."""
        self.moves.settle()
        self.layers.prompt(state, row, pieces, on_part)

    def reset_counters(self) -> None:
        """A new generation, or the end of its prefill."""
        self.moves.start()
        self.moves.planner.start_sequence(self._prompt if self._prompt.any() else None)
        self._prompt = np.zeros_like(self._prompt)
        self._timer = HotTimer()

    def forget(self) -> None:
        """After a failure: what was moving does not arrive."""
        self.moves.forget()
        self._prompt = np.zeros_like(self._prompt)

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
        for layer in layers.spec.stepped:
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
        layers, moves, moving = self.layers, self.moves, self._moving
        asked = moves.foretell(m, h) if moving else None
        there = Routed(np.asarray(routed[0])[active], np.asarray(routed[1])[active], np.flatnonzero(active))
        tokens, busy_s = there.counts(layers.spec.units), moves.busy_s()
        moves.land(m)
        costs, room = moves.estimator.costs(), None if moving else 0
        transit = 0 if self._buffers is None or not moving else len(self._buffers.slots)
        plan = moves.planner.plan_step(m, tokens, costs, room=room, transit=transit, copy_busy_s=busy_s)
        bucket = layers.pool.bucket(m)
        moves.look_back(m, there, tokens, bucket)
        tickets = moves.fetch(m, plan.units, plan.slots, self._buffers)
        x = self._hot(m, x, h, plan.hot, there, tokens)
        hidden = np.asarray(h)[active]
        y, host_s = self._cold(m, hidden, there, plan.cold, tokens)
        for ticket, pool in tickets:
            moves.working.wait(ticket)
            place = None if pool is layers.pool else (pool, ticket.layer)
            x = layers.hot_rows(m, x, h, np.array([ticket.unit], np.int32), there, place)
        if layers.watch is not None:
            layers.watch(seen_of(layers.spec, m, hidden, there))
        self._account(m, plan, tokens, bucket, host_s)
        moves.books.rows[m] += len(hidden)
        if self.on_step is not None:
            self.on_step(m, there, bucket, tokens)
        moves.planner.observe(m, tokens)
        if moving:
            moves.ahead(m, asked, active, tokens)
        return x, layers.for_all(y, active)

    def _cold(self, m: int, hidden: Rows, there: Routed, experts: I32, tokens: Tokens) -> tuple[Rows, float]:
        begin = time.perf_counter()
        y = self.layers.cold.run(m, hidden, there, experts)
        spent = time.perf_counter() - begin
        if not len(experts):
            return y, 0.0
        self.moves.estimator.observe("cpu", len(experts), int(tokens[experts].sum()), spent)
        if self.lanes is not None:
            self.lanes.host(f"cold experts {self.layers.spec.unit_layers[m]}", begin)
        return y, spent

    def _hot(self, m: int, x: jax.Array, h: jax.Array, experts: I32, routed: Routed, tokens: Tokens) -> jax.Array:
        if not len(experts):
            return x
        if self._timer.due:
            jax.block_until_ready((x, h))
        programs = self.layers.programs
        begin, compiled_s = time.perf_counter(), programs.compile_s
        x = self.layers.hot_rows(m, x, h, experts, routed)
        if self._timer.due:
            x.block_until_ready()
            spent = time.perf_counter() - begin - (programs.compile_s - compiled_s)
            self._timer.add(spent)
            self.moves.estimator.observe("gpu", len(experts), int(tokens[experts].sum()), spent)
        return x

    # --- a prompt ---

    def sides(self, m: int, tokens: Tokens) -> Side:
        """See `PromptPlanner`. A prompt moves nothing in the pool."""
        self._prompt[m] += tokens
        planner = self.moves.planner
        live = np.flatnonzero(tokens).astype(np.int32)
        resident = planner.resident(m)[live]
        room = 0 if self._buffers is None or self.moves.mover is None else len(tokens)
        work = Work(experts=live, tokens=tokens[live], resident=resident, room=room)
        made = ASSIGN[planner.policy.assign](work, self.moves.estimator.costs())
        return Side(live[made.on_gpu & resident], live[~made.on_gpu], live[made.fetch])

    def stream(self, m: int, experts: I32, use: Callable[[int, Place], None]) -> None:
        """See `PromptPlanner`: while one buffer is read the next are filled."""
        buffers, mover, coming = self._buffers, self.moves.working, deque()
        assert buffers is not None
        for index, expert in enumerate(experts):
            if len(coming) == len(buffers.slots):
                self._use(coming.popleft(), use)
            coming.append(mover.move(buffers, m, Ticket(index % len(buffers.slots), int(expert), 0)))
        while coming:
            self._use(coming.popleft(), use)

    def _use(self, ticket: Ticket, use: Callable[[int, Place], None]) -> None:
        assert self._buffers is not None
        self.moves.working.wait(ticket)
        use(ticket.unit, (self._buffers, ticket.layer))

    # --- the books ---

    def _account(self, m: int, plan: StepPlan, tokens: Tokens, bucket: I32, host_s: float) -> None:
        books, live = self.moves.books, np.flatnonzero(tokens)
        resident = np.zeros(len(tokens), np.bool_)
        resident[bucket[bucket >= 0]] = True
        books.steps[m] += 1
        books.pairs[m] += tokens.sum()
        books.hit_pairs[m] += tokens[resident].sum()
        books.hot_pairs[m] += tokens[plan.hot].sum() + tokens[plan.units].sum()
        books.live[m] += len(live)
        books.hits[m] += np.count_nonzero(resident[live])
        books.host_s[m] += host_s
        if books.steps[m] % JUDGED_EVERY == 1:
            costs = self.moves.estimator.costs()
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
