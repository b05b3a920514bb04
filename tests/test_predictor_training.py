"""Training while the engine reads: what is fed, checkpoints, resuming bit for bit, refusals, the report."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.collecting import wanted_of
from dynajax.config import EngineConfig
from dynajax.errors import UsageError
from dynajax.predictor_training.report import rows_of, table_of, write_report
from dynajax.predictor_training.sources import device_bytes, forms_for, sources_of
from dynajax.predictor_training.texts import Text, samples_of, seen_tokens
from dynajax.predictor_training.train import Feeder, Recipe, train
from dynajax.testing import TINY, TINY_SILU, make_checkpoint
from dynajax.testing.families import write
from predictors.folder import read_entries
from predictors.forms import Form, Shape
from predictors.gate import GateSource
from predictors.training import Trainer
from tests.shared_programs import shared_programs

IDS = np.random.default_rng(0).integers(3, 96, 900).astype(np.int32)
CONFIG = EngineConfig(ctx=48)
RECIPE = Recipe(kind="gate", checkpoint_tokens=100)


class Stop(BaseException):
    """Stands in for a signal."""


@pytest.fixture(scope="module", autouse=True)
def shared_compilation():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    return {name: make_checkpoint(root / name, spec) for name, spec in (("relu", TINY), ("silu", TINY_SILU))}


def text(tokens=600):
    return Text(samples_of([IDS], tokens, 40, 0), "a test")


def run(folder, out, recipe=RECIPE, *, resume=False, stop_at=None, tokens=600, config=CONFIG):
    """Train; `stop_at`: raise at that many tokens read."""

    def progress(stage, done, total):
        if stage == "train" and stop_at is not None and done >= stop_at:
            raise Stop

    checkpoint = Checkpoint.open(folder)
    return train(str(folder), checkpoint, config, recipe, text(tokens), out, resume=resume, progress=progress)


def arrays_of(folder, out):
    spec, fingerprint = Checkpoint.open(folder).spec, Checkpoint.open(folder).fingerprint()
    manifest, entries = read_entries(out, fingerprint=fingerprint, layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn)
    return manifest, {entry.key: dict(arrays) for entry, arrays in entries}


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "predictors"
    return run(models["relu"], out), out


def test_a_run_writes_a_folder_of_every_lead_and_layer(models, whole):
    trained, out = whole
    manifest, _ = arrays_of(models["relu"], out)
    assert manifest == trained.manifest and (manifest.tokens, manifest.lead, trained.resumed_at) == (600, 1, 0)
    assert [(entry.lead, entry.layer) for entry in manifest.entries] == [(0, 0), (0, 1), (1, 1)]
    for row in rows_of(manifest):
        assert row["entropy"] < row["prior_entropy"] and row["form"].startswith("gate")
    assert trained.density is None
    assert not out.with_name("predictors.partial").exists()


@pytest.mark.parametrize(
    "stop_at", [pytest.param(1, marks=pytest.mark.slow), 330, pytest.param(600, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_goes_on_and_ends_bit_equal(models, whole, tmp_path, stop_at):
    out = tmp_path / "predictors"
    with pytest.raises(Stop):
        run(models["relu"], out, stop_at=stop_at)
    assert not out.exists() and (tmp_path / "predictors.partial").is_dir()
    with pytest.raises(UsageError, match="holds an unfinished run: add --resume"):
        run(models["relu"], out)
    for other in (replace(RECIPE, lead=0), replace(RECIPE, seed=1)):
        with pytest.raises(UsageError, match="was begun with other settings"):
            run(models["relu"], out, other, resume=True)
    with pytest.raises(UsageError, match="begun with other settings"):
        run(models["relu"], out, resume=True, tokens=500)
    trained = run(models["relu"], out, replace(RECIPE, checkpoint_tokens=77), resume=True)
    assert trained.resumed_at >= stop_at
    (manifest, found), (expected, weights) = arrays_of(models["relu"], out), arrays_of(models["relu"], whole[1])
    assert manifest == expected
    jax.tree.map(np.testing.assert_array_equal, found, weights)
    assert not (tmp_path / "predictors.partial").exists()
    with pytest.raises(AssertionError):  # the comparison can fail
        jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(lambda a: a + 1, weights))


def test_nothing_stays_of_a_run_that_learned_nothing(models, tmp_path):
    with pytest.raises(UsageError, match="--lead must be less than the model's 2 layers, got 2"):
        run(models["relu"], tmp_path / "p", replace(RECIPE, lead=2))
    with pytest.raises(UsageError, match="--buffer is too small: .* must hold"):
        run(models["relu"], tmp_path / "p", replace(RECIPE, buffer_bytes=2**10))
    with pytest.raises(UsageError, match="at least 100 tokens are needed, the text has 40"):
        run(models["relu"], tmp_path / "p", tokens=40)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_where_units_lie_changes_nothing_but_the_order_of_sums(models, whole, tmp_path):
    run(models["relu"], tmp_path / "p", config=replace(CONFIG, policy="none"))
    rows = [rows_of(arrays_of(models["relu"], out)[0]) for out in (tmp_path / "p", whole[1])]
    for found, expected in zip(*rows, strict=True):
        assert found["form"] == expected["form"]
        assert abs(found["recall"]["1.0"] - expected["recall"]["1.0"]) < 0.03
        assert abs(found["density"] - expected["density"]) < 0.002


def test_silu_sets_have_the_wanted_density(models, tmp_path):
    trained = run(models["silu"], tmp_path / "p", replace(RECIPE, density=0.25, lead=0))
    assert trained.density == 0.25
    for row in rows_of(trained.manifest):
        assert row["density"] == 0.25
        assert row["recall"]["1.0"] > 0.7
    assert all(entry.form.weighted for entry in trained.manifest.entries)


@pytest.mark.parametrize("family", ["opt", "falcon-40b", "falcon-7b", pytest.param("bamboo", marks=pytest.mark.slow)])
def test_sources_are_the_model_s_own_rows(family, tmp_path):
    """8-bit copies of them tell the live neurons from the stream and from the input; nothing is trained here."""
    checkpoint = Checkpoint.open(write(tmp_path / family, family, num_hidden_layers=2))
    shape, form = Shape.of(checkpoint.spec), Form(kind="gate", bits=8)
    settings = Recipe(passes=1).settings(200)
    trainer = Trainer(shape, (0, 1), (form,), settings, 0, sources_of(checkpoint))
    calls = []

    class Told(Feeder):
        def tell(self, seen):
            calls.append(seen)
            super().tell(seen)

    with Engine.from_pretrained(str(checkpoint.folder), ctx=48) as engine:
        engine.watch(Told(trainer, wanted_of(checkpoint, 0.5)).tell, streams=True)
        for window in samples_of([IDS], 200, 40, 0):
            engine.generate(window.tolist(), max_new_tokens=0)
    trainer.finish()
    found = {(one.entry.lead, one.entry.layer): one.entry.metrics for one in trainer.metrics()}
    assert found[0, 0]["recall"]["1.0"] > 0.95 and found[0, 1]["recall"]["1.0"] > 0.95
    assert trainer.tokens == 200 and len(calls) == 2 * len(samples_of([IDS], 200, 40, 0))


def test_samples_are_the_text_in_another_order():
    windows = samples_of([IDS[:500], IDS[500:]], 10_000, 40, 0)
    assert sorted(np.concatenate(windows).tolist()) == sorted(IDS.tolist())
    assert seen_tokens(windows) == len(IDS) - len(windows)
    assert [w.tolist() for w in windows] != [w.tolist() for w in samples_of([IDS[:500], IDS[500:]], 10_000, 40, 1)]
    for tokens in (1, 39, 40, 41, 333):
        assert seen_tokens(samples_of([IDS], tokens, 40, 0)) == tokens
    assert samples_of([IDS[:1]], 10, 40, 0) == []


def test_what_a_trainer_takes_is_estimated_from_above():
    shape = Shape(layers=3, hidden=64, ffn=96)
    forms, settings = forms_for(shape, "auto"), Recipe().settings(1000)
    rng = np.random.default_rng(0)
    before = {id(array) for array in jax.live_arrays()}

    def source(layer):
        return GateSource(rows=(rng.standard_normal((96, 64)).astype("f4"),), norm=np.ones(64, "f4"))

    trainer = Trainer(shape, (0, 1), forms, settings, 0, source)
    taken = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    estimate = device_bytes(shape, (0, 1), forms, settings)
    temporary = 8 * 4 * settings.batch * (96 + 64) + 2 * 4 * 96 * 64
    assert taken <= estimate - temporary + 2 * trainer.shape.hidden * 4 * len(trainer.tasks)
    assert taken > 0.5 * (estimate - temporary)


def test_the_report(whole, tmp_path):
    rows = rows_of(whole[0].manifest)
    lines = table_of(rows).splitlines()
    assert len(lines) == 1 + len(rows) and len({len(line) for line in lines}) == 1
    write_report(tmp_path, {"rows": rows})
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == rows


def test_the_picture(whole, tmp_path):
    pytest.importorskip("matplotlib")
    assert write_report(tmp_path, {"rows": rows_of(whole[0].manifest)})
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
