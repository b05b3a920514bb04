"""The scheduler's thread: everything in order, the newest request first, plans carried out before they are given."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.config import PolicyConfig
from dynajax.plan import Placement
from dynajax.policy.costs import CostEstimator
from dynajax.policy.planner import NeuronPlanner
from dynajax.programs.bodies import ADMITTED, LIVE
from dynajax.scheduler import Scheduler, Sizes
from dynajax.staging import Plain
from dynajax.transfer import Transfer, fill_pool
from hostcompute import NumpyPool
from tests.scheduler_cases import COSTS, FFN, LAYERS, ROW, SOON, UNIT_BYTES, Made, plan_of, ran, schedulers
from tests.test_transfer import UNITS, assert_filled, pool_for, store_of


@pytest.fixture
def make():
    yield from schedulers()


# --- order ---


def test_tasks_are_done_in_the_order_in_which_they_were_given(make):
    made = make()
    scheduler = made.scheduler
    made.stop_at_the_gate()
    scheduler.request(1, None, ROW)
    scheduler.ran(ran(0))
    scheduler.request(2, None, ROW)
    scheduler.ran(ran(2))
    scheduler.ran(ran(1))
    made.planner.gate.set()
    scheduler.settle()
    assert made.names == [("plan", 0), ("plan", 1), ("observe", 0), ("plan", 2), ("observe", 2), ("observe", 1)]
    assert [told.layer for told, _ in made.told] == [0, 2, 1]
    assert scheduler.moves.plans.tolist() == [1, 1, 1] and (scheduler.moves.plan_s > 0).all()


def test_an_answer_is_a_plan_that_was_carried_out(make):
    made = make()
    made.planner.plans[1] = plan_of([4, 5], [0, 2])
    made.scheduler.request(1, None, ROW)
    plan = made.scheduler.wait(1, None)
    assert plan is made.planner.plans[1] is made.scheduler.last[1]
    assert made.planner.events == [
        ("plan", 1, None),
        ("load", 1, [4, 5]),
        ("apply", [4, 5], [0, 2]),
        ("applied", 1, [4, 5]),
    ]
    assert made.scheduler.wait(1, 0.0) is None and made.scheduler.moves.late.sum() == 0  # it holds once


def test_scores_are_those_of_the_rows_that_count(make):
    made = make()
    scores = jnp.arange(3 * FFN, dtype=jnp.uint8).reshape(3, FFN)
    made.scheduler.request(1, scores, np.array([True, False, True]))
    made.scheduler.wait(1, None)
    assert made.planner.events == [("plan", 1, [list(range(FFN)), list(range(2 * FFN, 3 * FFN))])]


# --- late plans, and many requests ---


def test_a_late_plan_is_counted_and_not_applied_as_thresholds(make):
    made = make()
    made.stop_at_the_gate()
    begin = time.perf_counter()
    assert made.scheduler.wait(0, 0.02) is None and made.scheduler.wait(0, 0.0) is None
    assert 0.02 <= time.perf_counter() - begin < SOON / 2
    assert made.scheduler.moves.late.tolist() == [1, 0, 0]
    made.planner.gate.set()
    made.scheduler.settle()
    assert made.scheduler.wait(0, None) is None  # what was late stays so
    made.scheduler.request(0, None, ROW)
    assert made.scheduler.wait(0, None).theta == 128
    assert made.scheduler.moves.late.tolist() == [1, 0, 0]
    made.scheduler.reset()
    assert made.scheduler.moves.late.tolist() == made.scheduler.moves.plans.tolist() == [0, 0, 0]


def test_an_old_plan_is_no_answer_to_a_new_request(make):
    made = make()
    made.scheduler.request(0, None, ROW)
    assert made.scheduler.wait(0, None) is not None
    made.stop_at_the_gate()
    assert made.scheduler.wait(0, 0.0) is None
    assert made.scheduler.moves.late.tolist() == [1, 0, 0]


def test_what_was_never_asked_for_is_not_late(make):
    made = make()
    assert made.scheduler.wait(1, None) is None and made.scheduler.wait(1, 0.0) is None
    assert made.scheduler.moves.late.tolist() == [0, 0, 0]


def request_thrice(made: Made) -> list:
    """Three requests for layer 1 while the thread stands -> what was planned for it."""
    made.stop_at_the_gate()
    for score in (1, 2, 3):
        made.scheduler.request(1, np.full((1, FFN), score, np.uint8), ROW)
    made.planner.gate.set()
    assert made.scheduler.wait(1, None) is not None
    made.scheduler.settle()
    return [event[2][0][0] for event in made.planner.events if event[:2] == ("plan", 1)]


def test_the_newest_request_wins(make):
    made = make()
    assert request_thrice(made) == [3]
    assert made.scheduler.moves.plans.tolist() == [1, 1, 0]


def test_with_fixed_costs_every_request_is_planned(make):
    """Which ones are skipped depends on time; two runs have to decide alike."""
    assert request_thrice(make(fixed_costs=True)) == [1, 2, 3]


def test_a_new_sequence_forgets_what_was_asked(make):
    made = make()
    made.scheduler.request(1, None, ROW)
    made.scheduler.start_sequence(None, 5)
    assert made.names == [("plan", 1), ("start", None)]
    assert made.scheduler.wait(1, None) is None
    made.scheduler.request(1, None, ROW)
    assert made.scheduler.wait(1, None) is not None


# --- what the planner learns ---


def test_live_is_what_some_counting_row_found_on_either_side(make):
    made = make()
    marks = np.array([[LIVE | ADMITTED, ADMITTED, 0], [LIVE, LIVE, LIVE], [0, 0, LIVE]], np.uint8)
    rows, bucket = np.array([True, False, True]), np.array([7, 3, 9], np.int32)
    cold = {"cold_units": np.array([0, 1, 11], np.int32), "cold_live": np.array([[1, 0, 0], [1, 0, 1]], np.uint8)}
    made.scheduler.ran(ran(1, rows=rows, bucket=bucket, marks=jnp.asarray(marks), **cold))
    made.scheduler.settle()
    assert made.planner.events == [("observe", 1, [0, 7, 9, 11])]
    [(told, seen)] = made.told
    assert told.layer == 1
    np.testing.assert_array_equal(seen, marks[rows])


def test_without_zeros_live_is_what_was_computed(make):
    made = make(live_mark=ADMITTED)
    marks = jnp.asarray([[LIVE | ADMITTED, LIVE, ADMITTED]], jnp.uint8)
    made.scheduler.ran(ran(0, bucket=np.array([5, 6, 7], np.int32), marks=marks))
    made.scheduler.settle()
    assert made.planner.events == [("observe", 0, [5, 7])]


def test_costs_are_learned(make):
    made = make()
    made.planner.plans[1] = plan_of([4, 5, 6, 7], [0, 1, 2, 3])
    for _ in range(3):
        made.scheduler.request(1, None, ROW)
        made.scheduler.wait(1, None)
        made.scheduler.learn("t_cpu_s", 10, 0.5)
    made.scheduler.settle()
    costs = made.scheduler.costs()
    assert (costs.t_gather_s, costs.t_trans_s, costs.t_cpu_s) == pytest.approx((2e-3, 3e-3, 0.05))
    assert (costs.t0_s, costs.t_gpu_s) == (COSTS.t0_s, COSTS.t_gpu_s)


def test_fixed_costs_are_never_learned(make):
    made = make(fixed_costs=True)
    made.planner.plans[1] = plan_of([4, 5, 6, 7], [0, 1, 2, 3])
    made.scheduler.request(1, None, ROW)
    made.scheduler.wait(1, None)
    made.scheduler.learn("t_cpu_s", 10, 0.5)
    made.scheduler.settle()
    assert made.scheduler.costs() == COSTS


# --- pieces ---


def test_a_large_plan_goes_in_pieces_of_rungs(make):
    spans = []
    made = make()
    made.scheduler.span = lambda *span: spans.append(span)
    units, slots = np.arange(100, 127), np.arange(27)[::-1]
    made.planner.plans[2] = plan_of(units, slots)
    made.scheduler.request(2, None, ROW)
    made.scheduler.wait(2, None)
    _, *middle, last = made.planner.events
    loads, applies = middle[::2], middle[1::2]
    assert [len(event[2]) for event in loads] == [8, 8, 8, 2, 1]
    assert [unit for event in loads for unit in event[2]] == units.tolist()
    assert [unit for event in applies for unit in event[1]] == units.tolist()
    assert [slot for event in applies for slot in event[2]] == slots.tolist()
    assert last == ("applied", 2, units.tolist())  # once, when all of it is there
    assert made.scheduler.moves.migrated.tolist() == [0, 0, 27]
    assert made.scheduler.moves.migrated_bytes.tolist() == [0, 0, 27 * UNIT_BYTES]
    assert [(lane, name) for lane, name, *_ in spans] == 5 * [("copy", "gather 2"), ("copy", "transfer 2")]
    assert all(begin <= end for *_, begin, end in spans)


def test_pieces_arrive_in_the_pool():
    """The real planner, transfer and pool: plans of four swaps, two units at a time."""
    store = store_of(LAYERS)
    pool, programs = pool_for((10,) * LAYERS)
    placement = Placement(tuple(np.arange(10, dtype=np.int32) for _ in range(LAYERS)), UNITS)
    transfer = Transfer(store, pool, programs, NumpyPool(1), 2, Plain(jax.local_devices()[0]))
    fill_pool(transfer, pool, placement)
    config = PolicyConfig(swap_rule="paper", window_units=4, keep_share=0.0)
    planner = NeuronPlanner(placement, np.zeros((LAYERS, UNITS), np.float32), "micro", config)
    sizes = Sizes(layers=LAYERS, units=UNITS, unit_bytes=UNIT_BYTES, live_mark=LIVE)
    scheduler = Scheduler(planner, transfer, CostEstimator(COSTS), sizes, on_ran=lambda *_: None)
    rng = np.random.default_rng(0)
    for token in range(30):
        layer = token % LAYERS
        scheduler.request(layer, rng.integers(0, 256, (1, UNITS)).astype(np.uint8), ROW)
        assert len(scheduler.wait(layer, None).units) > 0
    scheduler.settle()
    planner.check()
    pool.check()
    transfer.drain()
    assert_filled(pool, store, [planner.bucket(layer) for layer in range(LAYERS)])
    moved = int(scheduler.moves.migrated.sum())
    assert moved > 30 and {kind[2] for kind in programs.kinds} == {2}
    with pytest.raises(AssertionError):
        assert_filled(pool, store, [np.arange(10)] * LAYERS)
    scheduler.close()
