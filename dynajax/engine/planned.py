"""Threads mode with plans: scores say what a layer needs, the scheduler moves units in, and what scores low is skipped.

device     attend(i) score hot(i)             | attend(i+1) ...
host                  | plan i in time? cold(i) ----^ y_cold
scheduler  plan(i + lead): gather, transfer, update
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.checks import LiveCheck, LiveCounts
from dynajax.engine.cold import ColdSide
from dynajax.engine.ledger import CHECK_EVERY, Ledger
from dynajax.engine.loaded import Loaded
from dynajax.engine.masked import MaskedPrompt, PredictedScores
from dynajax.engine.observing import Seen
from dynajax.engine.prediction import Place, Predictors
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece
from dynajax.engine.threads import HotTimer, ThreadsRunner, begin_rows
from dynajax.plan import LayerPlan
from dynajax.policy.guard import Guard
from dynajax.scheduler import Ran, Scheduler
from dynajax.timeline import Lanes

log = logging.getLogger(__name__)

PATIENCE = 0.25  # of a layer's time: how long a plan is waited for
SHORTEST_WAIT_S = 1e-4
KEPT = 0.9  # of the estimate of a layer's time, a step


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a PlannedRunner decides."""

    skips: bool  # neurons below their threshold are not computed
    theta: np.uint8  # where no plan says otherwise
    moves: bool  # plans are asked for
    always_waits: bool
    skips_prompts: bool
    lead: int
    deadline_s: float | None = None  # None: a share of a layer's time


class PlannedRunner:
    """Decodes; prefill, and decoding while somebody observes, is `layers`'. See the head of this file."""

    def __init__(
        self,
        loaded: Loaded,
        predictors: Predictors | None,
        ledger: Ledger,
        check: LiveCheck,
        wishes: Wishes,
    ):
        assert isinstance(loaded.layers, ThreadsRunner) and isinstance(loaded.cold, ColdSide), (
            "these plans are of neurons"
        )
        self._loaded, self._programs, self._weights = loaded, loaded.programs, loaded.weights
        self._pool, self._cold, self.layers = loaded.pool, loaded.cold, loaded.layers
        self.predictors, self.ledger, self._check, self.wishes = predictors, ledger, check, wishes
        self.scheduler: Scheduler | None = None  # set before anything runs
        self.guard: Guard | None = None  # set where dynamic placement is on trial
        self.lanes: Lanes | None = None
        self.on_prompt: Callable[[int, npt.NDArray[np.bool_]], None] | None = None  # layer, what is live in it [T, F]
        self.looks_always = False  # all that is live is looked up in every layer
        shapes = loaded.programs.shapes
        self._zeros = np.zeros((shapes.batch, shapes.spec.unit_width), np.float32)
        self._all = np.zeros((shapes.batch, shapes.spec.ffn), np.uint8)  # scores of which every one reaches 0
        self._scores: dict[Place, jax.Array] = {}
        self._prompt = LiveCounts(shapes.spec.layers, shapes.spec.ffn)
        self._timer, self._token, self._layer_s = HotTimer(), 0, 0.0

    @property
    def gave_up(self) -> bool:
        """Whether dynamic placement lost to static on this machine."""
        return self.guard is not None and self.guard.pays is False

    @property
    def _moving(self) -> bool:
        """Whether plans are asked for in this token."""
        return self.wishes.moves and (self.guard is None or self.guard.moving)

    # --- the stepper's side ---

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> None:
        """Prefill of one row; see `Runner`. Which neurons are live in it seeds the frequencies."""
        if self.wishes.skips_prompts:
            assert self.predictors is not None, "nothing can be skipped without scores"
            masked = MaskedPrompt(self._loaded)
            source = PredictedScores(self.predictors, self.wishes.theta)
            masked.run(state, row, pieces, source, on_part, whole=False)
            return
        with self._counting():
            self.layers.prompt(state, row, pieces, on_part)

    def reset_counters(self) -> None:
        """A new generation, or the end of its prefill."""
        scheduler = self._open_scheduler()
        scheduler.start_sequence(*self._prompt.take())
        scheduler.reset()
        self.ledger.reset()
        self._scores.clear()
        self._token = 0
        self._timer = HotTimer()

    def hot_s(self, steps: int) -> float:
        """Estimated seconds of the hot programs in that many decode steps since the last reset."""
        return self._timer.total_s(steps)

    def rows(
        self,
        state: DeviceState,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        active: npt.NDArray[np.bool_],
    ) -> jax.Array:
        """One token in each row through the model; see `Runner`."""
        if self.layers.observer is not None:
            return self.layers.rows(state, ids, positions, active)
        programs, weights = self._programs, self._weights
        begin, compiled_s = time.perf_counter(), programs.compile_s
        x, attend = begin_rows(programs, weights, ids, positions)
        self._timer.next_step()
        active = active.copy()  # the scheduler reads it later
        self._computed, before_s = 0, self._cold.counters.seconds
        y_cold = self._zeros
        for layer, leaves in enumerate(weights.layers):
            k, v, dispatched = state.ks[layer], state.vs[layer], time.perf_counter()
            x, h, state.ks[layer], state.vs[layer] = attend(leaves, k, v, x, y_cold, positions)
            h.copy_to_host_async()
            if self.lanes is not None:
                self.lanes.device(f"attend {layer}", dispatched, h)
            self._predict(layer, x, h)
            plan = self._plan(layer, active)
            x, y_cold = self._ffn(layer, x, h, plan, active)
        self._token += 1
        token_s = time.perf_counter() - begin - (programs.compile_s - compiled_s)
        self._learn(self._cold.counters.seconds - before_s, token_s)
        dispatched = time.perf_counter()
        logits = programs.get("head")(weights.norm, weights.table, x, y_cold)
        if self.lanes is not None:
            self.lanes.device("head", dispatched, logits)
            self.lanes.settle()
        return logits

    # --- one layer ---

    def _predict(self, layer: int, stream: jax.Array, h: jax.Array) -> None:
        """Everything that this layer's input says of it and of later ones."""
        if self.predictors is not None:
            for place in self.predictors.leads_from(layer):
                begin = time.perf_counter()
                scores = self.predictors.score(place, stream, h)
                scores.copy_to_host_async()
                if self.lanes is not None:
                    self.lanes.device(f"score {place[1]}", begin, scores)
                self._scores[place] = scores

    def _plan(self, layer: int, active: npt.NDArray[np.bool_]) -> LayerPlan | None:
        """Ask for the plan of the layer that is `lead` ahead, the first ones' for the next token; take this one's."""
        if not self._moving:
            if self.wishes.moves:
                self._open_scheduler().forget(layer)
            return None
        scheduler, target = self._open_scheduler(), (layer + self.wishes.lead) % len(self._weights.layers)
        leads = range(self.wishes.lead, -1, -1)  # of the first layers only shorter leads are known, from a token ago
        scores = next((self._scores[lead, target] for lead in leads if (lead, target) in self._scores), None)
        scheduler.request(target, scores, active)
        return scheduler.wait(layer, self._deadline_s())

    def _deadline_s(self) -> float | None:
        if self.wishes.always_waits:
            return None
        if self.wishes.deadline_s is not None:
            return self.wishes.deadline_s
        return max(SHORTEST_WAIT_S, PATIENCE * self._layer_s)

    def _ffn(self, layer: int, x: jax.Array, h: jax.Array, plan: LayerPlan | None, active: npt.NDArray[np.bool_]):
        """Both halves: -> x with the device's, y_cold."""
        looks = self.looks_always or (self.wishes.skips and (self._token + layer) % CHECK_EVERY == 0)
        if looks and self.wishes.moves:
            self._open_scheduler().settle()  # nothing may move while it is looked at
        scores, theta_g, theta_c = self._thresholds(layer, plan)
        with self._pool.lock:
            bucket, cold = self._pool.bucket(layer), self._pool.cold(layer)
            marks = None
            if len(bucket):
                x, marks = self._hot(layer, x, h, bucket, scores, theta_g)
        begin = time.perf_counter()
        hidden = np.asarray(h)
        if self._timer.due and len(bucket):  # the device is done: this is the copy alone
            self._open_scheduler().learn("t_sync_s", 1, time.perf_counter() - begin)
        if not active.all():
            hidden = hidden[active]
        units, admit, kept = cold, None, None
        if self.wishes.skips:
            units, admit = admitted(np.asarray(scores), cold, theta_c, active)
            kept = np.asarray(scores)[active] if self.looks_always else None
        live = np.zeros((len(hidden), len(units)), np.uint8)
        y_cold = self._run_cold(layer, hidden, units, admit, live, active)
        self._computed += len(units)
        truth = self._check.live(layer, h, active) if looks else None
        told = Ran(layer=layer, rows=active, bucket=bucket, marks=marks, cold_units=units, cold_live=live, admit=admit,
                   truth=truth, scores=kept)  # fmt: skip
        self._open_scheduler().ran(told)
        return x, y_cold

    def _thresholds(self, layer: int, plan: LayerPlan | None) -> tuple[jax.Array | np.ndarray, np.uint8, np.uint8]:
        """Scores of the layer, and from which of them a unit is computed, here and there. A late plan's do not hold."""
        if not self.wishes.skips:
            return self._all, np.uint8(0), np.uint8(0)
        assert self.predictors is not None, "nothing can be skipped without scores"
        place = self.predictors.prediction.skipping(layer)
        assert place is not None, f"layer {layer} has no scores to skip by"
        if plan is None or plan.theta != self.wishes.theta:  # late, or made without scores
            return self._scores[place], self.wishes.theta, self.wishes.theta
        return self._scores[place], plan.theta_g, plan.theta_c

    def _hot(self, layer: int, x, h, bucket, scores, theta) -> tuple[jax.Array, jax.Array]:
        """The device's half; the caller holds the pool's lock."""
        program = self._programs.get("hot_admitted_rows", len(bucket))
        if self._timer.due:
            h.block_until_ready()
        begin = time.perf_counter()
        x, marks = program(x, h, self._pool.parts(layer), bucket, scores, theta)
        if self._timer.due:
            x.block_until_ready()
            spent = time.perf_counter() - begin
            self._timer.add(spent)
            self._open_scheduler().learn("t_gpu_s", len(bucket), spent)
        marks.copy_to_host_async()
        if self.lanes is not None:
            self.lanes.device(f"hot {layer}", begin, marks)
        return x, marks

    def _run_cold(self, layer: int, hidden, units, admit, live, active) -> npt.NDArray[np.float32]:
        """The host's half, for all rows: those that do not count get zeros."""
        begin = time.perf_counter()
        if not len(units):
            return self._zeros
        y = self._cold.run_chosen(layer, hidden, units, admit, live)
        if self.lanes is not None:
            self.lanes.host(f"cold {layer}", begin)
        if len(y) == len(active):
            return y
        whole = np.zeros_like(self._zeros)
        whole[active] = y
        return whole

    # --- between tokens ---

    def _learn(self, cold_s: float, token_s: float) -> None:
        layer_s = token_s / len(self._weights.layers)
        self._layer_s = KEPT * self._layer_s + (1 - KEPT) * layer_s if self._layer_s else layer_s
        scheduler = self._open_scheduler()
        if self._computed:
            scheduler.learn("t_cpu_s", self._computed, cold_s)
        scheduler.keep_up()
        if self.guard is not None and self.guard.pays is None:
            self.guard.add(token_s)
            if self.gave_up:
                log.warning("moving neurons makes a token %.2f times slower here: from now on they stay where they "
                            "are (--policy dynamic moves them all the same)", self.guard.slowdown)  # fmt: skip

    @contextmanager
    def _counting(self) -> Generator[None]:
        if self.layers.observer is not None or not (self.wishes.moves or self.on_prompt is not None):
            yield
            return
        self.layers.observer = self._check.observer(self._count)
        try:
            yield
        finally:
            self.layers.observer = None

    def _count(self, seen: Seen, live: npt.NDArray[np.bool_]) -> None:
        """A layer of a prompt."""
        self._prompt.add(seen, live)
        if self.on_prompt is not None:
            self.on_prompt(seen.layer, live)

    def _open_scheduler(self) -> Scheduler:
        assert self.scheduler is not None, "no scheduler was started"
        return self.scheduler


def admitted(
    scores: npt.NDArray[np.uint8],  # [B, F]
    cold: npt.NDArray[np.int32],  # [C] units on the host
    theta: np.uint8,
    active: npt.NDArray[np.bool_],  # [B]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8] | None]:
    """(units that some active row wants, [R, C'] which rows want which; None if there is one row, which wants all)."""
    if len(scores) == 1:
        return cold[scores[0].take(cold) >= theta], None
    wanted = scores[active].take(cold, axis=1) >= theta
    some = wanted.any(axis=0)
    return cold[some], np.ascontiguousarray(wanted[:, some]).view(np.uint8)
