"""ReLULLaMA-13B by its short name: real commands against a hub, undisturbed, cut off at any point, and without it.

All models are small; layout, spelling and names are the published ones. Every command is a process of its own.
"""

import contextlib
import json
import signal
import time

import jsonschema
import numpy as np
import pytest
import sentencepiece

from dynajax.checkpoint import Checkpoint
from dynajax.testing.oracle import family_logits
from predictors.folder import read_predictors
from tests.e2e.relullama import ALIAS, FFN, HIDDEN, LAYERS, REPO, ROOT, SHARDS, VOCAB, Machine, predictor_of

TEXT, NEW_TOKENS = "Call me Ishmael.", 8
GENERATE = ("--prompt", TEXT, "--max-new-tokens", NEW_TOKENS)
SAFE = f"{ALIAS}@safe"
both = pytest.mark.parametrize("name", [pytest.param(SAFE, id="safetensors"), pytest.param(ALIAS, id="pickles")])


@pytest.fixture(scope="session")
def local(repositories, tmp_path_factory):
    """What the model says as a local folder."""
    machine = Machine.at(tmp_path_factory.mktemp("local"), "http://127.0.0.1:9")  # where nobody listens
    result = machine.run("generate", "--model", repositories.safetensors, *GENERATE, "--json").json
    assert (result["sparsity"], len(result["token_ids"])) == ("exact", NEW_TOKENS)
    return result


def small_files(folder):
    """Bytes of what is downloaded of a repository."""
    ours = (path for path in folder.iterdir() if path.name not in ("README.md", ".gitattributes"))
    return sum(path.stat().st_size for path in ours)


def wait_for(condition, process):
    """Poll quickly: what is waited for may last for milliseconds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextlib.contextmanager
def downloading(machine, hub, name):
    """A `generate` that has some shards, a part of another, and lacks the rest."""
    hub.trouble.bytes_per_s = 800_000
    with machine.start("generate", "--model", name, *GENERATE, "--json") as process:
        large = f"of-{SHARDS:05}."
        wait_for(lambda: sum(large in seen.path for seen in hub.files) > 2 and hub.files[-1].sent > 100_000, process)
        yield process
    hub.trouble.bytes_per_s = None


# --- undisturbed --------------------------------------------------------------------------------------


def test_the_local_folder_says_what_the_oracle_says(local, repositories):
    """The tokens of SentencePiece's own library and of a float64 forward that reads the files by itself."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(repositories.safetensors / "tokenizer.model"))
    ids = [library.bos_id(), *library.encode(TEXT)]
    assert local["prompt_tokens"] == len(ids)
    for token in local["token_ids"]:
        assert token == family_logits(repositories.safetensors, ids)[-1].argmax()
        ids.append(token)


def test_pickles_are_downloaded_converted_and_run(machine, hub, repositories, local):
    """The whole way once; the rest of this file is what can come in between."""
    first = machine.run("generate", "--model", ALIAS, *GENERATE, "--json")
    assert first.json["token_ids"] == local["token_ids"]
    assert (first.json["model"], first.json["sparsity"]) == (ALIAS, "exact")
    assert hub.sent() == small_files(repositories.pickles)
    assert "download: 3/3 MiB" in first.err and "convert: " in first.err
    hub.forget()
    again = machine.run("generate", "--model", ALIAS, *GENERATE, "--offline")
    assert (again.code, again.out, hub.requests) == (0, local["text"] + "\n", 0)
    assert "download" not in again.err and "convert" not in again.err


@pytest.mark.slow
@both
def test_every_way_of_asking_gives_the_same_tokens(machine, hub, local, name):
    shown = machine.run("generate", "--model", name, *GENERATE)
    assert (shown.code, shown.out) == (0, local["text"] + "\n")
    hub.forget()
    again = machine.run("generate", "--model", name, *GENERATE, "--json")
    assert (again.json["token_ids"], hub.sent()) == (local["token_ids"], 0)
    hub.forget()
    offline = machine.run("generate", "--model", name, *GENERATE, "--json", HF_HUB_OFFLINE="1")
    unplugged = machine.run("generate", "--model", name, *GENERATE, "--json", HF_ENDPOINT="http://127.0.0.1:9")
    for ended in (offline, unplugged):
        assert ended.json["token_ids"] == local["token_ids"]
        assert ended.json["model_path"] == again.json["model_path"]
    assert "in the cache is used" in unplugged.err and "in the cache is used" not in offline.err
    assert hub.requests == 0


@pytest.mark.slow
@both
def test_float32_files_are_kept_in_the_hosts_type(machine, name, local):
    """Which is converted to while they are read; half the bytes, and half of them read."""
    by_type = {}
    for dtype in ("float32", "float16"):
        argv = ("--model", name, *GENERATE, "--policy", "none", "--host-dtype", dtype, "--json")
        by_type[dtype] = machine.run("generate", *argv).json
    whole, half = (by_type[dtype]["memory"]["host_bytes"] for dtype in ("float32", "float16"))
    assert whole == 4 * (3 * LAYERS * HIDDEN * FFN + VOCAB * HIDDEN) == 2 * half
    assert by_type["float32"]["host"]["bytes_read"] == 2 * by_type["float16"]["host"]["bytes_read"]
    assert by_type["float32"]["token_ids"] == local["token_ids"]
    assert by_type["float16"]["sparsity"] == "exact"


# --- cut off ------------------------------------------------------------------------------------------


@pytest.mark.slow
@both
def test_a_killed_download_goes_on(machine, hub, repositories, local, name):
    with downloading(machine, hub, name) as process:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert len(machine.partial()) == 1
    offline = machine.run("generate", "--model", name, *GENERATE, "--offline")
    assert offline.code == 3 and "is not complete in" in offline.refusal
    hub.forget()
    folder = repositories.pickles if name == ALIAS else repositories.safetensors
    again = machine.run("generate", "--model", name, *GENERATE, "--json")
    assert again.json["token_ids"] == local["token_ids"]
    assert 0 < hub.sent() <= small_files(folder) * 2 / 3
    assert machine.partial() == []


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_download_at_once(machine, hub, local, signum, code):
    with downloading(machine, hub, SAFE) as process:
        sent = time.monotonic()
        process.send_signal(signum)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    before, last = err.splitlines()[:-1], err.splitlines()[-1]
    assert last == "interrupted" and all(line.startswith("download") for line in before)
    assert time.monotonic() - sent < 5
    hub.forget()
    assert machine.run("generate", "--model", SAFE, *GENERATE, "--json").json["token_ids"] == local["token_ids"]
    assert hub.sent() < 2_400_000


@pytest.mark.slow
def test_a_killed_conversion_starts_over(machine, hub, local):
    """The kernel ends the process in the middle of a write, once the file has a million bytes; no shard is so large."""
    before = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    )
    ended = machine.run("generate", "--model", ALIAS, *GENERATE, "--json", before=before)
    assert (ended.code, ended.out) == (-signal.SIGXFSZ, "")
    (draft,) = machine.converted.iterdir()
    assert draft.name.startswith(".") and (draft / "model.safetensors").stat().st_size == 1_000_000
    hub.forget()
    again = machine.run("generate", "--model", ALIAS, *GENERATE, "--json")
    assert again.json["token_ids"] == local["token_ids"]
    assert hub.sent() == 0
    assert [path.name for path in machine.converted.iterdir()] == [draft.name[1:].removesuffix(".partial")]


# --- ahead of time ------------------------------------------------------------------------------------


def test_fetch_model_with_predictors(machine, hub, repositories):
    rules = json.loads((ROOT / "docs" / "schemas" / "fetch-model.json").read_text())
    fetch = ("fetch_model", ALIAS, "--predictors", "--json")
    first = machine.run(*fetch).json
    jsonschema.Draft202012Validator(rules).validate(first)
    predictors = first["predictors"]
    assert all((first["downloaded"], first["converted"], predictors["downloaded"], predictors["converted"]))
    fingerprint = Checkpoint.open(first["folder"]).fingerprint()
    folder = machine.home / "dynajax" / "predictors" / fingerprint[:16]
    assert predictors["folder"] == str(folder)
    manifest, weights = read_predictors(folder, fingerprint=fingerprint, layers=LAYERS, hidden=HIDDEN, ffn=FFN)
    assert manifest.fingerprint == fingerprint and manifest.ranks == tuple(3 + i for i in range(LAYERS))
    for layer, found in enumerate(weights):
        for ours, theirs in zip(found, predictor_of(layer), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert hub.sent() == small_files(repositories.pickles) + small_files(repositories.predictors)
    hub.forget()
    again = machine.run(*fetch).json
    known = {"downloaded": False, "converted": False}
    assert again == {**first, **known, "predictors": {**predictors, **known}}
    assert (hub.listings, hub.sent()) == (2, 0)
    shown = machine.run("fetch_model", ALIAS, "--predictors", HF_HUB_OFFLINE="1")
    assert shown.out.splitlines() == [first["folder"], str(folder)]


@pytest.mark.slow
def test_fetch_model_mends_what_is_damaged(machine, hub, repositories):
    first = machine.run("fetch_model", ALIAS, "--predictors", "--json").json
    (shard,) = (path for path in machine.hub_cache.rglob(f"snapshots/*/*-00003-of-{SHARDS:05}.bin"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-9] + bytes(9))
    hub.forget()
    assert not machine.run("fetch_model", ALIAS, "--json").json["downloaded"]  # names and sizes are right
    mended = machine.run("fetch_model", ALIAS, "--predictors", "--force", "--json").json
    assert mended == {**first, "predictors": {**first["predictors"], "downloaded": False}}
    assert hub.sent() == len(content) == hub.sent(shard.name)
    assert shard.read_bytes() == content
    for folder in (machine.converted, machine.home / "dynajax" / "predictors"):
        assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_fetch_model_of_a_revision(machine, hub, repositories):
    first = machine.run("fetch_model", f"{REPO}@safe", "--json").json
    assert (first["source"], first["downloaded"], first["converted"], first["predictors"]) == (None, True, False, None)
    shown = machine.run("fetch_model", f"{ALIAS}@{hub.commit(REPO, 'safe')}")
    assert shown.out == first["folder"] + "\n"
    assert hub.sent() == small_files(repositories.safetensors)
