"""Whatever fails while decoding by plans: the caller gets the real error, and the next request an engine like new."""

import gc
import threading
import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dynajax import Engine, scheduler, worker
from dynajax.engine import plans
from dynajax.engine.cold import ColdSide
from dynajax.engine.prediction import Predictors
from dynajax.errors import EngineError, NumericalError
from dynajax.policy.planner import NeuronPlanner
from dynajax.transfer import Transfer
from tests.engine.cases import PROMPT
from tests.engine.planned_cases import FORCED, assert_slots_hold_their_units, budget, opened

NEW = 12


def scheduler_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dynajax-scheduler"]


def answer(engine: Engine) -> tuple:
    """Tokens, and what was counted, as far as it is not sampled."""
    result = engine.generate(PROMPT, max_new_tokens=NEW)
    units = result.units
    return result.token_ids, units.migrated, units.computed_hot_share, units.density, units.late_plans


@pytest.fixture(scope="module")
def fresh(models) -> tuple:
    """The answer of an engine that never failed."""
    with opened(models["relu"], policy="dynamic", sparsity="predicted") as engine:
        found = answer(engine)
    del engine
    gc.collect()  # the peak of the next engine is its own
    return found


@pytest.fixture(scope="module")
def engine(models, fresh):
    """One engine for every failure, one after another."""
    with opened(models["relu"], policy="dynamic", sparsity="predicted") as engine:
        yield engine
    assert scheduler_threads() == []


@pytest.fixture
def patch(monkeypatch):
    monkeypatch.setattr(plans, "CLOSE_S", 0.05)
    return monkeypatch


def plant_nan(engine: Engine) -> None:
    """Into every slot: who finds the old pool has it in every logit."""
    pool = engine._parts.pool
    for layer in range(len(pool.slots)):
        with pool.lock:
            pool._parts[layer] = tuple(jnp.full_like(part, jnp.nan) for part in pool._parts[layer])


def assert_like_new(engine: Engine, fresh: tuple) -> None:
    assert answer(engine) == fresh
    assert_sound(engine)


def assert_sound(engine: Engine) -> None:
    """One thread, right books, and no more memory than was granted."""
    assert scheduler_threads() == [engine._parts.plans.runner.scheduler._thread]
    assert_slots_hold_their_units(engine._parts)
    engine._parts.plans.check()
    memory = engine._parts.memory_figures()
    assert memory["peak_bytes"] <= memory["budget_bytes"]


class Fault:
    """Stands for a method, and from its 20th call on does something else."""

    def __init__(self, patch, owner, name, instead):
        self.calls, self.original = 0, getattr(owner, name)

        def call(*args, **kwargs):
            self.calls += 1
            if self.calls < 20:
                return self.original(*args, **kwargs)
            return instead(self.original, *args, **kwargs)

        patch.setattr(owner, name, call)


def raising(kind, words):
    """A new error each time: an old one's frames would keep the memory of their generation."""

    def instead(*_, **__):
        raise kind(words)

    return instead


def narrow_rows(load, self, layer, units):
    block = load(self, layer, units)
    return replace(block, rows=block.rows[..., :-1])


def slots_outside(plan, self, layer, *args):
    made = plan(self, layer, *args)
    return replace(made, slots=made.slots + np.int32(1000))


def narrow_scores(score, self, place, stream, h):
    return score(self, place, stream, h)[:, :-1]


def narrow_sum(run_chosen, self, *args, **kwargs):
    return run_chosen(self, *args, **kwargs)[:, :-1]


DISK = (OSError, "the disk is on fire")
FAULTS = {
    "planner raises": (NeuronPlanner, "plan", raising(*DISK), EngineError, "the scheduler failed: .*disk is on fire"),
    "planner knows NaN": (NeuronPlanner, "plan", raising(NumericalError, "NaN in it"), NumericalError, "^NaN in it$"),
    "slots outside": (NeuronPlanner, "plan", slots_outside, EngineError, r"slots of layer \d must be in \[0, 4"),
    "transfer raises": (Transfer, "load", raising(*DISK), EngineError, "the scheduler failed: .*disk is on fire"),
    "transfer is narrow": (Transfer, "load", narrow_rows, EngineError, "the scheduler failed: .*shape|avals|types"),
    "update raises": (Transfer, "apply", raising(*DISK), EngineError, "disk is on fire"),
    "books raise": (scheduler.Scheduler, "_observe", raising(*DISK), EngineError, "disk is on fire"),
    "host raises": (ColdSide, "run_chosen", raising(*DISK), OSError, "^the disk is on fire$"),
    "host is narrow": (ColdSide, "run_chosen", narrow_sum, Exception, "shape|avals|types"),
    "predictor raises": (Predictors, "score", raising(RuntimeError, "no score"), RuntimeError, "^no score$"),
    "predictor is narrow": (Predictors, "score", narrow_scores, Exception, "shape|avals|types|out of bounds|index"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_real_error_and_then_an_engine_like_new(engine, fresh, patch, fault):
    owner, name, instead, kind, words = FAULTS[fault]
    before = engine._parts.plans.runner.scheduler
    planted = Fault(patch, owner, name, instead)
    with pytest.raises(kind, match=words):
        engine.generate(PROMPT, max_new_tokens=NEW * 4)
    patch.undo()
    assert planted.calls >= 20
    assert engine._parts.plans.runner.scheduler is not before and before.failed
    plant_nan(engine)  # and once more, into the pool that was just made
    with pytest.raises(NumericalError):
        engine.generate(PROMPT, max_new_tokens=NEW)
    assert_like_new(engine, fresh)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("owner", "name"), [(NeuronPlanner, "plan"), (Transfer, "load")])
def test_a_hang_and_a_thread_that_comes_back(engine, fresh, patch, owner, name, waits):
    """With plans that are waited for, and with a deadline. The old thread goes on in the middle of the next request."""
    release, woke = threading.Event(), threading.Event()

    def hang(original, *args, **kwargs):
        if waits:  # else tokens are computed meanwhile
            plant_nan(engine)
        assert release.wait(60)
        woke.set()
        return original(*args, **kwargs)

    runner = engine._parts.plans.runner
    patch.setattr(runner, "wishes", replace(runner.wishes, always_waits=waits, deadline_s=1e-3))
    patch.setattr(worker, "HANG_S", 0.3)
    planted = Fault(patch, owner, name, hang)
    begin = time.perf_counter()
    with pytest.raises(EngineError, match=r"the scheduler did not answer within 0\.3 s"):
        engine.generate(PROMPT, max_new_tokens=NEW * 8)
    assert time.perf_counter() - begin < 20
    patch.undo()
    assert planted.calls >= 20 and len(scheduler_threads()) == 2
    stream = engine.stream(PROMPT, max_new_tokens=NEW)
    ids = [next(stream).token_id]
    release.set()
    assert woke.wait(20)
    ids += [event.token_id for event in stream]
    assert tuple(ids) == fresh[0]
    for thread in scheduler_threads():
        if thread is not engine._parts.plans.runner.scheduler._thread:
            thread.join(20)
    assert_sound(engine)


def test_a_stopped_stream_leaves_nothing_behind(engine):
    stream = engine.stream(PROMPT, max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert_sound(engine)


def test_an_error_behind_the_last_token(engine, fresh, patch):
    """The scheduler fails when nothing is left to ask of it but its figures."""
    running, seen = engine._parts.plans.runner.scheduler, []
    tell = running._on_ran

    def fail_at_the_end(ran, marks):
        seen.append(ran.layer)
        if len(seen) == 3 * NEW:
            raise OSError(DISK[1])
        tell(ran, marks)

    patch.setattr(running, "_on_ran", fail_at_the_end)
    with pytest.raises(EngineError, match="disk is on fire"):
        engine.generate(PROMPT, max_new_tokens=NEW)
    try:
        assert_like_new(engine, fresh)
    finally:
        engine._parts.recover()


def test_close_while_neurons_move_ends_the_thread(models):
    settings = {"policy": "dynamic", "sparsity": "exact", "deterministic": False, "set": FORCED | {"deadline_s": 0.0}}
    before = scheduler_threads()
    for _ in range(3):
        with opened(models["relu"], **settings) as engine:
            stream = engine.stream(PROMPT, max_new_tokens=NEW)
            next(stream)
            assert len(scheduler_threads()) == len(before) + 1
        assert scheduler_threads() == before
    assert list(stream) == []


def test_a_refused_opening_leaves_no_thread(models, monkeypatch):
    """Whatever fails after the thread was started."""
    monkeypatch.setattr("dynajax.engine.opening.Stepper", raising(*DISK))
    before = scheduler_threads()
    settings = {"policy": "dynamic", "sparsity": "exact", "host_mode": "threads", "ctx": 256}
    with pytest.raises(OSError, match="on fire"):
        Engine.from_pretrained(str(models["relu"]), vram_budget=budget(models["relu"], **settings), **settings)
    left = set(scheduler_threads()) - set(before)
    for thread in left:
        thread._target.__self__.close()  # for the other tests' sake
    assert not left
