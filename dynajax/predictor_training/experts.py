"""The run for a mixture of experts: what routes its tokens is foretold, and not which neurons are live."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.collecting import but_prefill, undisturbed
from dynajax.config import EngineConfig
from dynajax.engine import Engine
from dynajax.engine.observing import Seen
from dynajax.engine.target import budget_limit
from dynajax.errors import FitError, UsageError
from dynajax.predictor_training.runs import Run
from dynajax.predictor_training.texts import Text, seen_tokens
from dynajax.predictor_training.train import Progress, Recipe, finish, read, record_of
from predictors.fitting import Settings
from predictors.routing_fitting import RANKS, ROUTER_NAMES, Router, RoutingShape, rate_of
from predictors.routing_folder import RoutingManifest, write_routing
from predictors.routing_training import RoutingTrainer

_TRAINED_BYTES = 16  # a parameter: itself, two moments, its gradient
_WIDE_ARRAYS = 8  # [batch, D] float32 in a step, at most


class RoutingFeeder:
    """An observer of an engine (`Engine.watch`): hands the trainer a window once its last layer was seen."""

    def __init__(self, trainer: RoutingTrainer):
        self._trainer = trainer
        self._hidden: list[npt.NDArray[np.float32]] = []
        self._live: list[npt.NDArray[np.bool_]] = []

    def tell(self, seen: Seen) -> None:
        """See `Engine.watch`: only layers that have experts are shown."""
        layers = self._trainer.shape.layers
        assert seen.layer == layers[len(self._live)], "layers come in their order"
        self._hidden.append(seen.hidden)
        self._live.append(seen.live)
        if len(self._live) == len(layers):
            self._trainer.feed(self._hidden, self._live)
            self._hidden, self._live = [], []


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRouting:
    """What a run made."""

    manifest: RoutingManifest
    seconds: float  # of this process
    resumed_at: int  # tokens that were seen before
    density: None = None  # of neurons


def train_experts(
    model: str,
    checkpoint: Checkpoint,
    config: EngineConfig,
    recipe: Recipe,
    text: Text,
    out: Path,
    *,
    resume: bool,
    progress: Progress,
) -> TrainedRouting:
    """Read the windows with the model, offloaded as `config` says, and write the predictor folder `out`."""
    if checkpoint.spec.encoder is not None:
        raise UsageError("routing behind an encoder cannot be learned yet: --prefetch gate asks routers early")
    begun_s, windows = time.monotonic(), text.windows
    settings = recipe.settings(seen_tokens(windows))
    settings = replace(settings, rate=rate_of(checkpoint.spec.hidden))
    config = undisturbed(config)
    with Run(out) as run:
        run.begin(record_of(checkpoint, config, recipe, windows), resume=resume)
        config, trainer = prepared(checkpoint, config, recipe, settings)
        run.restore(trainer)
        resumed_at = trainer.tokens
        if resumed_at < settings.tokens:
            longest = max(len(window) for window in windows)
            flags: dict[str, Any] = asdict(replace(config, ctx=config.ctx or longest))
            with Engine.from_pretrained(
                model, folder=checkpoint.folder, progress=but_prefill(progress), **flags
            ) as engine:
                engine.watch(RoutingFeeder(trainer).tell)
                read(engine, trainer, windows, run, recipe.checkpoint_tokens, progress)
        finish(trainer, run, progress)
        manifest, weights = trainer.result(fingerprint=checkpoint.fingerprint(), source=text.source)
        write_routing(out, manifest, weights)
        run.remove()
    return TrainedRouting(manifest=manifest, seconds=time.monotonic() - begun_s, resumed_at=resumed_at)


def refuse_lead(lead: int, layers: int) -> None:
    """UsageError: no layer with experts has another one so far on."""
    if layers < 2:
        raise UsageError("only one layer of this model has experts: there is nothing to foretell")
    if not 1 <= lead < layers:
        raise UsageError(
            f"--lead must be from 1 to {layers - 1}, the model has {layers} layers with experts, got {lead}"
        )


def prepared(
    checkpoint: Checkpoint, config: EngineConfig, recipe: Recipe, settings: Settings
) -> tuple[EngineConfig, RoutingTrainer]:
    """The trainer, and the engine's settings with a budget that leaves room for it: on a GPU both are on the device.

    UsageError: the lead or the buffer is out of range. FitError: the budget.
    """
    shape, device = RoutingShape.of(checkpoint.spec), jax.local_devices()[0]
    refuse_lead(recipe.lead, len(shape.layers))
    leads = range(1, recipe.lead + 1)
    limit = None if device.platform == "cpu" else budget_limit(config, device)
    if limit is not None:
        needed = device_bytes(shape, leads, settings)
        if needed >= limit:
            raise FitError(
                f"training needs {needed} bytes of device memory beside the model, the budget is {limit}: "
                "raise --vram-budget or lower --lead"
            )
        config = replace(config, vram_budget=limit - needed)
    try:
        return config, RoutingTrainer(shape, leads, routers_of(checkpoint), settings, recipe.seed)
    except ValueError as error:
        if "buffer_bytes" in str(error):
            raise UsageError(f"--buffer is too small: {error}") from error
        raise


def routers_of(checkpoint: Checkpoint) -> Callable[[int], Router]:
    """Reads the router of a layer, by its number among those that have experts; float32."""

    def router(number: int) -> Router:
        arrays = checkpoint.routing(checkpoint.spec.unit_layers[number], "float32")
        return {name: np.asarray(arrays[name], np.float32) for name in ROUTER_NAMES if name in arrays}

    return router


def device_bytes(shape: RoutingShape, leads: range, settings: Settings) -> int:
    """What a `RoutingTrainer` takes of its device, at most: routers, trained numbers with their moments, a step."""
    places = sum(len(shape.layers) - lead for lead in leads)
    trained = sum(shape.hidden * (2 * rank + 1) for rank in RANKS)
    routers = 4 * len(shape.layers) * shape.experts * (shape.hidden + 2)
    step = 4 * settings.batch * (_WIDE_ARRAYS * shape.hidden + 4 * shape.top_k * shape.experts)
    return routers + places * (_TRAINED_BYTES * trained + 4 * shape.hidden) + len(RANKS) * step
