"""The scheduler's thread is never silent about a failure, does not wait for ever, and is gone after close."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from dynajax import worker as module
from dynajax.errors import EngineError, NumericalError
from tests.scheduler_cases import LAYERS, ROW, SOON, plan_of, ran, schedulers


@pytest.fixture
def make():
    yield from schedulers()


# --- failures ---

CALLS = {
    "request": lambda scheduler: scheduler.request(1, None, ROW),
    "wait": lambda scheduler: scheduler.wait(0, 1.0),
    "ran": lambda scheduler: scheduler.ran(ran(1)),
    "learn": lambda scheduler: scheduler.learn("t_cpu_s", 1, 1.0),
    "start_sequence": lambda scheduler: scheduler.start_sequence(None, 0),
    "settle": lambda scheduler: scheduler.settle(),
    "keep_up": lambda scheduler: scheduler.keep_up(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_is_raised_in_the_next_call(make, call):
    made = make()
    made.planner.fault = OSError("the disk is on fire")
    made.scheduler.request(0, None, ROW)
    while not made.scheduler.failed:
        time.sleep(1e-3)
    for each in (call, CALLS["settle"], CALLS["request"]):  # and in every later one
        with pytest.raises(EngineError, match="the scheduler failed: .*the disk is on fire") as caught:
            each(made.scheduler)
        assert caught.value.__cause__ is made.planner.fault


def test_our_own_errors_keep_their_type(make):
    made = make()
    made.planner.fault = NumericalError("NaN in the scores")
    made.scheduler.request(0, None, ROW)
    with pytest.raises(NumericalError, match="^NaN in the scores$") as caught:
        made.scheduler.wait(0, None)
    assert caught.value is made.planner.fault


@pytest.mark.parametrize("fault", [MemoryError(), ValueError("first line\nsecond line")])
def test_an_error_is_one_line_with_words(make, fault):
    made = make()
    made.planner.fault = fault
    made.scheduler.request(0, None, ROW)
    with pytest.raises(EngineError, match="MemoryError|first line") as caught:
        made.scheduler.wait(0, None)
    assert "\n" not in str(caught.value)


def test_a_failed_move_is_not_reported_as_done(make):
    made = make()
    made.planner.plans[1] = plan_of([4], [0])
    made.transfer.fault = RuntimeError("no link")
    made.scheduler.request(1, None, ROW)
    with pytest.raises(EngineError, match="no link"):
        made.scheduler.wait(1, None)
    assert made.names == [("plan", 1)] and made.scheduler.moves.migrated.sum() == 0


def test_what_a_listener_raises_is_raised_too(make):
    def fail(told, marks):
        raise KeyError("books")

    made = make(on_ran=fail)
    made.scheduler.ran(ran(0))
    with pytest.raises(EngineError, match="books"):
        made.scheduler.settle()


def test_nothing_is_done_after_an_error(make):
    made = make()
    made.stop_at_the_gate()
    made.scheduler.request(1, None, ROW)
    made.scheduler.ran(ran(1))
    made.planner.fault = OSError("gone")
    made.planner.gate.set()
    with pytest.raises(EngineError):
        made.scheduler.wait(1, None)
    made.scheduler.close()
    assert made.planner.events == [] and made.told == []


def test_a_hang_becomes_an_error(make, monkeypatch):
    made = make()
    made.stop_at_the_gate()
    monkeypatch.setattr(module, "HANG_S", 0.05)
    for call in (lambda s: s.wait(0, None), lambda s: s.settle(), lambda s: s.start_sequence(None, 0)):
        with pytest.raises(EngineError, match=r"the scheduler did not answer within 0\.05 s"):
            call(made.scheduler)
    assert made.scheduler.wait(0, 0.0) is None  # who has a deadline goes on ...
    made.scheduler.keep_up()
    for _ in range(5 * LAYERS):
        made.scheduler.ran(ran(0))
    with pytest.raises(EngineError, match="did not answer"):  # ... until too much waits
        made.scheduler.keep_up()


def test_slow_is_not_hung(make, monkeypatch):
    made = make(on_ran=lambda *_: time.sleep(0.03))
    monkeypatch.setattr(module, "HANG_S", 0.3)
    for _ in range(20):
        made.scheduler.ran(ran(0))
    made.scheduler.settle()
    assert len(made.names) == 20


# --- the end ---


def test_close_ends_the_thread_and_drops_what_waits(make):
    made = make()
    made.stop_at_the_gate()
    for layer in range(LAYERS):
        made.scheduler.request(layer, None, ROW)
        made.scheduler.ran(ran(layer))
    threading.Timer(0.05, made.planner.gate.set).start()
    made.scheduler.close()
    assert made.names == [("plan", 0)] and made.told == []  # the one that ran came to its end
    assert made.transfer.closed == 1
    for call in CALLS.values():
        with pytest.raises(EngineError, match="^the scheduler is closed$"):
            call(made.scheduler)


def test_what_failed_is_not_kept_by_its_own_error(make):
    """The error's frames refer to the scheduler, its blocks and its scores: without a cycle they go at once."""
    made = make()
    made.planner.fault = OSError("the disk is on fire")
    made.scheduler.request(0, None, ROW)
    with pytest.raises(EngineError, match="on fire"):
        made.scheduler.wait(0, None)
    gone = weakref.ref(made.scheduler)
    gc.disable()
    try:
        made.scheduler.close()
        made.scheduler, made.planner.fault = SimpleNamespace(close=lambda: None), None
        assert gone() is None
    finally:
        gc.enable()


def test_close_does_not_wait_for_a_thread_that_hangs(make):
    made = make()
    made.stop_at_the_gate()
    begin = time.perf_counter()
    made.scheduler.close(0.05)
    assert time.perf_counter() - begin < SOON / 2
    assert made.transfer.closed == 0  # the thread may still be using it
    made.planner.gate.set()
    made.scheduler.close()
    assert made.transfer.closed == 1  # and gives it up at its end


def test_close_is_silent_about_updates_that_failed(make):
    """What they failed of was raised before; registered memory is given back all the same."""
    made = make()
    failing = FailingTransfer()
    made.transfer.close = failing.close
    made.scheduler.close()
    assert failing.closed == 1


class FailingTransfer:
    closed = 0

    def close(self):
        self.closed += 1
        raise OSError("the update failed")
