"""The thread that decides what moves: it takes scores, asks the planner, brings units in, and keeps the books.

main       attend(i) -> request(i + lead) ... wait(i) -> hot(i), cold(i) -> ran(i)
scheduler             plan, gather, transfer, update ----^            observe

Everything that concerns the planner happens in this thread, in the order in which the main thread asked for it: with
fixed costs and a main thread that always waits, two runs decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax import worker
from dynajax.plan import LayerPlan
from dynajax.policy.costs import CostEstimator, CostName, Costs
from dynajax.policy.planner import NeuronPlanner
from dynajax.transfer import Block, Transfer, piece_sizes

MOST_BACKLOG = 4  # tasks a layer that may wait

Bools = npt.NDArray[np.bool_]
Span = Callable[[str, str, float, float], None]  # lane, name, begin, end
OnScores = Callable[[int, npt.NDArray[np.uint8] | None], None]  # layer, scores [R, F] that its plan goes by


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """What a layer did for a token, R of the B rows of a batch counting. The arrays are nobody else's."""

    layer: int
    rows: Bools  # [B] which rows count
    bucket: npt.NDArray[np.int32]  # [G] slot -> unit at that time
    marks: jax.Array | None  # [B, G] uint8 of the slots (programs.bodies.LIVE, ADMITTED); None: there are none
    cold_units: npt.NDArray[np.int32]  # [C] that the host computed
    cold_live: npt.NDArray[np.uint8]  # [R, C] which were live
    admit: npt.NDArray[np.uint8] | None = None  # [R, C] which rows wanted them; None: all
    truth: Bools | None = None  # [R, F] what was live, computed or not, if somebody looked
    scores: npt.NDArray[np.uint8] | None = None  # [R, F] by which neurons were skipped, if somebody always looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model, as far as the scheduler has to know."""

    layers: int
    units: int  # of a layer
    unit_bytes: int  # in host memory
    live_mark: int  # marks that a slot has whose unit counts as live


@dataclass(slots=True)
class Moves:
    """Sums since the last reset, by layer."""

    plans: npt.NDArray[np.int64]
    late: npt.NDArray[np.int64]
    migrated: npt.NDArray[np.int64]
    migrated_bytes: npt.NDArray[np.int64]
    plan_s: npt.NDArray[np.float64]

    @classmethod
    def none(cls, layers: int) -> Moves:
        return cls(*(np.zeros(layers, np.int64) for _ in range(4)), np.zeros(layers))


class Scheduler(worker.Worker):
    """See the head of this file. Everything that fails in the thread is raised in the main thread's next call."""

    def __init__(
        self,
        planner: NeuronPlanner,
        transfer: Transfer,
        costs: CostEstimator,
        sizes: Sizes,
        *,
        fixed_costs: bool = False,  # never learn
        on_ran: Callable[[Ran, npt.NDArray[np.uint8] | None], None],  # with the marks [R, G]
    ):
        layers = sizes.layers
        self.planner, self.moves = planner, Moves.none(layers)
        self.last: list[LayerPlan | None] = [None] * layers
        self._transfer, self._costs = transfer, costs
        self._layers, self._sizes, self._fixed = layers, sizes, fixed_costs
        self._on_ran = on_ran
        self.span: Span | None = None
        self.on_scores: OnScores | None = None
        # By layer the number of the newest request, of the newest answer, and of the answer that was used.
        self._asked, self._answered, self._used = ([0] * layers for _ in range(3))
        super().__init__("scheduler", lambda: transfer.close())

    # --- the main thread ---

    def request(self, layer: int, scores: jax.Array | npt.NDArray[np.uint8] | None, rows: Bools) -> None:
        """Plan a layer's next run by what is predicted of it: scores [B, F] of the rows that count [B]."""
        self._asked[layer] += 1
        number = self._asked[layer]
        self._give(lambda: self._plan(layer, number, scores, rows))

    def wait(self, layer: int, deadline_s: float | None) -> LayerPlan | None:
        """The plan of the newest request, carried out; None if it is late, was never asked for, or was used before.

        deadline_s None: as long as it takes; EngineError if that is forever.
        """
        number = self._asked[layer]
        if number == self._used[layer]:
            return None
        self._used[layer] = number
        limit = worker.HANG_S if deadline_s is None else deadline_s
        if self._wait_for(lambda: self._answered[layer] >= number, limit):
            return self.last[layer]
        if deadline_s is None:
            raise self._hung()
        self.moves.late[layer] += 1
        return None

    def forget(self, layer: int) -> None:
        """The plan that was asked for last is not going to be used."""
        self._used[layer] = self._asked[layer]

    def ran(self, what: Ran) -> None:
        """A layer has run."""
        self._give(lambda: self._observe(what))

    def note(self, task: Callable[[], None]) -> None:
        """Run something between what was asked for before and after it, in the same thread."""
        self._give(task)

    def learn(self, name: CostName, quantity: float, seconds: float) -> None:
        """The main thread measured a cost."""
        if not self._fixed:
            self._give(lambda: self._costs.observe(name, quantity, seconds))

    def start_sequence(self, counts: npt.NDArray | None, tokens: int) -> None:
        """A prompt was read; see `NeuronPlanner.start_sequence`. What was asked for before is forgotten."""
        self._give(lambda: self.planner.start_sequence(counts, tokens))
        self.settle()
        self._asked, self._answered, self._used = ([0] * self._layers for _ in range(3))

    def keep_up(self) -> None:
        """After a token: do not let more wait than a few tokens' worth."""
        self.settle(MOST_BACKLOG * self._layers)

    def costs(self) -> Costs:
        """What plans go by now."""
        return self._costs.costs()

    def reset(self) -> None:
        """Count anew."""
        self.moves = Moves.none(self._layers)

    # --- the scheduler's own thread ---

    def _plan(self, layer: int, number: int, scores: jax.Array | npt.NDArray[np.uint8] | None, rows: Bools) -> None:
        if number < self._asked[layer] and not self._fixed:  # a newer one waits: nobody needs this one
            return
        known = None if scores is None else np.asarray(scores)[rows]
        if self.on_scores is not None:
            self.on_scores(layer, known)
        begin = time.perf_counter()
        plan = self.planner.plan(layer, known, None, self._costs.costs())
        planned = time.perf_counter()
        self.moves.plans[layer] += 1
        self.moves.plan_s[layer] += planned - begin
        if len(plan.units):
            self._move(layer, plan)
        with self._news:
            self.last[layer], self._answered[layer] = plan, number
            self._news.notify_all()

    def _move(self, layer: int, plan: LayerPlan) -> None:
        """Carry out a plan's swaps, piece by piece: the pool names units only once they are on the device."""
        at, count = 0, len(plan.units)
        sizes = piece_sizes(self._transfer.count)
        while at < count:
            piece = slice(at, at + max(size for size in sizes if size <= count - at))
            begin = time.perf_counter()
            block = self._transfer.load(layer, plan.units[piece])
            self._transfer.apply(layer, block, plan.units[piece], plan.slots[piece])
            self._account(layer, piece.stop - at, begin, block)
            at = piece.stop
        self.planner.applied(layer, plan)

    def _account(self, layer: int, count: int, begin: float, block: Block) -> None:
        """What a piece took."""
        self.moves.migrated[layer] += count
        self.moves.migrated_bytes[layer] += count * self._sizes.unit_bytes
        if not self._fixed:
            costs = self._costs.costs()
            self._costs.observe("t_gather_s", count, block.gather_s)
            if count == 1:
                self._costs.observe("t0_s", 1, max(0.0, block.transfer_s - costs.t_trans_s))
            else:
                self._costs.observe("t_trans_s", count, max(0.0, block.transfer_s - costs.t0_s))
        if self.span is not None:
            sent = begin + block.gather_s
            self.span("copy", f"gather {layer}", begin, sent)
            self.span("copy", f"transfer {layer}", sent, sent + block.transfer_s)

    def _observe(self, what: Ran) -> None:
        marks = None if what.marks is None else np.asarray(what.marks)[what.rows]
        self._on_ran(what, marks)
        live = np.zeros(self._sizes.units, np.bool_)
        live[what.cold_units] = what.cold_live.any(axis=0)
        if marks is not None:
            mark = np.uint8(self._sizes.live_mark)
            live[what.bucket] = ((marks & mark) == mark).any(axis=0)
        self.planner.observe(what.layer, live)
