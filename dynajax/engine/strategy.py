"""What the engine does about sparsity and placement: every `auto` of the two resolved. Loads nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from dynajax.config import EngineConfig, ModelSpec, NeuronPolicy, PolicyConfig
from dynajax.engine.prediction import find_folder, manifest_of
from dynajax.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How neurons are skipped and placed."""

    sparsity: str  # dense, exact or predicted
    policy: NeuronPolicy
    knobs: PolicyConfig
    trained: Path | None  # folder of predictors
    predicts: bool  # scores may be used at all
    guarded: bool = False  # dynamic placement is given up where it loses to static
    one_program: bool = False  # every unit is where a whole token is computed at once

    @property
    def skips(self) -> bool:
        """Whether neurons that score low are left out."""
        return self.sparsity == "predicted"

    @property
    def moves(self) -> bool:
        """Whether neurons move while decoding."""
        return self.policy not in ("static", "none")

    @property
    def planned(self) -> bool:
        """Whether a layer needs a plan, and so threads mode."""
        return (self.skips or self.moves) and not self.one_program

    @property
    def places(self) -> bool:
        """Whether scores steer placement."""
        return self.predicts and self.policy in ("dynamic", "macro+micro", "micro", "lru")

    def resident(self, spec: ModelSpec, *, skips: bool) -> Strategy:
        """The same where every unit is on the device: nothing to move, and nothing skipped unless it was asked for."""
        if self.moves and not self.guarded:
            log.warning("every neuron is on the device: --policy %s has nothing to move", self.policy)
        sparsity = plain_sparsity(spec) if self.skips and not skips else self.sparsity
        return replace(self, sparsity=sparsity, policy="static", guarded=False, one_program=True)


def resolve(config: EngineConfig, spec: ModelSpec, folder: Path, fingerprint: str | None, platform: str) -> Strategy:
    """Fill every `auto`.

    Sparsity: predicted where the model has trained predictors, else exact, or dense where nothing is exactly zero.
    Policy: dynamic on a GPU, with the guard; static on the CPU backend, where pool and host share one memory and a
    move can never pay, and where without prediction every neuron is needed in every token.
    """
    if config.host_dense != "own":
        raise UsageError(f"--host-dense {config.host_dense} multiplies experts, and this model has none: leave it out")
    for name in ("assign", "cache", "prefetch"):
        if getattr(config, name) != "auto":
            raise UsageError(f"--{name} is for experts, and this model has none: leave it out")
    if config.policy not in ("auto", *get_args(NeuronPolicy)):
        raise UsageError(
            f"--policy {config.policy} places experts; for neurons there are {', '.join(get_args(NeuronPolicy))}"
        )
    trained = find_folder(config.predictor, folder, fingerprint)
    if trained is not None:
        manifest_of(trained, spec, fingerprint)  # of this model, also if it is not going to be used
    sparsity = _sparsity(config, spec, trained)
    policy = cast("NeuronPolicy", config.policy)
    if config.policy == "auto":
        helps = platform != "cpu" and (spec.activation.has_zeros or sparsity == "predicted")
        policy = "dynamic" if helps else "static"
    strategy = Strategy(
        sparsity=sparsity,
        policy=policy,
        knobs=config.knobs,
        trained=trained,
        predicts=config.predictor != "none",
        guarded=config.policy == "auto" and not config.deterministic,
    )
    if strategy.planned and config.host_mode in ("callback", "ffi"):
        cause = "--sparsity predicted" if strategy.skips else f"--policy {policy}"
        raise UsageError(f"{cause} needs --host-mode threads (or auto), got {config.host_mode}")
    if strategy.moves and not strategy.skips and not spec.activation.has_zeros:
        raise UsageError(
            f"--policy {policy} has nothing to follow: {spec.activation.kind} is never zero, and every token needs all "
            "neurons: add --sparsity predicted"
        )
    if trained is None and config.predictor == "auto" and (strategy.skips or strategy.places):
        log.warning("no predictors were trained for this model: low-bit copies of its gates guess (--predictor gate)")
    return strategy


def _sparsity(config: EngineConfig, spec: ModelSpec, trained: Path | None) -> str:
    if config.sparsity == "auto":
        fits = trained is not None and config.host_mode in ("auto", "threads")
        return "predicted" if fits else plain_sparsity(spec)
    if config.sparsity == "exact" and not spec.activation.has_zeros:
        raise UsageError(f"--sparsity exact needs true zeros, which {spec.activation.kind} has not: use dense")
    if config.sparsity == "predicted" and config.predictor == "none":
        raise UsageError("--sparsity predicted needs a predictor: give --predictor auto, gate, mlp or a folder")
    return config.sparsity


def plain_sparsity(spec: ModelSpec) -> str:
    """exact where the activation has true zeros, dense where it has none."""
    return "exact" if spec.activation.has_zeros else "dense"
