"""What drives a PlannedRunner: predictors, planner, transfer and scheduler, and how they are made anew after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.budget import unit_bytes
from dynajax.bundles import HostStore
from dynajax.config import ModelSpec
from dynajax.engine.checks import LiveCheck
from dynajax.engine.cold import ColdSide
from dynajax.engine.ledger import Ledger
from dynajax.engine.planned import PlannedRunner, Wishes
from dynajax.engine.planning import Prepared
from dynajax.engine.prediction import Predictors, knobs_of, load_predictors, source_of_units
from dynajax.engine.threads import ThreadsRunner
from dynajax.engine.weights import DenseWeights
from dynajax.policy.costs import CostEstimator, Costs
from dynajax.policy.planner import NeuronPlanner
from dynajax.policy.swaps import swap_ladder
from dynajax.pool import DevicePool
from dynajax.programs.bodies import ADMITTED, LIVE
from dynajax.scheduler import Scheduler, Span
from dynajax.staging import Staging, open_staging
from dynajax.transfer import Gatherer, Transfer, fill_pool

log = logging.getLogger(__name__)

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
    store: HostStore
    pool: DevicePool
    host: Gatherer
    staging: Callable[[], Staging] | None  # None where nothing moves
    staging_name: str | None
    frequency: npt.NDArray[np.float32]
    mass: npt.NDArray[np.float32] | None
    fixed_costs: bool
    runner: PlannedRunner
    check_live: LiveCheck
    span: Span | None = None

    def start(self) -> None:
        """A planner that starts from the pool as it was placed, and a thread that drives it."""
        prepared, spec = self.prepared, self.prepared.spec
        strategy, host_unit = prepared.strategy, unit_bytes(spec, prepared.host_dtype)
        knobs = knobs_of(strategy.knobs, prepared.prediction)
        costs = first_costs(host_unit, unit_bytes(spec, prepared.programs.shapes.dtype))
        transfer = Transfer(
            self.store,
            self.pool,
            prepared.programs,
            self.host,
            max(1, prepared.staged),
            None if self.staging is None else self.staging(),
        )
        self.runner.scheduler = Scheduler(
            NeuronPlanner(prepared.placement, self.frequency, strategy.policy, knobs, self.mass),
            transfer,
            CostEstimator(costs, knobs.safety),
            layers=spec.layers,
            units=spec.ffn,
            unit_bytes=host_unit,
            live_mark=LIVE if spec.activation.has_zeros else ADMITTED,
            fixed_costs=self.fixed_costs,
            on_ran=self.runner.ledger.add,
            span=self.span,
        )

    def restart(self) -> None:
        """After a failure: everything as when the engine was opened, whatever the old thread still does."""
        self._end()
        self.pool.clear()
        transfer = Transfer(self.store, self.pool, self.prepared.programs, self.host, self.prepared.fill_piece)
        fill_pool(transfer, self.pool, self.prepared.placement)
        self.start()

    def check(self) -> None:
        """Planner and pool agree on what is where."""
        scheduler = self.runner.scheduler
        if scheduler is None or scheduler.failed:
            return
        scheduler.settle()
        scheduler.planner.check()
        for layer in range(self.prepared.spec.layers):
            mine, theirs = scheduler.planner.bucket(layer), self.pool.bucket(layer)
            assert np.array_equal(mine, theirs), f"layer {layer}: planner and pool disagree"

    def close(self) -> None:
        """End the thread."""
        self._end()

    def _end(self) -> None:
        scheduler, self.runner.scheduler = self.runner.scheduler, None
        if scheduler is not None:
            scheduler.close(CLOSE_S)


def make_plans(
    prepared: Prepared,
    fingerprint: str,
    *,
    weights: DenseWeights,
    store: HostStore,
    pool: DevicePool,
    host: Gatherer,
    cold: ColdSide,
    aside: ColdSide,  # for exact checks
    layers: ThreadsRunner,
    statistics: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None],
    staging: str,
    deterministic: bool,
) -> Plans:
    """Load the predictors, compile every update, and start. statistics: frequency [L, F], mass [L, F], cosine [L, 3]."""
    spec, programs, strategy = prepared.spec, prepared.programs, prepared.strategy
    device = jax.local_devices()[0]
    frequency, mass, cosine = statistics
    predictors = _load(prepared, fingerprint, weights, store, cosine, device)
    knobs = knobs_of(strategy.knobs, prepared.prediction)
    wishes = Wishes(
        skips=strategy.skips,
        theta=np.uint8(np.rint(knobs.theta * 255)),
        moves=strategy.moves and any(pool.slots),
        always_waits=deterministic,
        skips_prompts=strategy.skips and knobs.sparse_prefill,
        lead=prepared.prediction.lead if prepared.prediction.entries else min(knobs.lead, spec.layers - 1),
        deadline_s=knobs.deadline_s,
    )
    ledger = Ledger(spec.layers, skips=strategy.skips)
    check = LiveCheck(programs, weights, pool, aside, store, prepared.prediction.density)
    runner = PlannedRunner(programs, weights, pool, cold, layers, predictors, ledger, check, wishes)
    way = name = None
    if wishes.moves:
        block = np.zeros((prepared.staged, *store.arenas[0].shape[1:]), store.dtype)
        name = open_staging(staging, device, block).name
        chosen = name

        def way() -> Staging:
            return open_staging(chosen, device, block)

        for slots in sorted(set(pool.slots) - {0}):
            for rung in swap_ladder(prepared.staged):
                programs.get("write", slots, rung, store.dtype.name)
    plans = Plans(
        prepared=prepared,
        store=store,
        pool=pool,
        host=host,
        staging=way,
        staging_name=name,
        frequency=frequency,
        mass=mass,
        fixed_costs=deterministic,
        runner=runner,
        check_live=check,
    )
    plans.start()
    return plans


def _load(
    prepared: Prepared,
    fingerprint: str,
    weights: DenseWeights,
    store: HostStore,
    cosine: npt.NDArray[np.float32] | None,
    device: jax.Device,
) -> Predictors | None:
    spec, names = prepared.spec, prepared.programs.leaf_names
    if not prepared.prediction.entries:
        return None

    def leaf(layer: int, name: str) -> npt.NDArray | None:
        return np.asarray(weights.layers[layer][names.index(name)]) if name in names else None

    def source(layer: int):
        norm = "attention_norm" if spec.shared_norm else "ffn_norm"
        weight = leaf(layer, norm)
        assert weight is not None
        return source_of_units(spec, store.arenas[layer], weight, leaf(layer, f"{norm}_bias"))

    def send(array: npt.NDArray) -> jax.Array:
        return jax.device_put(array, device).block_until_ready()

    return load_predictors(prepared.prediction, spec, prepared.programs, fingerprint, source, cosine, send)
