"""The synthetic checkpoint's own predictors, in the engine."""

import pytest

from benchmarks import make_checkpoint, own_predictors
from dynajax import Engine
from dynajax.errors import MismatchError, StorageError
from predictors.folder import read_manifest

PROMPT = list(range(512, 544))
SETTINGS = {"sparsity": "predicted", "ctx": 256, "policy": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "tiny"
    make_checkpoint.main([str(folder), "--shape", "tiny"])
    return folder


@pytest.fixture(scope="module")
def predictors(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("predictors") / "tiny"
    own_predictors.main([str(folder), str(target)])
    return target


def test_the_engine_skips_by_them(folder, predictors):
    settings = {
        "predictor": str(predictors),
        "sparsity": "predicted",
        "ctx": 256,
        "policy": "none",
        "set": {"theta": 0.5},
    }
    with Engine.from_pretrained(str(folder), **settings) as engine:
        result = engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert result.predictor == "mlp" and result.sparsity == "predicted"
    assert result.units.recall > 0.75, "the generator's own check finds four fifths of the live neurons"
    assert abs(result.units.density - make_checkpoint.Recipe().active) < 0.04


def test_at_the_engine_s_own_threshold_they_find_too_much(folder, predictors):
    with Engine.from_pretrained(str(folder), predictor=str(predictors), **SETTINGS) as engine:
        result = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert result.units.density > 0.5


def test_they_are_of_one_model(folder, predictors, tmp_path):
    spec = make_checkpoint.SHAPES["tiny"]
    assert read_manifest(predictors).ranks == (read_manifest(predictors).ranks[0],) * spec.layers
    make_checkpoint.main([str(tmp_path / "other"), "--shape", "tiny", "--seed", "1"])
    with pytest.raises(MismatchError):
        Engine.from_pretrained(str(tmp_path / "other"), predictor=str(predictors), sparsity="predicted", ctx=256)


def test_a_model_without_any_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"predictors\.safetensors"):
        own_predictors.convert(tmp_path, tmp_path / "out")
