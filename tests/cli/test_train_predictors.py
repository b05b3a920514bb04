import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from predictors.folder import read_manifest
from tests.cli.conftest import ROOT

SMALL = ("--kind", "gate", "--lead", "0", "--ctx", "32")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It was a truth universally acknowledged. " * 60, encoding="utf-8")
    return path


def test_the_object_and_the_report(command, model, text, tmp_path):
    out = tmp_path / "out"
    argv = ("--model", model, "--text", text, "--tokens", "5000", "--out", out, *SMALL)
    done = command("train-predictors", *argv, "--json")
    found = done.json("train-predictors")
    assert 100 < found["tokens"] < 5000 and "it is read once" in done.err
    assert [(row["lead"], row["layer"]) for row in found["rows"]] == [(0, 0), (0, 1), (0, 2)]
    assert found["bytes"] == {"0": sum(row["bytes"] for row in found["rows"])}
    assert json.loads((out / "report.json").read_text()) == found
    assert read_manifest(out).source == f"{found['tokens']} tokens of {text}"
    again = command("train-predictors", *argv)
    assert (again.code, again.out, again.err.count("\n")) == (2, "", 1)
    assert "exists and is not empty: name a new folder, or remove it first" in again.err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ((), 2, "give one of --text FILE|DIR and --ids FILE"),
        (("--ids", "random:200", "--text", "x"), 2, "give one of --text"),
        (("--ids", "random:200", "--tokens", "10"), 2, "--tokens must be an integer >= 100"),
        (("--ids", "random:20"), 2, "at least 100 tokens are needed, the text has 19"),
        (("--ids", "random:200", "--lead", "3"), 2, "--lead must be less than the model's 3 layers"),
        (("--ids", "random:200", "--kind", "magic"), 2, "--kind must be one of auto, gate, mlp"),
        (("--ids", "random:200", "--density", "0"), 2, "--density must be above 0"),
        (("--ids", "random:200", "--buffer", "12"), 2, "--buffer must be a size such as 1GiB"),
        (("--ids", "random:200", "--buffer", "1KiB"), 2, "--buffer is too small"),
        (("--ids", "random:200", "--ctx", "1"), 2, "--ctx must be at least 2"),
        (("--ids", "random:200", "--out", "{file}/p"), 6, "cannot write"),
        (("--ids", "random:200", "--out", "{file}"), 2, "exists and is not a folder"),
        (("--text", "{file}"), 2, "has no tokenizer: give --ids instead"),
        (("--text", "{file}.missing"), 6, "cannot read"),
    ],
)
def test_refusals(command, bare_model, model, tmp_path, argv, code, message):
    (tmp_path / "file").write_text("some text", encoding="utf-8")
    argv = [word.format(file=tmp_path / "file") for word in argv]
    argv += [] if "--out" in argv else ["--out", str(tmp_path / "out")]
    folder = model if "{file}.missing" in argv or "missing" in " ".join(argv) else bare_model
    done = command("train-predictors", "--model", folder, *argv)
    assert (done.code, done.out) == (code, ""), done.err
    assert message in done.err.splitlines()[-1] and "Traceback" not in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_killed_command_goes_on(signum, code, bare_model, tmp_path):
    """A state is on disk when the signal comes."""
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(3, 4096, 9000))
    argv = [sys.executable, "scripts/train_predictors.py", "--model", bare_model, "--ids", ids, *SMALL]
    argv = [*map(str, argv), "--checkpoint-tokens", "1000", "--out"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    subprocess.run([*argv, str(whole)], cwd=ROOT, check=True, capture_output=True)
    with subprocess.Popen([*argv, str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        states = tmp_path / "out.partial" / "states"
        while not (states.is_dir() and any(name.isdigit() for name in os.listdir(states))):
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.01)
        child.send_signal(signum)
        _, err = child.communicate(timeout=120)
    assert child.returncode == code and "Traceback" not in err
    done = subprocess.run([*argv, str(out), "--resume", "--json"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["resumed_at"] >= 1000
    assert read_manifest(out) == read_manifest(whole)
    found, expected = (arrays_of(folder) for folder in (out, whole))
    assert found.keys() == expected.keys()
    for key, arrays in expected.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[key][name], array, err_msg=f"{key} {name}")


def arrays_of(folder):
    from predictors.folder import read_entries

    manifest = read_manifest(folder)
    sizes = {name: getattr(manifest, name) for name in ("layers", "hidden", "ffn")}
    return {entry.key: arrays for entry, arrays in read_entries(folder, fingerprint=None, **sizes)[1]}
