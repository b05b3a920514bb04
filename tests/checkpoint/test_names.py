"""--model: aliases, folders, files, repositories, and what is said about everything else. No network here."""

from pathlib import Path

import pytest

from dynajax.checkpoint import aliases, names, resolve_model
from dynajax.checkpoint.places import cache_folder, converted_folder
from dynajax.errors import ModelError, StorageError
from dynajax.testing import TINY, make_checkpoint


@pytest.fixture
def asked(monkeypatch):
    """The repositories that would be looked up."""
    repos = []

    def snapshot_folder(repo, wanted, *, offline, progress):
        repos.append(repo)
        return Path("snapshot")

    monkeypatch.setattr(names, "snapshot_folder", snapshot_folder)
    return repos


def refusal(name):
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 800
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_a_folder(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "some model", TINY)
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some model") == Path("some model")


def test_a_gguf_file(tmp_path, asked):
    path = tmp_path / "model.Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == path
    assert "no model" in refusal(str(tmp_path / "other.gguf"))
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "no model" in refusal(str(tmp_path / "model.bin"))
    assert asked == []


@pytest.mark.parametrize("name", ["tiny-relullama", "tiny-moe"])
def test_an_alias_names_the_shipped_folder(tmp_path, monkeypatch, name):
    make_checkpoint(tmp_path / "assets" / name, TINY)
    monkeypatch.setattr(names.resources, "files", lambda package: tmp_path)
    assert resolve_model(name) == tmp_path / "assets" / name
    (tmp_path / "assets" / name / "config.json").unlink()
    assert "install dynajax again" in refusal(name)


def test_a_fetched_model(tmp_path, monkeypatch, asked):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path))
    assert refusal("smollm2-135m").endswith("run python scripts/fetch_model.py smollm2-135m")
    folder = make_checkpoint(tmp_path / "models" / "smollm2-135m", TINY)
    assert resolve_model("smollm2-135m") == folder
    assert asked == []


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("relullama-13b", "SparseLLM/ReluLLaMA-13B"),
        ("prosparse-7b", "SparseLLM/prosparse-llama-2-7b"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B"),
        ("olmoe-1b-7b", "allenai/OLMoE-1B-7B-0125"),
        ("deepseek-v2-lite@main", "deepseek-ai/DeepSeek-V2-Lite@main"),
        ("granite-1b-a400m", "ibm-granite/granite-3.1-1b-a400m-base"),
        ("opt-1.3b@refs/pr/1", "facebook/opt-1.3b@refs/pr/1"),
        ("user/repo", "user/repo"),
        ("user/repo.v1@0123abc", "user/repo.v1@0123abc"),
    ],
)
def test_a_repository(asked, name, repo):
    assert resolve_model(name) == Path("snapshot")
    assert asked == [repo]


def test_every_alias_is_of_one_kind():
    every = aliases.runnable()
    assert len(every) == len(set(every)) and set(aliases.PREDICTOR_REPOS) <= set(aliases.HUB)


def test_a_misspelt_alias():
    assert "did you mean tiny-relullama" in refusal("tiny-relulama")
    assert "did you mean relullama-7b, " in refusal("ReluLlama-7b")


@pytest.mark.parametrize(
    "name",
    [
        *("", "x" * 5000, "a\0b", "~nobody7/x", "\n", "a/b/c", "./user/repo", "../user", "user/..", "user/.repo"),
        *("user--x/repo", "user/repo@", "user/repo@../x", "user/repo@a/../b", "user/repo@/x", "user/repo@x@y"),
        *("user/repo?x", "user/repo#x", "user/re po", "http://host/user/repo", "relullama-7b@../x", "user/repo.git"),
    ],
)
def test_what_names_nothing(asked, name):
    assert "give a folder, a .gguf file, user/repo[@revision] on the hub, or one of tiny-relullama" in refusal(name)
    assert asked == []


def test_a_folder_without_config(tmp_path):
    assert "without config.json" in refusal(str(tmp_path))


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAJAX_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("DYNAJAX_CACHE")
    assert cache_folder() == Path("/b/dynajax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert cache_folder() == Path("/home/x/.cache/dynajax")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="set DYNAJAX_CACHE"):
        cache_folder()


def test_other_files_have_another_converted_folder(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    before = converted_folder(tmp_path)
    assert converted_folder(tmp_path) == before
    (tmp_path / "pytorch_model.bin").write_bytes(b"xy")
    assert converted_folder(tmp_path) != before
