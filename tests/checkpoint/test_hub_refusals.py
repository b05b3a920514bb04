"""Models from a hub when all is not well: offline, refused, unreachable, a disk that is too small."""

import errno
import logging
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from dynajax.checkpoint import download, hub, resolve_model
from dynajax.errors import ModelError, StorageError
from tests.hub_server import REPO

WEIGHTS = "model.safetensors"


def refusal(kind, name=REPO, **settings):
    with pytest.raises(kind) as caught:
        resolve_model(name, **settings)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 900
    return str(caught.value)


def test_offline_asks_nobody(on_hub, source, monkeypatch):
    server = on_hub(source)
    assert "--offline is set: run once without it" in refusal(ModelError, offline=True)
    folder = resolve_model(REPO)
    server.forget()
    assert resolve_model(REPO, offline=True) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(REPO) == folder
    assert server.requests == 0
    (folder / WEIGHTS).unlink()
    assert "HF_HUB_OFFLINE is set" in refusal(ModelError)
    assert server.requests == 0


def test_local_models_ask_nobody(on_hub, source, monkeypatch, tmp_path):
    server = on_hub(source)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / REPO)
    assert resolve_model(REPO) == Path(REPO)
    assert resolve_model("tiny-relullama").name == "tiny-relullama"
    assert server.requests == 0


@pytest.mark.parametrize(
    ("status", "headers", "kind", "words"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, ModelError, "no model maker/some-model on the hub"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, ModelError, "HF_TOKEN to a valid"),
        (403, {"X-Error-Code": "GatedRepo"}, ModelError, "accept its licence on"),
        (403, {}, ModelError, "refuses access"),
        (404, {"X-Error-Code": "EntryNotFound"}, ModelError, "(404)"),
        (429, {}, StorageError, "(429): run again, the download resumes"),
        (503, {}, StorageError, "(503): run again, the download resumes"),
    ],
)
def test_what_the_hub_refuses(on_hub, source, status, headers, kind, words):
    server = on_hub(source)
    server.trouble.api_status, server.trouble.headers = status, headers
    assert words in refusal(kind)
    server.trouble.api_status, server.trouble.file_status = None, status
    assert words in refusal(kind)


def test_a_misspelt_repository(on_hub, source):
    on_hub(source)
    line = refusal(ModelError, "SparseLLM/ReluLLaMA-7")
    assert "no model SparseLLM/ReluLLaMA-7 on the hub" in line and "did you mean relullama-7b" in line


def test_without_a_network(on_hub, source, monkeypatch, caplog):
    server = on_hub(source)
    folder = resolve_model(REPO)
    server.trouble.api_status = 503
    assert resolve_model(REPO) == folder
    said = [r for r in caplog.records if r.name.startswith("dynajax") and r.levelno > logging.INFO]
    assert [r.levelname for r in said] == ["WARNING"]
    assert "the copy of maker/some-model in the cache is used" in caplog.text
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert resolve_model(REPO) == folder
    (folder / WEIGHTS).unlink()
    assert "run again, the download resumes" in refusal(StorageError)


def test_an_answer_that_is_no_hub(on_hub, source, monkeypatch):
    server = on_hub(source)
    monkeypatch.setattr(server, "_list", lambda request, *_: server._send(request, 200, {}, b"<html>log in</html>"))
    assert "does not answer as a Hugging Face hub does (JSONDecodeError: " in refusal(StorageError)


def test_a_token_that_no_header_can_hold(on_hub, source, monkeypatch):
    on_hub(source)
    monkeypatch.setenv("HF_TOKEN", "t\u00f6ken")
    assert "does not answer as a Hugging Face hub does (UnicodeEncodeError: " in refusal(StorageError)


def test_a_disk_that_is_too_small(on_hub, source, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    size = sum((source / name).stat().st_size for name in (WEIGHTS, "tokenizer.json", "vocab.json"))
    server = on_hub(source)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(0, 0, size - 1))
    line = refusal(StorageError)
    assert f"needs {size} bytes" in line and f"{size - 1} bytes" in line
    assert server.sent(WEIGHTS) == 0
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(0, 0, size))
    resolve_model(REPO)


def test_pickles_need_their_size_twice(on_hub, source, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    folder = tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 50_000)
    on_hub(folder)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(0, 0, 99_999))
    assert "needs 100000 bytes (0.1 MiB), its conversion included" in refusal(StorageError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up(on_hub, source, monkeypatch, code):
    on_hub(source)

    def full(part, chunk):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(download._Part, "add", full)
    assert f"{os.strerror(code)}: make room and run again" in refusal(StorageError)
