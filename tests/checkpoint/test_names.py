"""--model: aliases, folders, and what is said about everything else."""

from pathlib import Path

import pytest

from dynajax.checkpoint import names, resolve_model
from dynajax.errors import ModelError
from dynajax.testing import TINY, make_checkpoint


def refusal(name):
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_folder(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "some model", TINY)
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some model") == Path("some model")


def test_an_alias_names_the_shipped_folder(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "assets" / "tiny-relullama", TINY)
    monkeypatch.setattr(names.resources, "files", lambda package: tmp_path)
    assert resolve_model("tiny-relullama") == tmp_path / "assets" / "tiny-relullama"
    (tmp_path / "assets" / "tiny-relullama" / "config.json").unlink()
    assert "install dynajax again" in refusal("tiny-relullama")


def test_a_misspelt_alias():
    assert "did you mean tiny-relullama?" in refusal("tiny-relulama")


def test_the_nearest_three(monkeypatch):
    shipped = dict.fromkeys(("tiny-relullama", "tiny-relumoe", "tiny-reludense", "tiny-rel", "other"), "x")
    monkeypatch.setattr(names, "SHIPPED", shipped)
    assert refusal("tiny-relu").count("tiny-rel") >= 3 + 3  # in the list of aliases, and as suggestions


@pytest.mark.parametrize(
    "name", ["relullama-7b", "mixtral-8x7b", "user/repo", "", "x" * 5000, "a\0b", "~nobody7/x", "\n"]
)
def test_what_this_version_does_not_know(name):
    assert "this version runs local folders and the aliases tiny-relullama" in refusal(name)


def test_a_folder_without_config(tmp_path):
    assert "without config.json" in refusal(str(tmp_path))
