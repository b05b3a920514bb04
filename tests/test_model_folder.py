"""Names to folders with readable weights: pickles are converted once."""

import shutil
from pathlib import Path

import pytest

from dynajax.checkpoint import Checkpoint
from dynajax.convert import weights
from dynajax.errors import UsageError
from dynajax.model_folder import model_folder
from dynajax.testing import TINY, make_checkpoint


@pytest.fixture
def pickled(tmp_path, monkeypatch):
    """A model folder of pickles only; the conversion is pretended."""
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "cache"))
    folder = make_checkpoint(tmp_path / "pickled", TINY)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def test_pickles_are_converted_once(pickled, monkeypatch, tmp_path):
    calls = []

    def convert(source, target, *, progress):
        calls.append((source, target))
        progress("convert", 1, 1)
        return shutil.copytree(source, target)

    monkeypatch.setattr(weights, "convert_weights", convert)
    assert model_folder(str(pickled), config_only=True) == pickled
    assert calls == []
    steps = []
    target = model_folder(str(pickled), progress=lambda *step: steps.append(step))
    assert target.parent == tmp_path / "cache" / "converted" and target.name.startswith("pickled--")
    assert model_folder(str(pickled)) == target
    assert (calls, steps) == ([(pickled, target)], [("convert", 1, 1)])


@pytest.mark.parametrize("written", [True, False])
def test_another_process_converts_at_the_same_time(pickled, monkeypatch, written):
    def convert(source, target, *, progress):
        if written:
            shutil.copytree(source, target)
        raise UsageError("another process is writing it")

    monkeypatch.setattr(weights, "convert_weights", convert)
    if written:
        assert (model_folder(str(pickled)) / "config.json").is_file()
    else:
        with pytest.raises(UsageError):
            model_folder(str(pickled))


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_conversion_that_lost_a_file_is_made_again(pickled, monkeypatch, lost):
    def convert(source, target, *, progress):
        assert not target.exists()
        return make_checkpoint(target, TINY, shards=2)

    monkeypatch.setattr(weights, "convert_weights", convert)
    target = model_folder(str(pickled))
    (target / lost).unlink()
    if lost.endswith(".index.json"):
        (target / lost).write_text("{")
    assert model_folder(str(pickled)) == target and (target / lost).is_file()
    Checkpoint.open(target)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_other_folders_and_files_stay_as_they_are(tmp_path):
    folder = make_checkpoint(tmp_path / "model", TINY)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert model_folder(str(folder)) == folder
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert model_folder(str(path)) == Path(path)
