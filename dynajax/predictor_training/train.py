"""The run itself: the model reads one window after the other, and the trainer gets what every layer shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.collecting import but_prefill, undisturbed, wanted_of
from dynajax.config import EngineConfig
from dynajax.engine import Engine
from dynajax.engine.checks import Wanted
from dynajax.engine.observing import Seen
from dynajax.engine.prediction import SILU_DENSITY
from dynajax.engine.target import budget_limit
from dynajax.errors import FitError, UsageError
from dynajax.predictor_training.runs import Kept, Run
from dynajax.predictor_training.sources import device_bytes, forms_for, sources_of
from dynajax.predictor_training.texts import Ids, Text, digest_of, seen_tokens
from predictors.fitting import Settings
from predictors.folder import Manifest, write_predictors
from predictors.forms import Shape
from predictors.training import Trainer

Progress = Callable[[str, int, int], None]
LEAST_TOKENS = 100
_HELD_SPANS = 4  # at least so many pieces of the text are held out, of 256 tokens where it is long enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained, and how often its state is kept."""

    lead: int = 1  # predictors for every lead from 0 to this
    kind: str = "auto"
    density: float = SILU_DENSITY  # see `engine.checks.Wanted`
    buffer_bytes: int = 2**30
    passes: int = 4
    seed: int = 0
    checkpoint_tokens: int = 50_000

    def settings(self, tokens: int) -> Settings:
        """For a text of so many tokens; UsageError if those are too few."""
        if tokens < LEAST_TOKENS:
            raise UsageError(f"at least {LEAST_TOKENS} tokens are needed, the text has {tokens}: give more of it")
        usual = Settings()
        span = max(1, min(usual.span, int(tokens * usual.held_share / _HELD_SPANS)))
        samples = max(1, round(tokens / sample_tokens()))
        return Settings(tokens=tokens, samples=samples, span=span, passes=self.passes, buffer_bytes=self.buffer_bytes)


def sample_tokens() -> int:
    """The length of a sample of text, as in the paper."""
    return Settings().sample_tokens


class Feeder:
    """An observer of an engine (`Engine.watch`): hands the trainer a window once its last layer was seen."""

    def __init__(self, trainer: Trainer, wanted: Wanted):
        self._trainer, self._wanted = trainer, wanted
        self._streams: list[npt.NDArray[np.float32]] = []
        self._inputs: list[npt.NDArray[np.float32]] = []
        self._live: list[npt.NDArray[np.bool_]] = []

    def tell(self, seen: Seen) -> None:
        """See `Engine.watch`."""
        assert seen.layer == len(self._live), "layers come in their order"
        self._live.append(self._wanted(seen))
        if "normed" in self._trainer.reads:
            self._inputs.append(seen.hidden)
        if seen.stream is not None:
            self._streams.append(seen.stream)
        if len(self._live) == self._trainer.shape.layers:
            self._trainer.feed(self._streams or None, self._inputs or None, self._live)
            self._streams, self._inputs, self._live = [], [], []


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What a run made."""

    manifest: Manifest
    density: float | None  # of what was to be predicted, where the activation has no zeros
    seconds: float  # of this process
    resumed_at: int  # tokens that were seen before


def train(
    model: str,
    checkpoint: Checkpoint,
    config: EngineConfig,
    recipe: Recipe,
    text: Text,
    out: Path,
    *,
    resume: bool,
    progress: Progress,
) -> Trained:
    """Read the windows with the model, offloaded as `config` says, and write the predictor folder `out`."""
    begun_s, settings, windows = time.monotonic(), recipe.settings(seen_tokens(text.windows)), text.windows
    wanted, config = wanted_of(checkpoint, recipe.density), undisturbed(config)
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
                feeder = Feeder(trainer, wanted)
                engine.watch(feeder.tell, streams="stream" in trainer.reads, values=wanted.density is not None)
                read(engine, trainer, windows, run, recipe.checkpoint_tokens, progress)
        finish(trainer, run, progress)
        manifest, weights = trainer.result(fingerprint=checkpoint.fingerprint(), source=text.source)
        write_predictors(out, manifest, weights)
        run.remove()
    return Trained(manifest=manifest, density=wanted.density, seconds=time.monotonic() - begun_s, resumed_at=resumed_at)


class Fed(Kept, Protocol):
    """A trainer that trains on what it keeps in a buffer."""

    @property
    def waiting(self) -> int: ...

    def finish(self, on_left: Callable[[int], None]) -> None: ...


def read(
    engine: Engine, trainer: Kept, windows: Sequence[Ids], run: Run, checkpoint_tokens: int, progress: Progress
) -> None:
    """Every window that the trainer has not seen; its state is kept now and then, and where `progress` raises."""
    total, begin, saved = seen_tokens(windows), 0, trainer.tokens
    for window in windows:
        count = len(window) - 1
        if begin >= trainer.tokens:
            engine.generate(window.tolist(), max_new_tokens=0)
            try:
                progress("train", trainer.tokens, total)
            except BaseException:
                run.save(trainer)
                raise
            if trainer.tokens - saved >= checkpoint_tokens:
                run.save(trainer)
                saved = trainer.tokens
        begin += count
    assert trainer.tokens == total, (trainer.tokens, total)


def finish(trainer: Fed, run: Run, progress: Progress) -> None:
    """Train on what the buffer still holds, which may be most of a short text."""
    total = trainer.waiting

    def on_left(left: int) -> None:
        try:
            progress("finish", total - left, total)
        except BaseException:
            run.save(trainer)
            raise

    trainer.finish(on_left)


def prepared(
    checkpoint: Checkpoint, config: EngineConfig, recipe: Recipe, settings: Settings
) -> tuple[EngineConfig, Trainer]:
    """The trainer, and the engine's settings with a budget that leaves room for it: on a GPU both are on the device.

    UsageError: the lead or the buffer is out of range. FitError: the budget.
    """
    shape, device = Shape.of(checkpoint.spec), jax.local_devices()[0]
    if recipe.lead >= shape.layers:
        raise UsageError(f"--lead must be less than the model's {shape.layers} layers, got {recipe.lead}")
    leads, forms = range(recipe.lead + 1), forms_for(shape, recipe.kind)
    limit = None if device.platform == "cpu" else budget_limit(config, device)
    if limit is not None:
        needed = device_bytes(shape, leads, forms, settings)
        if needed >= limit:
            raise FitError(
                f"training needs {needed} bytes of device memory beside the model, the budget is {limit}: "
                "raise --vram-budget, lower --lead or give --kind gate"
            )
        config = replace(config, vram_budget=limit - needed)
    try:
        return config, Trainer(shape, leads, forms, settings, recipe.seed, sources_of(checkpoint))
    except ValueError as error:
        if "buffer_bytes" in str(error):
            raise UsageError(f"--buffer is too small: {error}") from error
        raise


def record_of(checkpoint: Checkpoint, config: EngineConfig, recipe: Recipe, windows: Sequence[Ids]) -> dict[str, Any]:
    """What two runs must have in common for one to go on with the other's state."""
    apart = ("checkpoint_tokens", "offline", "deterministic", "predictor")
    both = {f"--{name.replace('_', '-')}": value for name, value in (asdict(config) | asdict(recipe)).items()}
    kept = {name: value for name, value in both.items() if name[2:].replace("-", "_") not in apart}
    return {"version": 1, "model": checkpoint.fingerprint(), "text": digest_of(windows), **kept}
