"""Training predictors of routing while an engine reads: what is fed, resuming, refusals, the command, their use."""

import json
import logging
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import prefetch
from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig
from dynajax.engine.mixture.foretelling import Foretellers, corrections_folder, foretelling_bytes
from dynajax.errors import MismatchError, UsageError
from dynajax.predictor_training.expert_report import KINDS, picture, rows_of, table_of
from dynajax.predictor_training.experts import device_bytes, routers_of, train_experts
from dynajax.predictor_training.report import write_report
from dynajax.predictor_training.texts import Text, samples_of
from dynajax.predictor_training.train import Recipe
from dynajax.testing import make_moe
from predictors.routing import load_corrections
from predictors.routing_fitting import RANKS, RoutingShape, chosen
from predictors.routing_folder import read_routing
from predictors.routing_training import RoutingTrainer
from tests.cli.conftest import ASSETS, command  # noqa: F401
from tests.shared_programs import shared_programs

IDS = np.random.default_rng(0).integers(3, 90, 900).astype(np.int32)
CONFIG = EngineConfig(ctx=48)
RECIPE = Recipe(checkpoint_tokens=100)


class Stop(BaseException):
    """Stands in for a signal."""


@pytest.fixture(scope="module", autouse=True)
def shared_compilation():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_moe(tmp_path_factory.mktemp("moe") / "m", "qwen3_moe", num_hidden_layers=3, seed=3)


def run(folder, out, recipe=RECIPE, *, resume=False, stop_at=None, tokens=400):
    """Train; `stop_at`: raise at that many tokens read."""

    def progress(stage, done, total):
        if stage == "train" and stop_at is not None and done >= stop_at:
            raise Stop

    text = Text(samples_of([IDS], tokens, 40, 0), "a test")
    checkpoint = Checkpoint.open(folder)
    return train_experts(str(folder), checkpoint, CONFIG, recipe, text, out, resume=resume, progress=progress)


def contents(folder, model):
    checkpoint = Checkpoint.open(model)
    sizes = {"layers": len(checkpoint.spec.unit_layers), "hidden": checkpoint.spec.hidden}
    return read_routing(folder, fingerprint=checkpoint.fingerprint(), **sizes)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "predictors"
    return run(model, out), out


def test_a_run_writes_a_folder(model, whole):
    trained, out = whole
    manifest, tree = contents(out, model)
    assert manifest == trained.manifest and (manifest.tokens, manifest.lead, manifest.layers) == (400, 1, (0, 1, 2))
    assert [(entry.lead, entry.asked) for entry in manifest.entries] == [(1, 0), (1, 1)]
    for entry in manifest.entries:
        assert entry.metrics[entry.kind]["recall"] >= entry.metrics["residual"]["recall"]
    assert np.abs(tree["means"]["hidden"]).max() > 0.01
    assert not out.with_name("predictors.partial").exists()


def test_an_interrupted_run_goes_on_and_ends_bit_equal(model, whole, tmp_path):
    out = tmp_path / "predictors"
    with pytest.raises(Stop):
        run(model, out, stop_at=200)
    assert not out.exists()
    with pytest.raises(UsageError, match="holds an unfinished run: add --resume"):
        run(model, out)
    with pytest.raises(UsageError, match="was begun with other settings"):
        run(model, out, replace(RECIPE, lead=2), resume=True)
    assert run(model, out, resume=True).resumed_at >= 200
    (manifest, tree), (expected, weights) = contents(out, model), contents(whole[1], model)
    assert manifest == expected
    jax.tree.map(np.testing.assert_array_equal, tree, weights)
    with pytest.raises(AssertionError):  # the comparison can fail
        jax.tree.map(np.testing.assert_array_equal, tree, jax.tree.map(lambda a: a + 1, weights))


def test_refusals_leave_nothing(model, tmp_path):
    for lead in (0, 3):
        with pytest.raises(UsageError, match=f"--lead must be from 1 to 2, the model has 3 layers .*, got {lead}"):
            run(model, tmp_path / "p", replace(RECIPE, lead=lead))
    with pytest.raises(UsageError, match="--buffer is too small"):
        run(model, tmp_path / "p", replace(RECIPE, buffer_bytes=2**10))
    assert not list(tmp_path.iterdir())


def test_what_a_trainer_takes_is_estimated_from_above(model):
    checkpoint = Checkpoint.open(model)
    shape, settings = RoutingShape.of(checkpoint.spec), RECIPE.settings(1000)
    before = {id(array) for array in jax.live_arrays()}
    trainer = RoutingTrainer(shape, (1, 2), routers_of(checkpoint), settings)
    taken = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    assert len(trainer.places) == 3 and taken <= device_bytes(shape, range(1, 3), settings)


# --- who reads them ---------------------------------------------------------------------------------------------------


@pytest.fixture
def layers(model):
    with Engine.from_pretrained(str(model), ctx=48, policy="static") as engine:
        yield engine._parts.layers


@pytest.mark.parametrize("kind", ["corrected", "residual", "residual-mean", "gate"])
def test_an_engine_is_told_what_was_trained(model, whole, layers, kind):
    checkpoint = Checkpoint.open(model)
    shape, fingerprint, hidden = RoutingShape.of(checkpoint.spec), checkpoint.fingerprint(), checkpoint.spec.hidden
    told = Foretellers.load(layers, kind, 1, model, predictor=str(whole[1]), fingerprint=fingerprint)
    known = load_corrections(whole[1], kind, 1, 3, hidden, fingerprint)
    assert told.kinds == {m: known[m].kind if known else "gate" for m in (0, 1)}
    assert [told.target(m) for m in range(3)] == [1, 2, None]
    h = jnp.asarray(np.random.default_rng(0).standard_normal((1, hidden)), jnp.float32)
    for m in (0, 1):
        correction = tuple(np.asarray(array) for array in told.corrections[m])
        expected = chosen(h, correction, routers_of(checkpoint)(m + 1), shape.router)
        np.testing.assert_array_equal(told.ids(m, h), expected)
    if kind != "corrected":
        assert foretelling_bytes(checkpoint.spec, kind, 1, whole[1], fingerprint) == 2 * 4 * hidden
    with pytest.raises(MismatchError, match="was made for the model"):
        Foretellers.load(layers, "corrected", 1, model, predictor=str(whole[1]), fingerprint="0" * 64)


def test_a_trained_map_is_used(model, whole, layers):
    """The same numbers by the plain formula, with a rank above 0."""
    told = Foretellers.load(layers, "corrected", 1, model, predictor=str(whole[1]))
    checkpoint, rng = Checkpoint.open(model), np.random.default_rng(0)
    hidden = checkpoint.spec.hidden
    shapes = ((hidden,), (RANKS[0], hidden), (hidden, RANKS[0]))
    correction = tuple(rng.standard_normal(shape).astype("f4") for shape in shapes)
    mine = replace(told, corrections={0: jax.device_put(correction)})
    router, shape = routers_of(checkpoint)(1), RoutingShape.of(checkpoint.spec)
    differ = 0
    for _ in range(8):
        h = rng.standard_normal((1, hidden)).astype("f4")
        shift, down, up = correction
        logits = (h + shift + np.maximum(h @ down.T, 0) @ up.T) @ router["router"].T
        best = np.argsort(-logits, axis=1)[:, : shape.top_k]
        np.testing.assert_array_equal(mine.ids(0, jnp.asarray(h)), best)
        differ += not np.array_equal(best, np.argsort(-(h @ router["router"].T), axis=1)[:, : shape.top_k])
    assert differ  # what was compared does depend on the correction


def test_where_predictors_are_looked_for(model, whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "cache"))
    found = {"gate": corrections_folder("gate", model, "auto", None, asked=True)}
    assert found == {"gate": None} and not caplog.records
    for kind, asked in (("corrected", False), ("corrected", True), ("residual", False)):
        with caplog.at_level(logging.WARNING):
            assert corrections_folder(kind, model, "auto", "ab" * 32, asked=asked) is None
        assert [("scripts/train_predictors.py" in text) for text in caplog.messages] == [True]
        caplog.clear()
    assert corrections_folder("corrected", model, "gate", None, asked=False) is None and not caplog.records
    for kind in ("residual", "residual-mean"):
        with pytest.raises(UsageError, match=f"--prefetch {kind} needs trained predictors.*: run scripts/train_pred"):
            corrections_folder(kind, model, "auto", None, asked=True)
    with pytest.raises(UsageError, match="--predictor mlp is for neurons"):
        corrections_folder("corrected", model, "mlp", None, asked=False)
    assert corrections_folder("residual", model, str(whole[1]), None, asked=True) == whole[1]


# --- the command and the report ---------------------------------------------------------------------------------------


def test_the_report(whole, tmp_path):
    rows = rows_of(whole[0].manifest)
    assert [(row["lead"], row["asked"], row["layer"]) for row in rows] == [(1, 0, 1), (1, 1, 2)]
    lines = table_of(rows).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert write_report(tmp_path, {"rows": rows}, picture) in (True, False)
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == rows


def test_the_command(command, model, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    argv = ("--model", model, "--ids", "random:300", "--ctx", "48", "--out", out)
    found = command("train-predictors", *argv, "--lead", "2", "--json").json("train-predictors")
    assert (found["kind"], found["tokens"], found["wanted_density"]) == ("experts", 293, None)
    assert [(row["lead"], row["layer"]) for row in found["rows"]] == [(1, 1), (1, 2), (2, 2)]
    assert set(found["bytes"]) == {"1", "2"} and {*found["rows"][0]["recall"]} == {*KINDS}
    for flags, message in (
        (("--kind", "gate"), "--kind is for neurons, and this model has experts: leave it out"),
        (("--density", "0.2"), "--density is for neurons"),
        (("--lead", "3"), "--lead must be from 1 to 2"),
    ):
        done = command("train-predictors", *argv[:-1], tmp_path / "p", *flags)
        assert (done.code, done.out) == (2, "") and message in done.err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- the benchmark's own parts ----------------------------------------------------------------------------------------


def test_workloads_of_groups():
    ids = np.array([[[[0, 1]], [[2, 1]]], [[[1, 3]], [[-1, -1]]], [[[3, 3]], [[3, 3]]]], np.int32)  # [3, 2, 1, 2]
    (loads,) = prefetch.grouped(ids, 2, 4)
    np.testing.assert_array_equal(loads[:, 0], [[1, 2, 0, 1], [0, 1, 1, 0]])
    (graded,) = prefetch.grouped(ids, 2, 4, graded=True)
    np.testing.assert_allclose(graded[:, 0], [[1, 1.7, 0, 0.7], [0, 0.7, 1, 0]])
    past = prefetch.counted(loads, 0)
    np.testing.assert_allclose(past[:, 0], [[0, 0, 0, 0], [0.5, 1, 0, 0.5]])


def test_foresight_is_worth_what_it_should_be():
    """Perfect foresight finds every busiest expert and all of its own gain; nothing foretold gains nothing."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permuted(np.arange(8)[None].repeat(40, 0), axis=1)[:, :2] for _ in range(8)])[:, :, None]
    ids = np.concatenate([ids, ids[:, :, ::-1]], axis=2).astype(np.int32)  # [8, 40, 2, 2]
    frequency = np.full((2, 8), 0.25)
    case = prefetch.Case.of(ids, frequency, 1, 0.25, 200)
    assert case.some == 5 and abs(case.costs.copy_s / (case.replayed(None)[0] + prefetch.DENSE_S) - 0.9) < 0.1
    perfect = case.perfect(1)
    assert case.busiest(perfect, 1) == [1.0]
    assert case.replayed(perfect)[0] < case.replayed(None)[0] == case.replayed([0 * part for part in perfect])[0]
    wrong = [np.roll(part, 1, axis=-1) for part in perfect]
    assert case.busiest(wrong, 1)[0] < 0.5
    assert prefetch.thirds([1.0, None, 0.0]) == {"first": 1.0, "middle": None, "last": 0.0, "all": 0.5}


def test_the_benchmark_runs(tmp_path, capsys):
    folder, text = make_moe(tmp_path / "m", "qwen3_moe", num_hidden_layers=2, vocab_size=4096), tmp_path / "text.txt"
    for path in ASSETS.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    text.write_text("It was a truth universally acknowledged. " * 60, encoding="utf-8")
    argv = f"--model {folder} --text {text} --heldout {text} --tokens 200 --windows 8 --length 31 --leads 1 --rows 1 2"
    prefetch.main([*argv.split(), "--steps", "62", "--out", str(tmp_path / "table.md")])
    *table, last = capsys.readouterr().out.strip().splitlines()
    told = json.loads(last)
    assert [row["kind"] for row in told["rows"]] == list(prefetch.ALL) and told["measured_tokens"] == 8 * 31
    assert any(line.startswith("| residual-mean |") for line in table)
    assert (tmp_path / "table.md").read_text().startswith("| lead 1: recall")
