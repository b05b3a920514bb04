"""Placement, budget, host mode and batch never change an answer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.opening import load_parts
from dynajax.engine.planning import prepare
from dynajax.plan import Placement
from dynajax.pool import DevicePool
from dynajax.testing import make_checkpoint
from dynajax.testing.oracle import family_logits
from tests.engine.cases import PROMPT, SPECS

NEW = 8


def greedy_reference(folder: Path, new: int = NEW) -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(new):
        ids.append(int(family_logits(folder, ids)[-1].argmax()))
    return tuple(ids[len(PROMPT) :])


def budgets(folder: Path, **config) -> list[int]:
    """From the smallest that works to everything."""
    plan = plan_for(str(folder), EngineConfig(ctx=256, **config))
    small = plan.smallest_budget_bytes
    return [small + plan.pool * share // 100 for share in (0, 20, 45, 80, 100)]


@pytest.mark.parametrize("model", ["relu", "relu-tied", "fatrelu"])
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_every_budget_gives_the_reference_tokens(models, model, sparsity):
    expected = greedy_reference(models[model])
    for budget in budgets(models[model]):
        with Engine.from_pretrained(str(models[model]), vram_budget=budget, ctx=256, sparsity=sparsity) as engine:
            assert engine.generate(PROMPT, max_new_tokens=NEW).token_ids == expected, budget


def test_silu_is_dense_and_gives_the_reference_tokens(models):
    expected = greedy_reference(models["silu"])
    for budget in budgets(models["silu"])[1::2]:
        with Engine.from_pretrained(str(models["silu"]), vram_budget=budget, ctx=256) as engine:
            result = engine.generate(PROMPT, max_new_tokens=NEW)
            assert (result.token_ids, result.sparsity) == (expected, "dense")


@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_callback_mode_gives_the_reference_tokens(models, sparsity):
    folder = models["relu"]
    for budget in budgets(folder, host_mode="callback")[::2]:
        settings_ = {"vram_budget": budget, "ctx": 256, "sparsity": sparsity, "host_mode": "callback"}
        with Engine.from_pretrained(str(folder), **settings_) as engine:
            assert engine.generate(PROMPT, max_new_tokens=NEW).token_ids == greedy_reference(folder), budget


def logits_with(folder: Path, placement: Placement, sparsity: str, mode: str) -> np.ndarray:
    """Logits after PROMPT, engine opened with a placement of the caller's choice."""
    config = EngineConfig(ctx=256, sparsity=sparsity, host_mode=mode)
    prepared = replace(prepare(str(folder), config), placement=placement)
    parts = load_parts(Checkpoint.open(folder), prepared, config, lambda *_: None)
    try:
        parts.stepper.prefill(0, PROMPT[:-1], lambda *_: None)
        ids, at = np.array(PROMPT[-1:], np.int32), np.array([len(PROMPT) - 1], np.int32)
        return parts.stepper.step(ids, at, np.ones(1, np.bool_))[0]
    finally:
        parts.close()


def assert_placement_changes_nothing(folder: Path, seed: int, sparsity: str, mode: str) -> None:
    """A random set of units on the device, of another size in every layer."""
    rng = np.random.default_rng(seed)
    spec = SPECS["relu"]
    sizes = rng.choice([0, 12, 48, 96], spec.layers)
    buckets = tuple(np.sort(rng.permutation(spec.ffn)[:size]).astype(np.int32) for size in sizes)
    logits = logits_with(folder, Placement(buckets, spec.ffn), sparsity, mode)
    expected = family_logits(folder, PROMPT)[-1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**16), sparsity=st.sampled_from(["dense", "exact"]))
def test_random_placements_give_the_reference_logits(models, seed, sparsity):
    assert_placement_changes_nothing(models["relu"], seed, sparsity, "threads")


@pytest.mark.parametrize("seed", range(3))  # every set of sizes is a program of its own
def test_random_placements_in_one_program_too(models, seed):
    for sparsity in ("dense", "exact"):
        assert_placement_changes_nothing(models["relu"], seed, sparsity, "ffi")


@pytest.mark.parametrize("mode", ["threads", "ffi"])
def test_the_logits_tolerance_notices_one_lost_neuron(models, monkeypatch, mode):
    """The same comparison fails if a single live unit is computed on neither side."""
    spec = SPECS["relu"]
    bucket = np.arange(48, dtype=np.int32)
    placement = Placement((bucket,) * spec.layers, spec.ffn)
    whole = logits_with(models["relu"], placement, "exact", mode)
    cold = DevicePool.cold
    monkeypatch.setattr(DevicePool, "cold", lambda self, layer: cold(self, layer)[1:])
    lost = logits_with(models["relu"], placement, "exact", mode)
    assert np.abs(lost - whole).max() > 1e-4 * np.abs(whole).max()


def test_a_row_does_not_depend_on_its_company(models):
    prompts = [list(PROMPT), list(PROMPT[5:20]), [7, 7, 9]]
    budget = budgets(models["relu"])[2]
    with Engine.from_pretrained(str(models["relu"]), vram_budget=budget, ctx=256) as engine:
        alone = [engine.generate(p, max_new_tokens=NEW + i).token_ids for i, p in enumerate(prompts)]
    budget = budgets(models["relu"], batch=2)[2]
    with Engine.from_pretrained(str(models["relu"]), vram_budget=budget, ctx=256, batch=2) as engine:
        together = engine.generate(prompts, max_new_tokens=NEW)
        assert [r.token_ids for r in together] == [ids[:NEW] for ids in alone]
        assert [len(r.token_ids) for r in together] == [NEW] * 3


def test_a_row_that_ended_does_not_disturb_the_others(models):
    """Rows of one batch end at different steps: the second by the context, long before the first."""
    long, short = list(PROMPT[:3]), [9] * 60
    settings_ = {"ctx": 64, "vram_budget": budgets(models["relu"])[2]}
    with Engine.from_pretrained(str(models["relu"]), **settings_) as engine:
        alone = [engine.generate(p, max_new_tokens=20).token_ids for p in (long, short)]
    with Engine.from_pretrained(str(models["relu"]), batch=2, **settings_) as engine:
        together = engine.generate([long, short], max_new_tokens=20)
    assert [r.token_ids for r in together] == alone
    assert [len(ids) for ids in alone] == [20, 4]


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.01), ("bfloat16", 0.06)])
def test_16_bit_devices_round_what_the_host_does_not(models, dtype, bound):
    """With 16-bit weights on the device its products take 16-bit inputs; all-hot and all-cold differ by that much."""
    settings_ = {"ctx": 256, "dtype": dtype, "host_dtype": dtype}
    expected = family_logits(models["relu"], PROMPT)[-1]
    for policy in ("static", "none"):
        with Engine.from_pretrained(str(models["relu"]), policy=policy, **settings_) as engine:
            parts = engine._parts
            parts.stepper.prefill(0, PROMPT[:-1], lambda *_: None)
            ids, at = np.array(PROMPT[-1:], np.int32), np.array([len(PROMPT) - 1], np.int32)
            logits = parts.stepper.step(ids, at, np.ones(1, np.bool_))[0]
        assert np.abs(logits - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("host_dtype", ["float16", "bfloat16"])
def test_16_bit_host_and_float32_device_agree_with_16_bit_weights(models, tmp_path, host_dtype):
    """A 16-bit checkpoint has the same answer wherever its units live: the pool converts without loss."""
    folder = make_checkpoint(tmp_path / "m", SPECS["relu"], dtype=host_dtype)
    expected = greedy_reference(folder)
    for budget in budgets(folder, dtype="float32")[::2]:
        with Engine.from_pretrained(str(folder), vram_budget=budget, ctx=256, dtype="float32") as engine:
            assert engine.stats()["memory"]["host_bytes"] < 4 * 96 * 3 * 64 * 3 + 4 * 128 * 64
            assert engine.generate(PROMPT, max_new_tokens=NEW).token_ids == expected
