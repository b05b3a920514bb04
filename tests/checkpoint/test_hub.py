"""Models from a hub: what is fetched, how it resumes, what is said when it fails. The hub is tests/hub_server.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dynajax.checkpoint import Checkpoint, resolve_model
from dynajax.checkpoint.aliases import HUB, PREDICTOR_REPOS
from dynajax.checkpoint.hub_files import needs_conversion
from dynajax.checkpoint.names import resolve_predictor
from dynajax.checkpoint.places import converted_folder
from dynajax.errors import ModelError, StorageError
from dynajax.testing import make_checkpoint
from tests.checkpoint.conftest import SPEC
from tests.hub_server import REPO, HubServer

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"


def refusal(kind, name=REPO, **settings):
    with pytest.raises(kind) as caught:
        resolve_model(name, **settings)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 900
    return str(caught.value)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


# --- what is fetched ----------------------------------------------------------------------------------


def test_a_model_is_downloaded_and_opens(on_hub, source, tmp_path, capfd, caplog):
    server, steps = on_hub(source), []
    caplog.set_level("INFO", "dynajax")
    folder = resolve_model(REPO, progress=lambda *step: steps.append(step))
    assert names_in(folder) == {"config.json", "tokenizer.json", "vocab.json", WEIGHTS}
    assert folder == tmp_path / "hub" / "models--maker--some-model" / "snapshots" / server.commit(REPO)
    assert Checkpoint.open(folder).fingerprint() == Checkpoint.open(source).fingerprint()
    assert steps[-1] == ("download", 2, 2) and steps.count(steps[-1]) == 1
    assert all(0 <= done <= total == 2 for _, done, total in steps)
    said = [record.getMessage() for record in caplog.records if record.name == "dynajax.checkpoint.hub"]
    assert len(said) == 1 and WEIGHTS in said[0] and "MiB" in said[0] and "are free" in said[0]
    assert capfd.readouterr() == ("", "")
    assert {seen.token for seen in server.files} == {"Bearer hf_of_the_test"}


def test_the_second_time_nothing_is_fetched(on_hub, source):
    server = on_hub(source)
    folder = resolve_model(REPO)
    server.forget()
    assert resolve_model(REPO) == folder
    assert (server.listings, server.files) == (1, [])
    assert resolve_model(f"{REPO}@{folder.name}") == folder  # a commit does not change
    assert server.listings == 1


def test_the_config_alone(on_hub, source):
    server = on_hub(source)
    (folder,) = {resolve_model(REPO, config_only=True), resolve_model(REPO, config_only=True, offline=True)}
    assert names_in(folder) == {"config.json"}
    assert server.sent() == (source / "config.json").stat().st_size
    assert "not complete" in refusal(ModelError, offline=True)
    assert WEIGHTS in names_in(resolve_model(REPO))


def test_shards_are_those_the_index_names(on_hub, tmp_path):
    folder = make_checkpoint(tmp_path / "model", SPEC, shards=3)
    (folder / "model-00001-of-00009.safetensors").write_text("of an older upload")
    on_hub(folder)
    got = resolve_model(REPO)
    assert names_in(got) == names_in(folder) - {"model-00001-of-00009.safetensors"}
    Checkpoint.open(got)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "does not hold: model-00002-of-00003" in refusal(ModelError)


def test_an_index_that_leads_outside(on_hub, tmp_path):
    folder = make_checkpoint(tmp_path / "model", SPEC)
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    index = {"weight_map": {"a": "../../evil.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    on_hub(folder)
    assert "not plain .safetensors files" in refusal(ModelError)


def test_names_that_lead_outside_are_not_written(on_hub, source, tmp_path):
    server = on_hub(source)
    entry = {"size": 5, "blobId": "0" * 40}
    server.trouble.listed = {"../../tokenizer_evil.json": entry, "sub/tokenizer.json": entry, "/tokenizer_x": entry}
    resolve_model(REPO)
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name or path.name in ("sub", "tokenizer_x")]
    server.trouble.listed = {"tokenizer_y.json": {"size": 5, "blobId": "../../../evil"}}
    assert "without size or hash" in refusal(StorageError)


def test_pickles_only_where_there_is_nothing_else(on_hub, source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "pickled")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 3000)
    on_hub(folder)
    assert not needs_conversion(resolve_model(REPO))
    (folder / WEIGHTS).unlink()
    got = resolve_model(REPO)
    assert needs_conversion(got) and (got / "pytorch_model.bin").is_file() and WEIGHTS not in names_in(got)
    assert converted_folder(got) == tmp_path / "dynajax" / "converted" / f"maker--some-model--{got.name[:12]}"
    assert converted_folder(folder).name.startswith("pickled--")


def test_a_repository_without_a_model(on_hub, source, tmp_path):
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "model.Q4.gguf").write_text("x")
    on_hub(folder)
    assert "download one of them" in refusal(ModelError)
    shutil.copy(source / "config.json", folder)
    assert "neither model.safetensors nor pytorch_model.bin" in refusal(ModelError)


def test_what_is_not_run_is_refused_by_its_config(on_hub, source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"}))
    server = on_hub(folder)
    assert "bert" in refusal(ModelError).lower()
    assert server.sent(WEIGHTS) == 0


def test_a_revision(on_hub, source, tmp_path):
    other = make_checkpoint(tmp_path / "other", SPEC, seed=1)
    server = on_hub(source, **{"refs/pr/1": other, "v2": other})
    one, two = resolve_model(f"{REPO}@v2"), resolve_model(f"{REPO}@{server.commit(REPO)}")
    assert (one.name, two.name) == (server.commit(REPO, "v2"), server.commit(REPO))
    assert resolve_model(f"{REPO}@refs/pr/1") == one
    assert resolve_model(f"{REPO}@v2", offline=True) == one
    assert f"{REPO} has no revision v3" in refusal(ModelError, f"{REPO}@v3")


def test_an_alias_of_a_repository_and_its_predictor(monkeypatch, on_hub, source, tmp_path):
    folder = tmp_path / "predictor"
    folder.mkdir()
    for layer in range(12):
        (folder / f"model_{layer}.pt").write_text(f"layer {layer}")
    server = on_hub(source, layers=folder)
    monkeypatch.setitem(HUB, "relullama-7b", REPO)
    monkeypatch.setitem(PREDICTOR_REPOS, "relullama-7b", f"{REPO}@layers")
    assert resolve_model("relullama-7b").name == server.commit(REPO)
    assert len(names_in(resolve_predictor("relullama-7b"))) == 12
    assert resolve_predictor("relullama-7b", offline=True).name == server.commit(REPO, "layers")
    assert resolve_predictor("opt-125m") is None


# --- interruptions ------------------------------------------------------------------------------------


def test_a_cut_connection_goes_on_by_itself(on_hub, source):
    server = on_hub(source)
    server.trouble.cut_after, server.trouble.cuts = 300_000, 2
    Checkpoint.open(resolve_model(REPO))
    starts = [seen.start for seen in server.files if seen.path.endswith(WEIGHTS)]
    assert len(starts) == 3 and starts[0] == 0 < starts[1] < starts[2]
    assert server.sent(WEIGHTS) == (source / WEIGHTS).stat().st_size


def test_the_next_run_asks_for_the_rest(on_hub, source):
    class Stop(BaseException):
        """As the command line raises for a signal."""

    def stop(stage, done, total):
        if done:
            raise Stop

    server, size = on_hub(source), (source / WEIGHTS).stat().st_size
    with pytest.raises(Stop):
        resolve_model(REPO, progress=stop)
    server.forget()
    Checkpoint.open(resolve_model(REPO))
    (seen,) = [seen for seen in server.files if seen.path.endswith(WEIGHTS)]
    assert seen.start >= 2**20 and seen.sent == size - seen.start


def test_a_hub_without_ranges_starts_over(on_hub, source):
    server, steps = on_hub(source), []
    server.trouble.cut_after, server.trouble.cuts, server.trouble.ignore_range = 900_000, 1, True
    Checkpoint.open(resolve_model(REPO, progress=lambda *step: steps.append(step)))
    assert steps[-1] == ("download", 2, 2)


def test_a_killed_process_is_resumed(source, tmp_path):
    size = (source / WEIGHTS).stat().st_size
    code = f"from dynajax.checkpoint import resolve_model; print(resolve_model({REPO!r}))"
    with HubServer({REPO: source}) as server:
        env = os.environ | {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}
        server.trouble.bytes_per_s = 400_000
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)
        partial = (
            tmp_path / "hub" / "models--maker--some-model" / "blobs" / f"{server.digest(source / WEIGHTS)}.incomplete"
        )
        deadline = time.monotonic() + 30
        while not (partial.is_file() and partial.stat().st_size > 100_000):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        server.trouble.bytes_per_s = None
        server.forget()
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert 0 < server.sent(WEIGHTS) <= size - 100_000
        server.forget()
        offline = env | {"HF_HUB_OFFLINE": "1"}
        again = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=offline, capture_output=True, text=True, check=True
        )
        assert (again.stdout, again.stderr, server.requests) == (done.stdout, "", 0)
    Checkpoint.open(Path(done.stdout.strip()))


def test_two_at_once(on_hub, source):
    server, got = on_hub(source), []
    server.trouble.bytes_per_s = 4_000_000
    threads = [threading.Thread(target=lambda: got.append(resolve_model(REPO)), name=f"get {n}") for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3 and len(set(got)) == 1
    assert server.sent(WEIGHTS) == (source / WEIGHTS).stat().st_size
    Checkpoint.open(got[0])


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_size_other_than_listed(on_hub, source, monkeypatch, extra):
    server = on_hub(source)
    real = server._sibling

    def listed(path):
        entry = real(path)
        if path.name == WEIGHTS:
            entry["lfs"]["size"] = entry["size"] = entry["size"] + extra
        return entry

    monkeypatch.setattr(server, "_sibling", listed)
    assert WEIGHTS in refusal(StorageError)
    monkeypatch.setattr(server, "_sibling", real)
    Checkpoint.open(resolve_model(REPO))


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_wrong_byte(on_hub, source, name):
    server = on_hub(source)
    server.trouble.flip = name
    assert f"{name} arrived damaged" in refusal(StorageError)
    server.trouble.flip = None
    Checkpoint.open(resolve_model(REPO))
