"""What an engine of plans says of itself: counts, shares, memory, programs."""

import gc
import time

import numpy as np
import pytest

from dynajax.checkpoint import Checkpoint
from dynajax.engine import planned
from dynajax.policy.planner import NeuronPlanner
from dynajax.programs import MAX_PROGRAMS
from dynajax.programs.bodies import ADMITTED, LIVE
from dynajax.testing import load_decoder
from dynajax.transfer import RING
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import FORCED, opened, watch_ran

SPEC, NEW = SPECS["relu"], 24
PROMPTS = [PROMPT, PROMPT[3:12]]


def sum_of(kept, count) -> np.ndarray:
    """[L] of count(ran) over all of them."""
    total = np.zeros(SPEC.layers)
    for ran in kept:
        total[ran.layer] += count(ran)
    return total


def admitted(ran) -> np.ndarray:
    """[R, F] what was computed."""
    found = np.zeros((len(ran.cold_live), SPEC.ffn), np.bool_)
    found[:, ran.cold_units] = True if ran.admit is None else ran.admit
    found[:, ran.bucket] = ran.marks[ran.rows] & ADMITTED
    return found


def assert_shares(units, live, hot, both, kept) -> None:
    """live, hot, both: [L] live units, those on the device, and those computed."""
    computed, on_device = sum_of(kept, lambda ran: admitted(ran).sum()), sum_of(kept, hot_computed)
    assert units.hot_share == hot.sum() / live.sum()
    assert units.hot_share_layers_ge_1 == hot[1:].sum() / live[1:].sum()
    assert units.computed_hot_share == on_device.sum() / computed.sum()
    assert units.recall == (None if both is None else both.sum() / live.sum())


def hot_computed(ran) -> int:
    return int(np.count_nonzero(ran.marks[ran.rows] & ADMITTED))


@pytest.mark.parametrize("sparsity", [pytest.param("dense", marks=pytest.mark.slow), "exact"])
def test_exact_figures_agree_with_a_count_by_hand(models, monkeypatch, sparsity):
    """Live units of decoded tokens by the flax module's gates; where they were, by what every layer reported."""
    with opened(models["relu"], policy="dynamic", sparsity=sparsity, batch=2) as engine:
        kept = watch_ran(engine._parts, monkeypatch)
        results = engine.generate(PROMPTS, max_new_tokens=NEW)
        moves = engine._parts.plans.runner.scheduler.moves
        host_unit = engine._parts.store.arenas[0][0].nbytes
    live, hot = np.zeros(SPEC.layers), np.zeros(SPEC.layers)
    ids = np.zeros((2, len(PROMPT) + NEW), np.int32)  # what stands behind a row's end changes nothing before it
    for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        ids[row, : len(prompt) + len(result.token_ids)] = [*prompt, *result.token_ids]
    _, gates = load_decoder(Checkpoint.open(models["relu"]))(ids)
    for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        decoded = slice(len(prompt) - 1, len(prompt) - 1 + len(result.token_ids))
        for layer, gate in enumerate(gates):
            mine = [ran for ran in kept if ran.layer == layer and ran.rows[row]]  # a row may end before the other
            for truth, ran in zip(np.asarray(gate)[row, decoded] > 0, mine, strict=True):
                live[layer], hot[layer] = live[layer] + truth.sum(), hot[layer] + truth[ran.bucket].sum()
                assert (ran.marks[row] & LIVE != 0).tolist() == truth[ran.bucket].tolist()
                assert (ran.cold_live[ran.rows[:row].sum()] != 0).tolist() == truth[ran.cold_units].tolist()
    units, rows = results[0].units, sum(len(result.token_ids) for result in results)
    assert_shares(units, live, hot, None, kept)
    assert units.live_per_token == pytest.approx(live.sum() / rows) and NEW < rows < 2 * NEW
    assert units.density == live.sum() / (rows * SPEC.layers * SPEC.ffn)
    assert units.migrated == moves.migrated.sum() > 100 and units.migrated_bytes == units.migrated * host_unit
    assert units.late_plans == 0


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_sampled_figures_are_the_truth_when_every_layer_is_checked(models, monkeypatch, policy):
    """In predicted mode, by the gates of the host's weights in float64 for what each layer really read."""
    monkeypatch.setattr(planned, "CHECK_EVERY", 1)
    with opened(models["relu"], policy=policy, sparsity="predicted", batch=2) as engine:
        parts, read = engine._parts, []
        kept, check = watch_ran(parts, monkeypatch), parts.plans.runner._check
        look = check.live

        def listen(layer, h, active):
            read.append((layer, np.array(h)[active]))
            return look(layer, h, active)

        monkeypatch.setattr(check, "live", listen)
        results = engine.generate(PROMPTS, max_new_tokens=NEW)
        gates = [arena[:, 0, 0].astype(np.float64) for arena in parts.store.arenas]
    live, hot, both = (np.zeros(SPEC.layers) for _ in range(3))
    for ran, (layer, h) in zip(kept, read, strict=True):
        truth = h.astype(np.float64) @ gates[layer].T > 0
        live[layer] += truth.sum()
        hot[layer] += truth[:, ran.bucket].sum()
        both[layer] += (truth & admitted(ran)).sum()
    units, rows = results[0].units, sum(len(result.token_ids) for result in results)
    assert_shares(units, live, hot, both, kept)
    assert 0.5 < units.recall < 1 and units.live_per_token == pytest.approx(live.sum() / rows)
    assert units.density == sum_of(kept, lambda ran: admitted(ran).sum()).sum() / (rows * SPEC.layers * SPEC.ffn)
    assert (units.migrated > 0) == (policy == "dynamic")


def test_silu_wants_the_largest_half(models, monkeypatch):
    """Where no activation is zero, live are the units of the largest |value| x |down row|."""
    monkeypatch.setattr(planned, "CHECK_EVERY", 1)
    with opened(models["silu"], policy="static", sparsity="predicted") as engine:
        kept = watch_ran(engine._parts, monkeypatch)
        units = engine.generate(PROMPT, max_new_tokens=NEW).units
    assert all(np.abs(ran.truth.sum(axis=1) - SPEC.ffn / 2).max() <= 1 for ran in kept)
    both = sum_of(kept, lambda ran: (ran.truth & admitted(ran)).sum()).sum()
    assert units.recall == both / sum_of(kept, lambda ran: ran.truth.sum()).sum() > 0.6
    assert units.live_per_token == pytest.approx(SPEC.layers * SPEC.ffn / 2, rel=0.05)


def test_checks_do_not_change_the_answer_or_its_work(models, monkeypatch):
    found = []
    for every in (10**9, 1):
        monkeypatch.setattr(planned, "CHECK_EVERY", every)
        with opened(models["relu"], policy="dynamic", sparsity="predicted") as engine:
            result = engine.generate(PROMPT, max_new_tokens=NEW)
            units, counters = result.units, engine._parts.cold.counters
            found.append((result.token_ids, units.migrated, units.density, counters.computed, counters.bytes_read))
    assert found[0] == found[1]


def test_late_plans_are_told(models, monkeypatch):
    settings = {"policy": "dynamic", "sparsity": "exact", "deterministic": False}
    plan = NeuronPlanner.plan

    def slow(self, *args):
        time.sleep(2e-3)
        return plan(self, *args)

    monkeypatch.setattr(NeuronPlanner, "plan", slow)
    for deadline, bounds in ((0.0, (NEW, NEW * SPEC.layers)), (10.0, (0, 0))):
        with opened(models["relu"], **settings, set=FORCED | {"deadline_s": deadline}) as engine:
            late = engine.generate(PROMPT, max_new_tokens=NEW).units.late_plans
            assert bounds[0] <= late <= bounds[1]
            assert late == sum(record["late_plans"] for record in engine.stats()["layers"])


# --- memory and programs ---

KINDS = [("relu", "dynamic", "exact"), ("relu", "dynamic", "predicted")]
KINDS += [("silu", "static", "predicted"), pytest.param("silu", "dynamic", "predicted", marks=pytest.mark.slow)]
KINDS += [pytest.param("silu", "lru", "predicted", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "policy", "sparsity"), KINDS)
def test_memory_and_programs_stay_within_what_was_granted(models, monkeypatch, name, policy, sparsity):
    """Also while plans pile up: the thread is slow, and nobody waits for it."""
    gc.collect()
    plan = NeuronPlanner.plan

    def slow(self, *args):
        time.sleep(1e-3)
        return plan(self, *args)

    monkeypatch.setattr(NeuronPlanner, "plan", slow)
    settings = {"policy": policy, "sparsity": sparsity, "batch": 2, "deterministic": False}
    with opened(models[name], **settings, set=FORCED | {"deadline_s": 0.0}) as engine:
        parts = engine._parts
        programs, plan_ = parts.prepared.programs, parts.prepared.memory
        engine.generate(PROMPTS, max_new_tokens=1)
        compiled = programs.count
        results = engine.generate(PROMPTS, max_new_tokens=100)
        assert set(programs.kinds[compiled:]) == set()
        assert programs.count == engine.stats()["programs"] <= MAX_PROGRAMS
        memory = results[0].memory
        assert memory["peak_bytes"] <= memory["budget_bytes"], memory
        assert memory["plan_bytes"] == sum(size for item, size in plan_.rows() if item != "margin")
        predictors = parts.plans.runner.predictors
        arrays = [] if predictors is None else [a for held in predictors._params.values() for a in held.values()]
        assert plan_.predictors == sum({id(array): array.nbytes for array in arrays}.values())  # shared ones once
        unit = parts.store.arenas[0][0].nbytes
        assert plan_.staging == RING * parts.prepared.staged * unit and (plan_.staging > 0) == (policy != "static")


@pytest.mark.parametrize("share", [0, 100])
def test_no_pool_and_a_whole_one(models, share):
    """Nothing to move, and still every mode works and says so."""
    for sparsity in ("exact", "predicted"):
        with opened(models["relu"], share, policy="dynamic", sparsity=sparsity) as engine:
            units = engine.generate(PROMPT, max_new_tokens=8).units
            assert units.migrated == 0 and units.computed_hot_share == share / 100
            memory = engine.stats()["memory"]
            assert memory["peak_bytes"] <= memory["budget_bytes"]
