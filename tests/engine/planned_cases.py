"""Engines that decode by plans: opened half full, forced to move neurons, and watched while they do."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dynajax import Engine
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.opening import Parts
from dynajax.plan import LayerPlan
from dynajax.pool import DevicePool
from dynajax.programs.bodies import ADMITTED
from dynajax.scheduler import Ran

MOVING = ("dynamic", "macro+micro", "macro", "micro", "lru")
FORCED = {"swap_rule": "paper", "window_units": 4}  # on the CPU backend the gain rule rightly moves nothing
CTX = 256
_plans: dict = {}


def budget(folder: Path, share: int = 50, **settings) -> int:
    """For that share, in percent, of the units on the device."""
    key = (folder, tuple(sorted((name, str(value)) for name, value in settings.items())))
    if key not in _plans:
        _plans[key] = plan_for(str(folder), EngineConfig(**settings))
    return _plans[key].smallest_budget_bytes + _plans[key].pool * share // 100


@contextmanager
def opened(folder: Path, share: int = 50, **settings) -> Generator[Engine]:
    """An engine of plans with that share of the units on the device; plans are waited for unless told otherwise."""
    settings = {"ctx": CTX, "host_mode": "threads", "deterministic": True, "set": FORCED, **settings}
    with Engine.from_pretrained(str(folder), vram_budget=budget(folder, share, **settings), **settings) as engine:
        yield engine


def decode(parts: Parts, tokens: np.ndarray, prompt: int, at_step=lambda step: None) -> np.ndarray:
    """Of tokens [T, B] the first `prompt` are prefilled, the others given one by one -> logits [T - prompt, B, V]."""
    parts.reset_counters()
    for row, ids in enumerate(tokens[:prompt].T):
        parts.stepper.prefill(row, ids.tolist(), lambda done, total: None)
    parts.reset_counters()
    active, found = np.ones(tokens.shape[1], np.bool_), []
    for step, ids in enumerate(tokens[prompt:]):
        at = np.full(len(ids), prompt + step, np.int32)
        found.append(parts.stepper.step(ids.astype(np.int32), at, active).copy())  # a view keeps device memory
        at_step(step)
    return np.stack(found)


def watch_ran(parts: Parts, patch: pytest.MonkeyPatch) -> list[Ran]:
    """From now on every Ran is kept, its marks copied off the device."""
    scheduler, kept = parts.plans.runner.scheduler, []
    ran = scheduler.ran

    def keep(what: Ran) -> None:
        marks = None if what.marks is None else np.array(what.marks)
        kept.append(replace(what, marks=marks))
        ran(what)

    patch.setattr(scheduler, "ran", keep)
    return kept


def watch_plans(parts: Parts, patch: pytest.MonkeyPatch) -> list[tuple]:
    """From now on every plan is kept: layer, units, slots, thresholds."""
    planner, kept = parts.plans.runner.scheduler.planner, []
    make = planner.plan

    def plan(layer, *args):
        made: LayerPlan = make(layer, *args)
        thetas = (int(made.theta), int(made.theta_g), int(made.theta_c), made.n_gpu, made.n_cpu)
        kept.append((layer, made.units.tolist(), made.slots.tolist(), *thetas))
        return made

    patch.setattr(planner, "plan", plan)
    return kept


def assert_slots_hold_their_units(parts: Parts) -> None:
    """Slot by slot and part by part: the host's rows, in the pool's type. Nothing may move meanwhile."""
    parts.plans.runner.scheduler.settle()
    for layer, arena in enumerate(parts.store.arenas):
        bucket = parts.pool.bucket(layer)
        for part, found in enumerate(parts.pool.parts(layer)):
            rows = arena[bucket, part, 0]
            rows = rows.view(np.uint16) if found.dtype == jnp.uint16 else rows.astype(found.dtype)
            assert np.array(found).tobytes() == rows.tobytes(), (layer, part)


def assert_each_unit_once(ran: Ran, units: int) -> None:
    """Of a layer in which everything is computed: every unit on exactly one side, for every row."""
    assert np.array_equal(np.sort(np.concatenate([ran.bucket, ran.cold_units])), np.arange(units)), ran.layer
    assert ran.admit is None or ran.admit.all()
    assert ran.marks is None or (ran.marks & ADMITTED).all()


def allocate_nan(self: DevicePool) -> None:
    """In place of DevicePool._allocate: what is never filled is not overlooked."""
    self._parts = [tuple(jnp.full(shape, jnp.nan, dtype) for _ in range(n)) for shape, dtype, n in self._shapes]
