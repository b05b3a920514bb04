"""Opening an engine: everything checked and planned first, then loaded in the order the budget grants it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import numpy as np
import numpy.typing as npt

from dynajax.budget import MemoryPlan
from dynajax.bundles import HostStore, load_store, one_arena
from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.quantised import PackedCheckpoint, packed_copy
from dynajax.config import EngineConfig, is_packed
from dynajax.config.engine import HostDense
from dynajax.engine.checks import LiveCheck
from dynajax.engine.cold import ColdSide
from dynajax.engine.given import Given
from dynajax.engine.loaded import Loaded
from dynajax.engine.masked import PredictedScores
from dynajax.engine.mixture.cold import ColdExperts
from dynajax.engine.mixture.encoded import EncodedLayers
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.mixture.mixture import Mixture, make_mixture
from dynajax.engine.mixture.runner import MixtureRunner
from dynajax.engine.mixture.token import MixtureTokenRunner
from dynajax.engine.planned import PlannedRunner
from dynajax.engine.planning import Prepared, load_frequency, load_statistics, prepare
from dynajax.engine.plans import Plans, make_plans
from dynajax.engine.prediction import knobs_of
from dynajax.engine.skipping import SkippingRunner, predictors_of
from dynajax.engine.stepper import Stepper
from dynajax.engine.strategy import Strategy
from dynajax.engine.threads import ThreadsRunner
from dynajax.engine.token import TokenRunner
from dynajax.engine.weights import DenseWeights, load_dense
from dynajax.errors import UsageError
from dynajax.memory import PeakMeter
from dynajax.model_folder import model_folder
from dynajax.pool import DevicePool, make_pool
from dynajax.programs import MixturePrograms
from dynajax.text import Tokenizer, load_tokenizer
from dynajax.timeline import Lanes
from dynajax.trace import Recorder
from dynajax.transfer import Transfer, UnitTransfer, fill_pool, fill_units
from hostcompute import HostPool, NumpyPool, default_threads, open_pool

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Parts:
    """What an open engine is made of."""

    config: EngineConfig
    prepared: Prepared
    tokenizer: Tokenizer | None
    known: npt.NDArray[np.bool_] | None  # [V] ids that the tokenizer has; a table may hold more rows
    runner: ThreadsRunner | TokenRunner | SkippingRunner | PlannedRunner | MixtureRunner | MixtureTokenRunner
    loaded: Loaded
    plans: Plans | None  # where decoding goes by plans of neurons
    mixture: Mixture | None  # or of experts
    fingerprint: str  # of the weights
    stepper: Stepper
    meter: PeakMeter
    load_s: float
    progress: Callable[[str, int, int], None]
    lanes: Lanes | None = None  # where a timeline is written
    recorder: Recorder | None = None  # where a trace is recorded

    @property
    def store(self) -> HostStore:
        return self.loaded.store

    @property
    def pool(self) -> DevicePool:
        return self.loaded.pool

    @property
    def cold(self) -> ColdSide | ColdExperts:
        return self.loaded.cold

    @property
    def layers(self) -> ThreadsRunner | MixtureLayers:
        """The runner itself, or what that prefills with."""
        return self.loaded.layers

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary: XLA would clamp what is out of range."""
        spec = self.prepared.spec
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError(f"{self.prepared.model} has no tokenizer: give token ids (--prompt-ids)")
            ids = self.tokenizer.encode(prompt)
        else:
            if not all(isinstance(token, int | np.integer) for token in prompt):
                raise UsageError("a prompt must be a text or a sequence of token ids; generate takes a list of prompts")
            ids = [int(token) for token in prompt]
        if not ids and self.prepared.bos_id is not None:
            ids = [self.prepared.bos_id]
        if not ids:
            raise UsageError("the prompt is empty and the model has no token that begins a text")
        outside = [token for token in ids if not 0 <= token < spec.vocab]
        if outside:
            raise UsageError(f"prompt ids must be in [0, {spec.vocab}), got {outside[0]}")
        return ids

    @property
    def policy(self) -> str:
        """The policy that runs: another than was prepared once dynamic placement was given up."""
        planned = self.plans or self.mixture
        if planned is not None and planned.runner.gave_up:
            return "static"
        return self.prepared.strategy.policy

    @property
    def predictor(self) -> str:
        """What foretells units: of neurons or, for experts, of the layers ahead."""
        if self.mixture is not None:
            return self.mixture.runner.moves.foretold
        return self.prepared.prediction.kind

    @property
    def masks(self) -> PredictedScores | None:
        """The engine's own, if it skips neurons."""
        if isinstance(self.runner, SkippingRunner):
            return PredictedScores(self.runner.predictors, self.runner.theta)
        if self.plans is None or self.plans.runner.predictors is None or not self.plans.runner.wishes.skips:
            return None
        return PredictedScores(self.plans.runner.predictors, self.plans.runner.wishes.theta)

    @property
    def check_live(self) -> LiveCheck | None:
        """What looks exactly at what is skipped."""
        if isinstance(self.runner, SkippingRunner):
            return self.runner.check
        return None if self.plans is None else self.plans.check_live

    def reset_counters(self) -> None:
        """Start counting a new generation's decode steps."""
        self.stepper.reset_counters()
        self.runner.reset_counters()
        self.cold.reset()

    def memory_figures(self) -> dict[str, int]:
        """Budget, plan, measured peak, host weights and pool, in bytes."""
        plan = self.prepared.memory
        return {
            "budget_bytes": plan.budget_bytes,
            "plan_bytes": plan.plan_bytes,
            "peak_bytes": self.meter.peak_bytes(self.prepared.programs.max_temp_bytes),
            "host_bytes": sum(plan.host.values()),
            "pool_bytes": self.pool.nbytes,
        }

    def close(self) -> None:
        """Check the books; the threads end in any case."""
        try:
            if (planned := self.plans or self.mixture) is not None:
                planned.check()
            self.pool.check()
            self.store.check()
        finally:
            if planned is not None:
                planned.close()
            self.cold.close()

    def recover(self) -> None:
        """After a failed step: fresh caches, and where plans moved neurons a fresh pool and a fresh scheduler."""
        self.stepper.reset_state()
        if (planned := self.plans or self.mixture) is not None:
            planned.restart()


def open_parts(
    model: str,
    config: EngineConfig,
    progress: Callable[[str, int, int], None],
    on_plan: Callable[[MemoryPlan], None],
    folder: Path | None = None,  # where the model is, if that was found out already
) -> Parts:
    """Plan, then load. Nothing is allocated before model, settings and budget are known to be good."""
    if folder is None:
        folder = model_folder(model, offline=config.offline, progress=progress)
    checkpoint = Checkpoint.open(folder)
    prepared = prepare(model, config, folder=folder, fingerprint=checkpoint.fingerprint(), progress=progress)
    on_plan(prepared.memory)
    dtype = prepared.programs.shapes.dtype
    weights = packed_copy(checkpoint, dtype, progress) if is_packed(dtype) else checkpoint
    return load_parts(weights, prepared, config, progress)


def host_threads(config: EngineConfig) -> int:
    """Threads for the host's half; more than there are CPUs are granted, with a warning."""
    cpus = len(os.sched_getaffinity(0))
    if config.threads is not None and config.threads > cpus:
        log.warning("--threads %d on %d CPUs: the threads will wait for each other", config.threads, cpus)
    return config.threads or default_threads()


def load_units(
    checkpoint: Checkpoint | PackedCheckpoint,
    prepared: Prepared,
    pool: DevicePool,
    host: HostPool | NumpyPool,
    on_loaded: Callable[[int], None],
    on_placed: Callable[[int], None],
    given: HostStore | None = None,
) -> HostStore:
    """Read every layer's units, if they are not given, and fill the pool -> the host's store, which is empty if all
    are on the device."""
    spec, programs, dtype = checkpoint.spec, prepared.programs, prepared.host_dtype
    if prepared.host_mode != "resident":
        store = given or load_store(checkpoint, dtype, on_loaded)
        if spec.experts is not None:
            fill_units(UnitTransfer(store, programs), pool, prepared.placement, on_placed)
            return store
        fill_pool(Transfer(store, pool, programs, host, prepared.fill_piece), pool, prepared.placement, on_placed)
        return store
    store = one_arena(spec, dtype)

    def load(layer: int) -> None:
        """A layer's units into the arena that serves every layer."""
        checkpoint.fill_bundle(spec.unit_layers[layer], store.arenas[0])
        on_loaded(layer)

    if spec.experts is not None:
        fill_units(UnitTransfer(store, programs), pool, prepared.placement, on_placed, load)
        return HostStore(())
    fill_pool(Transfer(store, pool, programs, host, prepared.fill_piece), pool, prepared.placement, on_placed, load)
    return HostStore(())


def make_mixture_runner(
    prepared: Prepared, config: EngineConfig, loaded: Loaded, fingerprint: str
) -> tuple[MixtureRunner | MixtureTokenRunner, Mixture | None]:
    """What decodes a mixture of experts, and what drives it where it goes by plans."""
    layers = loaded.layers
    assert isinstance(layers, MixtureLayers) and isinstance(loaded.cold, ColdExperts)
    if prepared.host is not None:
        prepared.host.attach(loaded.cold)
        return MixtureTokenRunner(layers, prepared.host), None
    mixture = make_mixture(
        prepared,
        layers,
        loaded.store,
        load_frequency(config.stats, prepared.folder, prepared.spec, fingerprint),
        config=config,
        fingerprint=fingerprint,
    )
    return mixture.runner, mixture


def make_runner(
    prepared: Prepared, config: EngineConfig, loaded: Loaded, fingerprint: str, given: Given
) -> tuple[ThreadsRunner | TokenRunner | SkippingRunner | PlannedRunner, Plans | None]:
    """What decodes, and what drives it where it goes by plans."""
    assert isinstance(loaded.layers, ThreadsRunner) and isinstance(loaded.cold, ColdSide)
    spec, strategy = prepared.spec, prepared.strategy
    assert isinstance(strategy, Strategy), "experts have another runner"
    if strategy.planned or strategy.skips:
        skip_zeros = strategy.sparsity != "dense"
        aside = ColdSide(loaded.store, loaded.pool, loaded.host, spec.activation, skip_zeros=skip_zeros)
        statistics = load_statistics(config.stats, prepared.folder, spec, fingerprint)
        if not strategy.planned:
            predictors = predictors_of(prepared, loaded, fingerprint, statistics.cosine)
            assert predictors is not None, "nothing can be skipped without scores"
            check = LiveCheck(loaded, aside, prepared.prediction.density)
            return SkippingRunner(loaded, predictors, check, knobs_of(strategy.knobs, prepared.prediction)), None
        plans = make_plans(
            prepared,
            loaded,
            aside,
            statistics,
            fingerprint,
            config=config,
            around=given.around,
        )
        return plans.runner, plans
    if prepared.host is not None:
        prepared.host.attach(loaded.cold)
        return TokenRunner(loaded.programs, loaded.weights, loaded.pool, prepared.host, loaded.layers), None
    return loaded.layers, None


def halves(
    prepared: Prepared,
    weights: DenseWeights,
    store: HostStore,
    pool: DevicePool,
    host: HostPool | NumpyPool,
    meter: PeakMeter,
    given: Given,
) -> Loaded:
    """The two halves of every layer, neurons or experts."""
    spec, programs = prepared.spec, prepared.programs
    if isinstance(programs, MixturePrograms):
        cold = ColdExperts(store, pool, host, spec.activation, spec.stepped_units.start)
        kind = MixtureLayers if spec.encoder is None else EncodedLayers
        layers = kind(programs, weights, pool, cold, meter.sample)
    else:
        cold = given.cold(store, pool, host, spec.activation, skip_zeros=prepared.strategy.sparsity != "dense")
        layers = ThreadsRunner(programs, weights, pool, cold, meter.sample)
    return Loaded(programs=programs, weights=weights, store=store, pool=pool, host=host, cold=cold, layers=layers)


def load_parts(
    checkpoint: Checkpoint | PackedCheckpoint,
    prepared: Prepared,
    config: EngineConfig,
    progress: Callable[[str, int, int], None],
    given: Given | None = None,
) -> Parts:
    """Carry out what was prepared: weights to host and device, the pool filled as placed."""
    given = given or Given()
    start, compiled_s = time.perf_counter(), prepared.programs.compile_s
    tokenizer = load_tokenizer(prepared.folder)
    spec, programs, placement = prepared.spec, prepared.programs, prepared.placement
    device = jax.local_devices()[0]
    meter = PeakMeter(device)

    def loaded(before: int) -> Callable[[int], None]:
        """Attention of every layer first, then every layer's FFN: twice as many steps as layers."""
        return lambda layer: progress("load", before + layer + 1, 2 * spec.layers)

    weights = load_dense(checkpoint, programs, device, prepared.host_dtype, loaded(0))
    pool = make_pool(programs.shapes, placement.slots)
    host = open_pool(host_threads(config), cast("HostDense", config.host_dense))

    def placed(layer: int) -> None:
        progress("place", layer + 1, spec.layers)

    store = load_units(checkpoint, prepared, pool, host, loaded(spec.layers), placed, given.store)
    machine = halves(prepared, weights, store, pool, host, meter, given)
    fingerprint = checkpoint.fingerprint()
    plans = mixture = None
    try:
        if spec.experts is None:
            runner, plans = make_runner(prepared, config, machine, fingerprint, given)
        else:
            runner, mixture = make_mixture_runner(prepared, config, machine, fingerprint)
        stepper = Stepper(programs, weights, runner, meter.sample)
    except BaseException:
        if (planned := plans or mixture) is not None:
            planned.close()
        machine.cold.close()
        raise
    meter.sample()
    return Parts(
        config=config,
        prepared=prepared,
        tokenizer=tokenizer,
        known=None if tokenizer is None else tokenizer.known_ids(spec.vocab),
        runner=runner,
        loaded=machine,
        plans=plans,
        mixture=mixture,
        fingerprint=fingerprint,
        stepper=stepper,
        meter=meter,
        load_s=time.perf_counter() - start - (programs.compile_s - compiled_s),
        progress=progress,
    )
