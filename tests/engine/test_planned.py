"""Neurons that move while decoding change no answer; in predicted mode two equal runs are equal bit for bit."""

import time

import numpy as np
import pytest

from dynajax.pool import DevicePool
from dynajax.programs.bodies import ADMITTED
from dynajax.testing import make_checkpoint
from dynajax.testing.families import write
from dynajax.testing.oracle import family_logits
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import (
    FORCED,
    MOVING,
    allocate_nan,
    assert_each_unit_once,
    assert_slots_hold_their_units,
    decode,
    opened,
    watch_plans,
    watch_ran,
)  # fmt: skip

GIVEN, PREFILLED = 30, 6  # tokens of a row, and how many of them are its prompt
FAMILIES = {"drelu": "bamboo", "ungated": "opt", "silu-biases": "llama-biases", "parallel": "falcon-40b"}


@pytest.fixture(scope="module")
def folder_of(models, tmp_path_factory):
    """folder_of(name) -> where the model lies, written once."""
    root, made = tmp_path_factory.mktemp("planned"), dict(models)

    def folder(name: str):
        if name not in made:
            size = "ffn_dim" if name == "ungated" else "ffn_hidden_size" if name == "parallel" else "intermediate_size"
            made[name] = write(root / name, FAMILIES[name], seed=3, num_hidden_layers=2, **{size: 160})
        return made[name]

    return folder


@pytest.fixture(scope="module")
def expected_of(folder_of):
    """expected_of(name, rows) -> tokens [T, B] and the oracle's logits of every given one [T - prompt, B, V]."""
    done = {}

    def expected(name: str, rows: int):
        if (name, rows) not in done:
            tokens = np.random.default_rng(rows).integers(3, 96, (GIVEN, rows))
            logits = np.stack([family_logits(folder_of(name), row) for row in tokens.T], axis=1)
            done[name, rows] = tokens, logits[PREFILLED:]
        return done[name, rows]

    return expected


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


QUICK = [("relu", "dynamic", "exact", 1), ("relu", "lru", "dense", 1)]
QUICK += [(name, "dynamic", "exact", 2) for name in ("fatrelu", "drelu", "ungated")]
SLOW = [("relu", policy, sparsity, 1) for policy in MOVING for sparsity in ("dense", "exact")]
SLOW += [("parallel", "dynamic", "exact", 2), ("parallel", "lru", "exact", 1)]
SLOW += [(name, "lru", "dense", 2) for name in ("relu", "ungated")]
CASES = QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK]


@pytest.mark.parametrize(("name", "policy", "sparsity", "batch"), CASES)
def test_moving_neurons_change_no_logits(folder_of, expected_of, monkeypatch, name, policy, sparsity, batch):
    monkeypatch.setattr(DevicePool, "_allocate", allocate_nan)
    tokens, expected = expected_of(name, batch)
    with opened(folder_of(name), policy=policy, sparsity=sparsity, batch=batch) as engine:
        parts = engine._parts
        seen = watch_ran(parts, monkeypatch)
        assert_close(decode(parts, tokens, PREFILLED), expected)
        layers = parts.prepared.spec.layers
        assert len(seen) == (GIVEN - PREFILLED) * layers
        for ran in seen:
            assert_each_unit_once(ran, parts.prepared.spec.ffn)
        assert_slots_hold_their_units(parts)
        for layer, record in enumerate(engine.stats()["layers"]):
            buckets = {tuple(np.sort(ran.bucket)) for ran in seen if ran.layer == layer}
            assert record["migrated"] >= GIVEN - PREFILLED and len(buckets) > 10, record  # they did move
        peak = parts.memory_figures()
        assert peak["peak_bytes"] <= peak["budget_bytes"]


def test_every_policy_gives_the_tokens_of_static(models):
    found = {}
    for name in ("static", *MOVING):
        with opened(models["relu"], policy=name, sparsity="exact", batch=2) as engine:
            results = engine.generate([PROMPT, PROMPT[:9]], max_new_tokens=40)
            assert (results[0].policy, results[0].sparsity) == (name, "exact")
            assert (results[0].units.migrated > 100) == (name != "static")
            found[name] = [result.token_ids for result in results]
    assert all(ids == found["static"] for ids in found.values()), found


def test_the_comparison_notices_one_lost_unit(models, expected_of, monkeypatch):
    tokens, expected = expected_of("relu", 1)
    cold = DevicePool.cold
    monkeypatch.setattr(DevicePool, "cold", lambda self, layer: cold(self, layer)[1:])
    with opened(models["relu"], policy="dynamic", sparsity="exact") as engine:
        seen = watch_ran(engine._parts, monkeypatch)
        found = decode(engine._parts, tokens, PREFILLED)
    with pytest.raises(AssertionError):
        assert_close(found, expected)
    with pytest.raises(AssertionError):
        assert_each_unit_once(seen[0], 96)


@pytest.mark.parametrize("host_dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_neurons_of_16_bits_move_into_wider_pools(tmp_path, host_dtype):
    folder = make_checkpoint(tmp_path / "m", SPECS["relu"], dtype=host_dtype)
    tokens = np.random.default_rng(0).integers(3, 96, (16, 1))
    with opened(folder, policy="dynamic", sparsity="exact", dtype="float32") as engine:
        assert_close(decode(engine._parts, tokens, 4)[:, 0], family_logits(folder, tokens[:, 0])[4:])
        assert_slots_hold_their_units(engine._parts)
        assert engine.stats()["layers"][1]["migrated"] > 10


def test_a_pool_of_bfloat16_is_written_bit_by_bit(models):
    with opened(models["relu"], policy="dynamic", sparsity="exact", dtype="bfloat16") as engine:
        assert engine._parts.pool.parts(0)[0].dtype == np.uint16
        assert engine.generate(PROMPT, max_new_tokens=8).units.migrated > 50
        assert_slots_hold_their_units(engine._parts)


# --- predicted ---


def test_with_every_neuron_admitted_predicted_is_exact(models, monkeypatch):
    answers = {}
    for sparsity, theta in (("exact", 0.5), ("predicted", 0.0)):
        settings = {"policy": "macro+micro", "sparsity": sparsity, "set": FORCED | {"theta": theta}}
        with opened(models["relu"], **settings) as engine:  # with `dynamic` the host may skip what scores 0
            seen = watch_ran(engine._parts, monkeypatch)
            result = engine.generate(PROMPT, max_new_tokens=40)
            answers[sparsity] = result.token_ids
            for ran in seen:
                assert_each_unit_once(ran, 96)
    assert result.units.migrated > 100 and result.units.recall == 1.0
    assert answers["predicted"] == answers["exact"]


def run_once(folder, patch, **settings):
    """-> logits, plans, tokens of a generation behind them."""
    tokens = np.random.default_rng(5).integers(3, 96, (60, 1))
    with opened(folder, policy="dynamic", sparsity="predicted", **settings) as engine:
        plans = watch_plans(engine._parts, patch)
        logits = decode(engine._parts, tokens, PREFILLED)
        return logits, plans, engine.generate(PROMPT, max_new_tokens=20).token_ids


@pytest.mark.parametrize("name", ["relu", pytest.param("silu", marks=pytest.mark.slow)])
def test_deterministic_runs_are_equal_bit_for_bit(models, monkeypatch, name):
    """Whatever the threads' timing: the second run's is another."""
    logits, plans, ids = run_once(models[name], monkeypatch)
    assert sum(len(plan[1]) for plan in plans) > 200 and len({plan[4:6] for plan in plans}) > 10
    sleepy = slow_plans(monkeypatch)
    again, plans_again, ids_again = run_once(models[name], monkeypatch)
    assert sleepy.count > 100
    assert plans_again == plans
    assert again.tobytes() == logits.tobytes() and ids_again == ids


def test_without_deterministic_timing_shows(models, monkeypatch):
    """The comparison above can fail: with deadlines that are missed the same two runs differ."""
    settings = {"deterministic": False, "set": FORCED | {"deadline_s": 0.0}}
    slow_plans(monkeypatch)
    logits, plans, _ = run_once(models["relu"], monkeypatch, **settings)
    again, plans_again, _ = run_once(models["relu"], monkeypatch)
    assert plans_again != plans and again.tobytes() != logits.tobytes()


def slow_plans(patch):
    """Every plan takes a time of its own, up to 2 ms."""
    from dynajax.policy.planner import NeuronPlanner

    plan, rng = NeuronPlanner.plan, np.random.default_rng(1)

    class Sleepy:
        count = 0

    def sleepy(self, *args):
        Sleepy.count += 1
        time.sleep(rng.random() * 2e-3)
        return plan(self, *args)

    patch.setattr(NeuronPlanner, "plan", sleepy)
    return Sleepy


@pytest.mark.parametrize("name", ["relu", pytest.param("silu", marks=pytest.mark.slow)])
def test_a_rows_predicted_answer_does_not_depend_on_its_company(models, monkeypatch, name):
    """For fixed thresholds: which units are computed for it, and its tokens."""
    companies = [None, PROMPT[4:12], [7, 7, 9]]
    answers, admitted = [], []
    with opened(models[name], policy="static", sparsity="predicted", batch=2) as engine:
        kept = watch_ran(engine._parts, monkeypatch)
        for other in companies:
            kept.clear()
            result = engine.generate([PROMPT] if other is None else [PROMPT, other], max_new_tokens=24)[0]
            answers.append(result.token_ids)
            admitted.append([of_first_row(ran) for ran in kept])
            assert 0.1 < result.units.density < 0.9
    assert answers[0] == answers[1] == answers[2]
    assert admitted[0] == admitted[1] == admitted[2]
    with opened(models[name], policy="static", sparsity="predicted") as engine:
        assert engine.generate(PROMPT, max_new_tokens=24).token_ids == answers[0]


def of_first_row(ran) -> bytes:
    """The units that row 0 computed, on either side."""
    admitted = np.zeros(96, np.bool_)
    admitted[ran.cold_units] = True if ran.admit is None else ran.admit[0]
    admitted[ran.bucket] = ran.marks[0] & ADMITTED
    return admitted.tobytes()
