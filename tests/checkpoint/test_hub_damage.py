"""A cache that somebody damaged: found out and mended where the hub can be asked."""

import os

import pytest

from dynajax.checkpoint import Checkpoint, resolve_model
from dynajax.checkpoint.hub import drop_damaged
from dynajax.errors import ModelError
from tests.hub_server import REPO

WEIGHTS = "model.safetensors"


@pytest.fixture
def cached(on_hub, source):
    """(the hub, the whole snapshot in the cache)"""
    server = on_hub(source)
    folder = resolve_model(REPO)
    server.forget()
    return server, folder


def flip_last_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_what_is_whole_stays(cached):
    server, folder = cached
    assert drop_damaged(folder) == []
    assert resolve_model(REPO, offline=True) == folder
    assert server.requests == 0


@pytest.mark.parametrize("name", [WEIGHTS, "vocab.json"])  # named by its SHA-256, and as git does
def test_a_wrong_byte_is_found_and_fetched_again(cached, source, name):
    server, folder = cached
    flip_last_byte(folder / name)
    assert resolve_model(REPO) == folder and server.sent() == 0  # sizes alone do not tell
    assert drop_damaged(folder) == [name]
    assert not (folder / name).exists()
    assert resolve_model(REPO) == folder
    assert [seen.path for seen in server.files] == [f"{REPO}/{name}"]
    assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_what_cannot_be_checked_is_fetched_again_and_nothing_outside_is_touched(cached, tmp_path):
    _, folder = cached
    for name in (WEIGHTS, "tokenizer.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (tmp_path / name).write_bytes(content)
    (folder / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes())  # as on a file system without links
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    (folder / "vocab.json").resolve().unlink()
    assert drop_damaged(folder) == [WEIGHTS, "tokenizer.json", "vocab.json"]
    assert (tmp_path / "tokenizer.json").is_file()
    Checkpoint.open(resolve_model(REPO))
    assert {path.name for path in folder.iterdir()} >= {WEIGHTS, "tokenizer.json", "vocab.json"}


def test_a_truncated_file_is_fetched_again(cached):
    server, folder = cached
    blob = (folder / WEIGHTS).resolve()
    os.truncate(blob, 1000)
    assert resolve_model(REPO) == folder
    assert server.sent() == server.sent(WEIGHTS) == blob.stat().st_size > 1000
    Checkpoint.open(folder)


def test_a_ref_that_says_nothing(cached):
    server, folder = cached
    ref = folder.parent.parent / "refs" / "main"
    ref.write_text("nonsense")
    with pytest.raises(ModelError, match="not complete"):
        resolve_model(REPO, offline=True)
    assert resolve_model(REPO) == folder
    assert (server.sent(), ref.read_text()) == (0, folder.name)
