"""What drives a PlannedRunner: planner, transfer and scheduler, and how they are made anew after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.budget import unit_bytes
from dynajax.checkpoint import Statistics
from dynajax.config import EngineConfig
from dynajax.engine.checks import LiveCheck
from dynajax.engine.cold import ColdSide
from dynajax.engine.ledger import Ledger, live_of
from dynajax.engine.loaded import Loaded
from dynajax.engine.planned import PlannedRunner, Wishes
from dynajax.engine.planning import Prepared
from dynajax.engine.prediction import knobs_of
from dynajax.engine.skipping import predictors_of
from dynajax.engine.strategy import Strategy
from dynajax.policy.costs import CostEstimator, Costs
from dynajax.policy.guard import Guard
from dynajax.policy.planner import NeuronPlanner
from dynajax.programs.bodies import ADMITTED, LIVE
from dynajax.scheduler import Ran, Scheduler, Sizes, Span
from dynajax.staging import Staging, open_staging
from dynajax.trace import Recorder
from dynajax.transfer import Transfer, fill_pool, piece_sizes

CLOSE_S = 2.0  # how long a scheduler that may hang is waited for
# Bytes a second until the machine was measured, and always under --deterministic: those of a recent desktop.
LINK_BPS, HOST_BPS, DEVICE_BPS = 20e9, 30e9, 600e9
START_S, SYNC_S = 2e-5, 1e-4


def first_costs(host_unit: int, device_unit: int) -> Costs:
    """Costs of a unit before anything was measured."""
    return Costs(
        t0_s=START_S,
        t_gather_s=host_unit / HOST_BPS,
        t_trans_s=host_unit / LINK_BPS,
        t_gpu_s=device_unit / DEVICE_BPS,
        t_cpu_s=host_unit / HOST_BPS,
        t_sync_s=SYNC_S,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Plans:
    """See the head of this file; `make_plans` makes it."""

    prepared: Prepared
    loaded: Loaded
    statistics: Statistics
    staging: str | None  # the way that units are sent; None where nothing moves
    fixed_costs: bool
    around: Callable[[Staging], Staging] | None  # see `Given`
    runner: PlannedRunner
    check_live: LiveCheck
    span: Span | None = None
    recorder: Recorder | None = None
    alarmed: bool = False  # that predictors do worse than they promise was said

    def start(self) -> None:
        """A planner that starts from the pool as it was placed, and a thread that drives it."""
        prepared, spec, loaded = self.prepared, self.prepared.spec, self.loaded
        strategy, host_unit = prepared.strategy, unit_bytes(spec, prepared.host_dtype)
        assert isinstance(strategy, Strategy), "these plans are of neurons"
        knobs = knobs_of(strategy.knobs, prepared.prediction)
        costs = first_costs(host_unit, unit_bytes(spec, prepared.programs.shapes.dtype))
        way = None if self.staging is None else open_staging(self.staging, jax.local_devices()[0], probe_block(self))
        if way is not None and self.around is not None:
            way = self.around(way)
        count = max(1, prepared.staged)
        transfer = Transfer(loaded.store, loaded.pool, loaded.programs, loaded.host, count, way)
        statistics = self.statistics
        self.runner.scheduler = Scheduler(
            NeuronPlanner(prepared.placement, statistics.frequency, strategy.policy, knobs, statistics.mass),
            transfer,
            CostEstimator(costs, knobs.safety),
            Sizes(
                layers=spec.layers,
                units=spec.ffn,
                unit_bytes=host_unit,
                live_mark=LIVE | ADMITTED if spec.activation.has_zeros else ADMITTED,
            ),
            fixed_costs=self.fixed_costs,
            on_ran=self._ran,
        )
        self.tell_scheduler()

    def tell_scheduler(self) -> None:
        """Who is to be told of transfers and scores from now on; what was asked for before is done."""
        scheduler, recorder = self.runner.scheduler, self.recorder
        if scheduler is not None:
            scheduler.settle()
            scheduler.span = self.span
            scheduler.on_scores = None if recorder is None else recorder.add_scores

    def _ran(self, ran: Ran, marks: npt.NDArray[np.uint8] | None) -> None:
        """A layer has run, in the scheduler's thread."""
        self.runner.ledger.add(ran, marks)
        if self.recorder is not None:
            self.recorder.add(ran.layer, live_of(ran, marks, self.prepared.spec.ffn), ran.bucket, ran.scores)

    def restart(self) -> None:
        """After a failure: everything as when the engine was opened, whatever the old thread still does."""
        self.close()
        loaded, prepared = self.loaded, self.prepared
        loaded.pool.clear()
        transfer = Transfer(loaded.store, loaded.pool, loaded.programs, loaded.host, prepared.fill_piece)
        fill_pool(transfer, loaded.pool, prepared.placement)
        self.start()

    def check(self) -> None:
        """Planner and pool agree on what is where."""
        scheduler = self.runner.scheduler
        if scheduler is None or scheduler.failed:
            return
        scheduler.settle()
        scheduler.planner.check()
        for layer in range(self.prepared.spec.layers):
            mine, theirs = scheduler.planner.bucket(layer), self.loaded.pool.bucket(layer)
            assert np.array_equal(mine, theirs), f"layer {layer}: planner and pool disagree"

    def close(self) -> None:
        """End the thread."""
        scheduler, self.runner.scheduler = self.runner.scheduler, None
        if scheduler is not None:
            scheduler.close(CLOSE_S)


def make_plans(
    prepared: Prepared,
    loaded: Loaded,
    aside: ColdSide,  # for exact checks
    statistics: Statistics,
    fingerprint: str,
    *,
    config: EngineConfig,
    around: Callable[[Staging], Staging] | None,
) -> Plans:
    """Load the predictors, compile every update, and start."""
    spec, strategy = prepared.spec, prepared.strategy
    knobs = knobs_of(strategy.knobs, prepared.prediction)
    wishes = Wishes(
        skips=strategy.skips,
        theta=np.uint8(np.rint(knobs.theta * 255)),
        moves=strategy.moves and any(loaded.pool.slots),
        always_waits=config.deterministic,
        skips_prompts=strategy.skips and knobs.sparse_prefill,
        lead=min(knobs.lead, spec.layers - 1),
        deadline_s=knobs.deadline_s,
    )
    check = LiveCheck(loaded, aside, prepared.prediction.density)
    predictors = predictors_of(prepared, loaded, fingerprint, statistics.cosine)
    runner = PlannedRunner(loaded, predictors, Ledger(spec.layers, skips=strategy.skips), check, wishes)
    runner.guard = Guard() if strategy.guarded and wishes.moves else None
    plans = Plans(
        prepared=prepared,
        loaded=loaded,
        statistics=statistics,
        staging=None,
        fixed_costs=config.deterministic,
        around=around,
        runner=runner,
        check_live=check,
    )
    if wishes.moves:
        plans.staging = open_staging(config.staging, jax.local_devices()[0], probe_block(plans)).name
    _compile(plans)
    plans.start()
    return plans


def _compile(plans: Plans) -> None:
    """What decoding needs for every size of a pool, so that it is not compiled then: a longer KV prefix's still is."""
    loaded, prepared = plans.loaded, plans.prepared
    for slots in sorted(set(loaded.pool.slots) - {0}):
        loaded.programs.get("hot_admitted_rows", slots)
        if prepared.strategy.skips:
            loaded.programs.get("live_slots", loaded.programs.shapes.batch, slots)
        if plans.runner.wishes.moves:
            for size in piece_sizes(prepared.staged):
                loaded.programs.get("write", slots, size, loaded.store.dtype.name)


def probe_block(plans: Plans) -> npt.NDArray:
    """A block of as many units as are sent at a time."""
    store = plans.loaded.store
    return np.zeros((max(1, plans.prepared.staged), *store.arenas[0].shape[1:]), store.dtype)
