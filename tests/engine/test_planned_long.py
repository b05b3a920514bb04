"""Thousands of random moves, with plans that come too late: nothing is lost, computed twice, or read too soon."""

import time
from dataclasses import replace

import numpy as np
import pytest

from dynajax.engine.planned import PlannedRunner
from dynajax.policy.planner import ABSENT, RESIDENT, NeuronPlanner
from dynajax.pool import DevicePool
from dynajax.programs.bodies import ADMITTED, LIVE
from dynajax.testing import TINY_GQA, make_checkpoint
from dynajax.testing.oracle import family_logits
from dynajax.transfer import Transfer
from tests.engine.planned_cases import (
    allocate_nan,
    assert_each_unit_once,
    assert_slots_hold_their_units,
    decode,
    opened,
    watch_ran,
)  # fmt: skip

SPEC = replace(TINY_GQA, layers=3, ffn=1280, vocab=128)  # so wide that four units move at a time
PREFILLED, ROWS, LENGTH = 5, 2, 155  # of every sequence
LONG = 14  # sequences: more than 2,000 steps


class RandomPlanner(NeuronPlanner):
    """Moves whatever it likes, takes its time, and says nothing else than its base."""

    rng = np.random.default_rng(0)

    def _swaps(self, layer, scores, theta, window_units, costs):
        where, bucket = self._where[layer], self._bucket[layer]
        absent, evictable = np.flatnonzero(where == ABSENT), np.flatnonzero(where[bucket] == RESIDENT)
        count = int(self.rng.integers(0, 20)) if self.rng.random() < 0.8 else 0
        if self.rng.random() < 0.2:
            time.sleep(self.rng.random() * 1e-3)
        units = self.rng.permutation(absent)[:count].astype(np.int32)
        return units, self.rng.permutation(evictable)[: len(units)].astype(np.int32)


def impatient(self: PlannedRunner) -> float | None:
    """A deadline of its own for every plan: now, soon, or when it is there."""
    return (0.0, 2e-4, None)[int(RandomPlanner.rng.integers(3))]


def retire_dirty(self: Transfer) -> None:
    """In place of Transfer._retire: what may be overwritten is, at once."""
    staging, fence = self._busy.popleft()
    fence.block_until_ready()
    staging[...] = np.nan
    self._free.append(staging)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("long") / "m", SPEC)


@pytest.fixture
def random_moves(monkeypatch):
    """Engines of this test move at random, start from pools of NaN, and reuse staging memory as early as they may."""
    monkeypatch.setattr("dynajax.engine.plans.NeuronPlanner", RandomPlanner)
    monkeypatch.setattr(RandomPlanner, "rng", np.random.default_rng(0))
    monkeypatch.setattr(DevicePool, "_allocate", allocate_nan)
    monkeypatch.setattr(PlannedRunner, "_deadline_s", impatient)
    monkeypatch.setattr(Transfer, "_retire", retire_dirty)
    return monkeypatch


def tokens_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 128, (LENGTH, ROWS))


def run(folder, patch, seeds, every: int, **settings) -> dict:
    """Sequences one after another, with every check there is -> what happened."""
    with opened(folder, batch=ROWS, deterministic=False, **settings) as engine:
        parts = engine._parts
        seen = watch_ran(parts, patch)

        def at_step(step: int) -> None:
            for ran in seen:
                assert_each_unit_once(ran, SPEC.ffn)
            seen.clear()
            if step % every == 0:
                assert_slots_hold_their_units(parts)

        late = migrated = 0
        for seed in seeds:
            tokens = tokens_of(seed)
            found = decode(parts, tokens, PREFILLED, at_step)
            expected = np.stack([family_logits(folder, row)[PREFILLED:] for row in tokens.T], axis=1)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
            parts.plans.check()
            moves = parts.plans.runner.scheduler.moves
            late, migrated = late + moves.late.sum(), migrated + moves.migrated.sum()
        assert_slots_hold_their_units(parts)
        kinds = {kind[2] for kind in parts.prepared.programs.kinds if kind[0] == "write"}
        return {"late": int(late), "migrated": int(migrated), "pieces": kinds}


def assert_busy(happened: dict, steps: int) -> None:
    """It was what it set out to be."""
    assert happened["migrated"] > 10 * steps and happened["late"] > steps / 4, happened
    assert {1, 2, 4} <= happened["pieces"], happened


PREDICTED = {"policy": "macro+micro", "sparsity": "predicted", "set": {"theta": 0.0}}


@pytest.mark.parametrize("settings", [{"policy": "dynamic", "sparsity": "exact"}, PREDICTED], ids=["exact", "theta 0"])
def test_hundreds_of_random_moves(folder, random_moves, settings):
    assert_busy(run(folder, random_moves, [1], 10, **settings), LENGTH - PREFILLED)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"policy": "dynamic", "sparsity": "exact"}, PREDICTED], ids=["exact", "theta 0"])
def test_thousands_of_random_moves(folder, random_moves, settings):
    assert_busy(run(folder, random_moves, range(LONG), 25, **settings), LONG * (LENGTH - PREFILLED))


def test_a_block_that_was_overwritten_is_noticed(folder, random_moves):
    """The run above fails if a single block is not what was gathered."""
    apply, calls = Transfer.apply, []

    def apply_spoilt(self, layer, block, units, slots):
        calls.append(layer)
        if len(calls) == 20:
            block.staging[0, -1] = np.nan
        return apply(self, layer, block, units, slots)

    random_moves.setattr(Transfer, "apply", apply_spoilt)
    with pytest.raises(AssertionError):
        run(folder, random_moves, [1], 10, policy="dynamic", sparsity="exact", staging="plain")


def test_a_unit_in_no_slot_is_noticed(folder, random_moves):
    """... and if a plan is taken for done before its last piece is there."""

    def apply_half(self, layer, block, units, slots):
        if len(units) > 1:
            apply(self, layer, block, units, slots)
        else:
            self._pool._buckets[layer][slots] = units
            self._pool._cold[layer] = None
            self._free.append(block.staging)

    apply = Transfer.apply
    random_moves.setattr(Transfer, "apply", apply_half)
    with pytest.raises(AssertionError):
        run(folder, random_moves, [1], 10, policy="dynamic", sparsity="exact")


@pytest.mark.parametrize("waits", [True, False])
def test_skipping_at_random_places_follows_the_plan(folder, random_moves, waits):
    """Predicted, with thresholds: what a row computes is what scores and thresholds say, on the side where it is."""
    scores_seen = []
    thresholds = PlannedRunner._thresholds

    def keep_scores(self, layer, plan):
        scores, theta_g, theta_c = thresholds(self, layer, plan)
        scores_seen.append((layer, np.array(scores), theta_g, theta_c, plan))
        return scores, theta_g, theta_c

    random_moves.setattr(PlannedRunner, "_thresholds", keep_scores)
    with opened(folder, batch=ROWS, deterministic=waits, policy="dynamic", sparsity="predicted", set={}) as engine:
        seen = watch_ran(engine._parts, random_moves)
        decode(engine._parts, tokens_of(3)[:60], PREFILLED)
        late, differing, theta = 0, 0, engine._parts.plans.runner.wishes.theta
        assert len(seen) == len(scores_seen)
        for ran, (layer, scores, theta_g, theta_c, plan) in zip(seen, scores_seen, strict=True):
            assert ran.layer == layer
            late, differing = late + (plan is None), differing + (theta_g != theta_c)
            assert plan is not None or theta_g == theta_c == theta  # a late plan's thresholds do not hold
            wanted = scores >= np.where(np.isin(np.arange(SPEC.ffn), ran.bucket), theta_g, theta_c)
            computed = np.zeros_like(wanted)
            computed[:, ran.cold_units] = ran.admit
            computed[:, ran.bucket] = ran.marks & ADMITTED
            np.testing.assert_array_equal(computed, wanted)
            assert ran.cold_live.any() and (ran.marks & LIVE).any() and not (ran.cold_live & ~ran.admit).any()
        assert differing > 10 if waits else late > 10
