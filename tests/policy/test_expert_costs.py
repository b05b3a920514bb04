"""The estimator of what experts cost: it finds planted lines, follows changes, and a call's own time is nobody's."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.expert_costs import ExpertCostEstimator
from dynajax.policy.experts.records import ExpertCosts

START = ExpertCosts(
    t0_s=1e-5, t_trans_s=4e-4, gpu_s=2e-5, gpu_token_s=5e-7, cpu_s=2.5e-4, cpu_token_s=2e-5, t_sync_s=2e-5
)


def fed(estimator, side, line, count, seed=0, noise=0.0):
    call, expert, token = line
    rng = np.random.default_rng(seed)
    for _ in range(count):
        experts = int(rng.integers(1, 9))
        tokens = experts + int(rng.integers(0, 40))
        seconds = call + experts * expert + tokens * token
        estimator.observe(side, experts, tokens, seconds * (1 + noise * rng.standard_normal()))
    return estimator.costs()


@pytest.mark.parametrize("side", ["gpu", "cpu"])
@pytest.mark.parametrize("call", [0.0, 3e-4])
def test_it_finds_a_planted_line(side, call):
    found = fed(ExpertCostEstimator(START, calls={side: call}), side, (call, 1e-4, 3e-6), 64)
    assert getattr(found, f"{side}_s") == pytest.approx(1e-4, rel=0.1)
    assert getattr(found, f"{side}_token_s") == pytest.approx(3e-6, rel=0.2)
    other = {"gpu": "cpu", "cpu": "gpu"}[side]
    assert getattr(found, f"{other}_s") == getattr(START, f"{other}_s")


def test_it_follows_a_machine_that_becomes_slower():
    estimator = ExpertCostEstimator(START)
    fed(estimator, "cpu", (0.0, 1e-4, 3e-6), 64)
    found = fed(estimator, "cpu", (0.0, 3e-4, 9e-6), 64, noise=0.05)
    assert found.cpu_s == pytest.approx(3e-4, rel=0.2)


def test_what_cannot_be_told_apart_keeps_the_old_ratio():
    estimator = ExpertCostEstimator(START)
    for _ in range(40):
        estimator.observe("cpu", 1, 1, 5.4e-4)  # always the same: twice what was thought
    found = estimator.costs()
    assert found.cpu(1) == pytest.approx(5.4e-4)
    assert found.cpu_s / found.cpu_token_s == pytest.approx(START.cpu_s / START.cpu_token_s)


def test_transfers_are_taken_at_a_percentile():
    estimator = ExpertCostEstimator(START, safety=0.8)
    for seconds in (1e-3,) * 12 + (5e-3,):
        estimator.observe_move(seconds)
    assert estimator.costs().copy_s == pytest.approx(1e-3)  # one wild one changes nothing


def test_fixed_costs_stay():
    estimator = ExpertCostEstimator(START, fixed=True)
    fed(estimator, "cpu", (0.0, 1.0, 1.0), 20)
    estimator.observe_move(1.0)
    assert estimator.costs() == START == replace(START)


def test_nothing_is_no_observation():
    estimator = ExpertCostEstimator(START)
    estimator.observe("gpu", 0, 0, 1.0)
    estimator.observe("gpu", 1, 1, 0.0)
    assert estimator.costs() == START
    with pytest.raises(ValueError, match="safety"):
        ExpertCostEstimator(START, safety=2)
