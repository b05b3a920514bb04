"""The one prefetch: which, when it pays, and when nothing is brought in."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.experts.prefetch import CountPredictor, choose_prefetch, heaviest_absent, predicted_tokens, saved_s
from dynajax.policy.experts.records import makespan
from dynajax.policy.experts.rivals import fetch_all, resident
from dynajax.policy.experts.scan import scan
from tests.policy.experts.cases import COSTS, draw_costs, draw_work, optimum, work_of

VICTIMS = np.array([5, 2], np.int32)
WORK = work_of([2, 7, 4, 7], [True, False, False, False], room=2)


def test_the_heaviest_absent_expert_takes_the_first_slot():
    assert choose_prefetch(WORK, heaviest_absent(WORK, WORK.tokens), VICTIMS, 1.0, 0.0, scan, COSTS) == (1, 5)


@pytest.mark.parametrize(
    ("work", "victims"),
    [
        (work_of([2, 7], [True, True]), VICTIMS),  # all are here
        (WORK, VICTIMS[:0]),  # no slot to be had
        (replace(WORK, room=0), VICTIMS),
        (replace(WORK, copy_busy_s=1e-6), VICTIMS),  # the link is not idle
        (work_of([], []), VICTIMS),
    ],
)
def test_nothing_to_prefetch(work, victims):
    assert choose_prefetch(work, heaviest_absent(work, work.tokens), victims, 1.0, 0.0, scan, COSTS) is None


def test_confidence_times_saving_must_exceed_the_price():
    saving = saved_s(WORK, 1, scan, COSTS)
    assert saving > 0
    for confidence in (0.2, 0.9):
        price = saving * confidence
        assert (
            choose_prefetch(WORK, heaviest_absent(WORK, WORK.tokens), VICTIMS, confidence, price * 0.999, scan, COSTS)
            is not None
        )
        assert (
            choose_prefetch(WORK, heaviest_absent(WORK, WORK.tokens), VICTIMS, confidence, price * 1.001, scan, COSTS)
            is None
        )


@pytest.mark.parametrize("seed", range(12))
def test_the_saving_is_that_of_the_optima(seed):
    rng = np.random.default_rng(seed)
    work, costs = draw_work(rng, int(rng.integers(1, 9))), draw_costs(rng)
    absent = np.flatnonzero(~work.resident)
    if not len(absent) or not work.room:
        work, absent = replace(work, resident=work.resident & False, room=2), np.arange(len(work.tokens))
    there = work.resident.copy()
    there[absent[0]] = True
    after = replace(work, resident=there, room=work.room - 1)
    expected = optimum(work, costs) - optimum(after, costs)
    assert saved_s(work, int(absent[0]), scan, costs) == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_the_saving_is_under_the_assignment_that_will_be_made():
    static, eager = (saved_s(WORK, 1, assign, COSTS) for assign in (resident, fetch_all))
    assert static == pytest.approx(COSTS.cpu(7))
    both = replace(WORK, resident=np.array([True, True, False, False]), room=1)
    assert eager == makespan(WORK, fetch_all(WORK, COSTS).on_gpu, COSTS) - makespan(
        both, fetch_all(both, COSTS).on_gpu, COSTS
    )
    assert eager != static


def test_predicted_tokens_are_whole_and_start_at_a_half():
    assert predicted_tokens(np.array([0.0, 0.49, 0.5, 0.9, 1.4, 2.5, 2.6])).tolist() == [0, 0, 1, 1, 1, 2, 3]


def test_count_predicts_the_decayed_past():
    predictor = CountPredictor(2, 3, 0.5)
    predictor.observe(1, np.array([4, 0, 2]))
    predictor.observe(1, np.array([0, 0, 2]))
    assert predictor.predict(1).tolist() == [1.0, 0.0, 1.5] and not predictor.predict(0).any()
    last = CountPredictor(1, 3, 0.0)
    last.observe(0, np.array([4, 0, 2]))
    last.observe(0, np.array([0, 1, 0]))
    last.predict(0)[:] = 9
    assert last.predict(0).tolist() == [0.0, 1.0, 0.0]


def test_of_equal_whole_tokens_the_finer_prediction_decides():
    predicted = np.where(WORK.resident, 9.0, 0.7 + 0.1 * np.arange(len(WORK.tokens)))
    place = heaviest_absent(WORK, predicted)
    assert place == np.flatnonzero(~WORK.resident)[-1]
    assert heaviest_absent(replace(WORK, resident=np.ones_like(WORK.resident)), predicted) is None
