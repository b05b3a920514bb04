"""What drives the experts of an open engine: planner, mover and runner, and how they are made anew after a failure."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore
from dynajax.config import EngineConfig
from dynajax.engine.mixture.foretelling import Foretellers
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.mixture.moves import Moves, Wishes
from dynajax.engine.mixture.planning import buffers_of
from dynajax.engine.mixture.probing import START, probed
from dynajax.engine.mixture.runner import MixtureRunner
from dynajax.engine.mixture.strategy import MixtureStrategy
from dynajax.engine.planning import Prepared
from dynajax.mover import Mover, Span
from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.config import expert_config
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.guard import Guard
from dynajax.pool import DevicePool, make_pool
from dynajax.staging import Staging, open_staging
from dynajax.transfer import UnitTransfer, fill_units


@dataclass(slots=True, kw_only=True, eq=False)
class Mixture:
    """See the head of this file."""

    prepared: Prepared
    store: HostStore
    frequency: npt.NDArray[np.float32]  # [M, E]
    staging: str | None
    buffers: DevicePool | None
    runner: MixtureRunner
    span: Span | None = None  # where a timeline is written

    def start(self) -> None:
        """A mover and fresh books."""
        layers, moves = self.runner.layers, self.runner.moves
        moves.planner = make_planner(self.prepared, layers.pool, self.frequency)
        if moves.wishes.moves:
            moves.mover = Mover(
                UnitTransfer(self.store, layers.programs, self._open_staging()), layers.spec.unit_layers
            )
            moves.mover.span = self.span

    def _open_staging(self) -> Staging:
        assert self.staging is not None
        return open_staging(self.staging, jax.local_devices()[0], probe_piece(self.store))

    def restart(self) -> None:
        """After a failed step: nothing moves any more, and every expert is where it was placed at first."""
        runner, pool = self.runner, self.runner.layers.pool
        self.close()
        runner.forget()
        if self.store.arenas:
            pool.clear()
            if self.buffers is not None:
                self.buffers.clear()
            fill_units(UnitTransfer(self.store, runner.layers.programs), pool, self.prepared.placement)
        self.start()

    def tell(self, span: Span | None) -> None:
        """Where moves are written from now on."""
        self.span = span
        if self.runner.moves.mover is not None:
            self.runner.moves.mover.span = span

    def check(self) -> None:
        """The books: planner and pool agree once nothing moves."""
        moves = self.runner.moves
        if moves.mover is not None and not moves.mover.failed:
            moves.settle()
            moves.planner.check()

    def close(self) -> None:
        """The mover ends."""
        if self.runner.moves.mover is not None:
            self.runner.moves.mover.close()


def probe_piece(store: HostStore) -> npt.NDArray:
    """A block as large as what is sent at a time."""
    rows = min(store.arenas[0].shape[2], 4096)
    return np.zeros((rows, *store.arenas[0].shape[3:]), store.dtype)


def make_planner(prepared: Prepared, pool: DevicePool, frequency: npt.NDArray[np.float32]) -> ExpertPlanner:
    """One for what the pool holds now."""
    strategy, spec = prepared.strategy, prepared.spec
    assert isinstance(strategy, MixtureStrategy)
    buckets = [pool.bucket(m) for m in range(len(spec.unit_layers))]
    config = expert_config(strategy.knobs)
    return ExpertPlanner(len(buckets), spec.units, strategy.parts, config, buckets, frequency)


def make_mixture(
    prepared: Prepared,
    layers: MixtureLayers,
    store: HostStore,
    frequency: npt.NDArray[np.float32],
    *,
    config: EngineConfig,
    fingerprint: str,
) -> Mixture:
    """Planner, runner and mover, running."""
    spec, strategy, programs = prepared.spec, prepared.strategy, prepared.programs
    assert isinstance(strategy, MixtureStrategy)
    moves, deterministic = strategy.moves and any(layers.pool.slots) and bool(store.arenas), config.deterministic
    buffers = staging = None
    if moves:
        buffers = make_pool(programs.shapes, (1,) * buffers_of(spec))
        staging = open_staging(config.staging, jax.local_devices()[0], probe_piece(store)).name
    planner = make_planner(prepared, layers.pool, frequency)
    if deterministic or not moves:
        estimator = ExpertCostEstimator(START, strategy.knobs.safety, fixed=deterministic)
    else:
        estimator = probed(layers, store, strategy.knobs.safety, moves=moves)
    wishes = Wishes(moves=moves, always_waits=deterministic)
    foretold = foretellers(prepared, layers, config, fingerprint) if moves else None
    desk = Moves(layers.pool, planner, estimator, wishes, foretold, spec.units)
    runner = MixtureRunner(layers, desk, buffers)
    runner.guard = Guard() if strategy.guarded and moves else None
    made = Mixture(
        prepared=prepared,
        store=store,
        frequency=frequency,
        staging=staging,
        buffers=buffers,
        runner=runner,
    )
    made.start()
    return made


def foretellers(
    prepared: Prepared, layers: MixtureLayers, config: EngineConfig, fingerprint: str
) -> Foretellers | None:
    """What predicts where tokens go in later layers; None where nothing is to be prefetched by it."""
    strategy = prepared.strategy
    assert isinstance(strategy, MixtureStrategy)
    kind = strategy.parts.prefetch
    if kind in ("none", "count"):
        return None
    known = {"predictor": config.predictor, "fingerprint": fingerprint}
    return Foretellers.load(
        layers, kind, strategy.knobs.lead, prepared.folder, asked=config.prefetch != "auto", **known
    )
