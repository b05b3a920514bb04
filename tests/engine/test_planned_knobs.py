"""What the user may set arrives where it counts, and what cannot work is refused in words."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, write_stats
from dynajax.config import EngineConfig, PolicyConfig
from dynajax.engine import plan_for
from dynajax.engine.strategy import resolve
from dynajax.errors import DynajaxError, MismatchError, ModelError, StorageError, UsageError
from predictors.folder import Manifest, write_predictors
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import FORCED, opened, watch_plans

NEW = 20
PREDICTED = {"policy": "dynamic", "sparsity": "predicted"}

# --- knobs: each changes the plans of one and the same generation ---

# What the planner reads: a restart with other constants suffices.
PLANNER = {
    "lam": 30.0,
    "decay": 0.5,
    "window_units": 2,
    "window_s": 0.0,
    "keep_share": 0.9,
    "err_scale": 4.0,
    "ranking": "flag",
    "swap_rule": "gain",
}
# What predictors, programs or the runner read, too.
OPENING = {"theta": 0.4, "density": 0.3, "lead": 2, "skip_lead": 1}


@pytest.fixture(scope="module")
def engine(models):
    with opened(models["relu"], **PREDICTED) as engine:
        yield engine


def plans_with(engine: Engine, **knobs) -> list[tuple]:
    """The plans of a generation that starts from the first placement, with these constants of the planner."""
    plans = engine._parts.plans
    before = plans.prepared
    strategy = replace(before.strategy, knobs=PolicyConfig(**FORCED | knobs))
    plans.prepared = replace(before, strategy=strategy)
    plans.restart()
    try:
        with pytest.MonkeyPatch.context() as patch:
            kept = watch_plans(engine._parts, patch)
            engine.generate(PROMPT, max_new_tokens=NEW)
            return kept
    finally:
        plans.prepared = before


def test_the_same_constants_give_the_same_plans(engine):
    assert plans_with(engine) == plans_with(engine)


@pytest.mark.parametrize("name", PLANNER)
def test_every_knob_of_the_planner_changes_the_plans(engine, name):
    assert plans_with(engine, **{name: PLANNER[name]}) != plans_with(engine)


@pytest.mark.parametrize("name", OPENING)
def test_every_other_knob_changes_them_too(models, engine, monkeypatch, name):
    with opened(models["relu"], **PREDICTED, set=FORCED | {name: OPENING[name]}) as other:
        kept = watch_plans(other._parts, monkeypatch)
        other.generate(PROMPT, max_new_tokens=NEW)
    assert kept != plans_with(engine)


def moved(plans) -> int:
    return sum(len(plan[1]) for plan in plans)


def test_the_ends_of_the_scales(engine):
    usual = plans_with(engine)
    assert moved(usual) > NEW
    for none in ({"window_units": 0}, {"window_s": 0.0}, {"swap_rule": "gain"}, {"keep_share": 1.0}):
        assert moved(plans_with(engine, **none)) == 0, none
    assert moved(plans_with(engine, window_units=1)) < moved(usual)
    exact = [plan for plan in plans_with(engine, err_scale=0.0) if plan[3]]
    assert all(plan[4] <= plan[3] for plan in exact)
    thresholds = [{plan[4:6] for plan in plans_with(engine, err_scale=scale)} for scale in (1.0, 4.0)]
    assert thresholds[0] != thresholds[1]


def test_a_layer_without_scores_of_its_lead_skips_all_the_same(models, monkeypatch):
    """Lead 2: the plans of layers 0 and 1 go by what was scored a token ago, whatever lead skipping has."""
    for skip_lead in (0, 1, 2):
        knobs = FORCED | {"lead": 2, "skip_lead": skip_lead}
        with opened(models["relu"], **PREDICTED, set=knobs) as engine:
            kept = watch_plans(engine._parts, monkeypatch)
            engine.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)
            theta = int(engine._parts.plans.runner.wishes.theta)
        for layer in range(3):
            thetas = [plan[3] for plan in kept if plan[0] == layer]
            assert thetas == [theta] * NEW and theta > 0, (skip_lead, layer)


def test_programs_are_all_there_after_the_first_token(models, tmp_path):
    """Also where pools differ in size, and checks look at one layer after the other."""
    spec = SPECS["relu"]
    frequency = np.random.default_rng(0).random((spec.layers, spec.ffn), np.float32) * [[0.6], [0.8], [1.0]]
    stats = tmp_path / "stats.npz"
    owner = Checkpoint.open(models["relu"]).fingerprint()
    write_stats(stats, fingerprint=owner, frequency=frequency.astype(np.float32), tokens=10)
    with opened(models["relu"], 55, policy="static", sparsity="predicted", stats=str(stats)) as engine:
        assert len(set(engine.stats()["pool_slots"]) - {0}) > 1, engine.stats()["pool_slots"]
        programs = engine._parts.prepared.programs
        engine.generate(PROMPT, max_new_tokens=1)
        first = programs.kinds
        engine.generate(PROMPT, max_new_tokens=70)
        assert programs.kinds == first


# --- refusals ---


def refused(folder, kind: type[DynajaxError], words: str, **settings) -> None:
    with pytest.raises(kind, match=words) as caught:
        plan_for(str(folder), EngineConfig(ctx=256, **settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["ffi", "callback"])
def test_plans_need_threads(models, mode):
    refused(models["relu"], UsageError, f"--sparsity predicted needs --host-mode threads .*got {mode}",
            sparsity="predicted", host_mode=mode)  # fmt: skip
    for policy in ("dynamic", "macro", "lru"):
        refused(models["relu"], UsageError, f"--policy {policy} needs --host-mode threads .*got {mode}",
                policy=policy, host_mode=mode)  # fmt: skip


def test_skipping_needs_a_predictor(models):
    refused(
        models["relu"], UsageError, "--sparsity predicted needs a predictor", sparsity="predicted", predictor="none"
    )
    refused(models["relu"], UsageError, "--predictor mlp needs trained predictors", predictor="mlp")
    refused(models["silu"], UsageError, "--sparsity exact needs true zeros, which silu has not", sparsity="exact")


@pytest.mark.parametrize("sparsity", ["auto", "exact", "predicted"])
def test_a_folder_that_is_not_there(models, tmp_path, sparsity):
    settings = {"predictor": str(tmp_path / "nowhere"), "sparsity": sparsity, "policy": "dynamic"}
    refused(models["relu"], StorageError, "no predictor folder .*nowhere", **settings, host_mode="threads")


def predictors_of(folder, owner: str):
    """Trained predictors of one kind for every layer, made for the model with that fingerprint."""
    spec = SPECS["relu"]
    manifest = Manifest(
        fingerprint=owner, layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn, ranks=(4,) * spec.layers,
        dtype="float32", source="a test", lead=0, threshold=0.5, tokens=10, metrics=None,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = [
        tuple(rng.standard_normal(shape).astype(np.float32) for shape in manifest.shapes(i)) for i in range(spec.layers)
    ]
    return write_predictors(folder, manifest, weights)


def test_predictors_of_another_model_are_refused(models, tmp_path):
    mine, theirs = (Checkpoint.open(models[name]).fingerprint() for name in ("relu", "relu-tied"))
    good, bad = predictors_of(tmp_path / "good", mine), predictors_of(tmp_path / "bad", theirs)
    settings = {"sparsity": "predicted", "policy": "static", "ctx": 256, "host_mode": "threads"}
    with pytest.raises(MismatchError, match="another|other model|was made for|made for"):
        Engine.from_pretrained(str(models["relu"]), predictor=str(bad), **settings)
    record = json.loads((good / "manifest.json").read_text()) | {"ffn": 7}
    (tmp_path / "narrow").mkdir()
    (tmp_path / "narrow" / "manifest.json").write_text(json.dumps(record))
    with pytest.raises((MismatchError, ModelError)):
        Engine.from_pretrained(str(models["relu"]), predictor=str(tmp_path / "narrow"), **settings)


def test_trained_predictors_are_used_and_named(models, tmp_path):
    folder = predictors_of(tmp_path / "p", Checkpoint.open(models["relu"]).fingerprint())
    settings = {"predictor": str(folder), "policy": "static", "set": {"lead": 0}}
    with opened(models["relu"], sparsity="predicted", **settings) as engine:
        result = engine.generate(PROMPT, max_new_tokens=4)
        assert (result.sparsity, result.predictor, engine.stats()["predictor"]) == ("predicted", "mlp", "mlp")
        assert 0.3 < result.units.density < 0.7  # they know nothing
    spec, owner = SPECS["relu"], Checkpoint.open(models["relu"]).fingerprint()
    for sparsity, expected in (("auto", "predicted"), ("exact", "exact"), ("dense", "dense")):
        config = EngineConfig(predictor=str(folder), sparsity=sparsity)
        assert resolve(config, spec, models["relu"], owner, "cpu").sparsity == expected


def test_what_auto_means(models):
    """Policy and sparsity by machine, model and predictors."""
    folder, owner = models["relu"], Checkpoint.open(models["relu"]).fingerprint()
    for name, platform, expected in (
        ("relu", "cpu", ("exact", "static", False)),
        ("relu", "gpu", ("exact", "dynamic", True)),
        ("silu", "gpu", ("dense", "static", False)),
    ):
        found = resolve(EngineConfig(), SPECS[name], folder, owner, platform)
        assert (found.sparsity, found.policy, found.guarded and found.moves) == expected, (name, platform)
    never = resolve(EngineConfig(deterministic=True), SPECS["relu"], folder, owner, "gpu")
    assert (never.policy, never.guarded) == ("dynamic", False)
    assert resolve(EngineConfig(policy="dynamic"), SPECS["relu"], folder, owner, "gpu").guarded is False
