"""`convert`: what it says, what it writes, how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dynajax.checkpoint import Checkpoint
from dynajax.testing import random_tensors
from tests.cli.conftest import SPEC
from tests.convert.torch_files import save, save_zip

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pickles(tmp_path, bare_model):
    folder = tmp_path / "pickles"
    folder.mkdir()
    (folder / "config.json").write_bytes((bare_model / "config.json").read_bytes())
    save(folder / "pytorch_model.bin", random_tensors(SPEC, 0))
    return folder


def layer_files(folder, stem, make):
    folder.mkdir()
    for layer in range(SPEC.layers):
        save(folder / f"{stem}_{layer}.pt", make(layer))
    return folder


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_weights(command, pickles, tmp_path):
    out = tmp_path / "out"
    ended = command("convert", pickles, "--out", out, "--dtype", "float16", "--json")
    assert ended.json("convert") == {
        "source": str(pickles), "kind": "weights", "out": str(out),
        "tensors": len(random_tensors(SPEC, 0)), "bytes": bytes_in(out),
    }  # fmt: skip
    first, *_, last = ended.err.splitlines()
    assert first == f"converting {pickles}: PyTorch weights to safetensors, into {out}"
    assert last.startswith(f"{len(random_tensors(SPEC, 0))} tensors, ") and last.endswith(f"in {out}")
    assert Checkpoint.open(out).spec.dtype == "float16"
    assert command("convert", pickles, "--out", tmp_path / "quiet").out == ""


def test_predictors(command, bare_model, tmp_path):
    rank = 4
    make = lambda layer: {  # noqa: E731
        "fc1.weight": np.ones((rank, SPEC.hidden), np.float32), "fc2.weight": np.ones((SPEC.ffn, rank), np.float32),
    }  # fmt: skip
    source = layer_files(tmp_path / "in", "model", make)
    ended = command("convert", source, "--out", tmp_path / "out", "--model", bare_model, "--json")
    report = ended.json("convert")
    assert (report["kind"], report["tensors"]) == ("predictors", 2 * SPEC.layers)
    assert report["bytes"] == bytes_in(tmp_path / "out")
    (source / "model_2.pt").unlink()
    ended = command("convert", source, "--out", tmp_path / "other", "--model", bare_model)
    assert ended.code == 5 and ended.err.splitlines()[-1].startswith("error: ")


def test_statistics_make_a_placement(command, bare_model, tmp_path):
    source = layer_files(tmp_path / "in", "activation", lambda layer: np.arange(SPEC.ffn) + layer)
    argv = ("convert", source, "--out", tmp_path / "out")
    assert command(*argv).code == 2  # whose statistics?
    assert command(*argv, "--model", bare_model, "--dtype", "float16").code == 2
    report = command(*argv, "--model", bare_model, "--json").json("convert")
    stats = tmp_path / "out" / "activations.npz"
    assert (report["kind"], report["tensors"], report["bytes"]) == ("statistics", SPEC.layers, stats.stat().st_size)
    plan = command("plan", "--model", bare_model, "--stats", stats, "--ctx", 256, "--json")
    assert plan.code == 0, plan.err


def test_mistakes(command, pickles, tmp_path, bare_model):
    cases = [
        (2, ("convert", pickles, "--out", pickles)),
        (2, ("convert", pickles, "--out", tmp_path / "o", "--dtype", "int8")),
        (2, ("convert", pickles, "--out", tmp_path / "o", "--model", bare_model)),
        (2, ("convert", pickles)),
        (3, ("convert", tmp_path / "absent", "--out", tmp_path / "o")),
        (3, ("convert", bare_model, "--out", tmp_path / "o")),
    ]
    for code, argv in cases:
        ended = command(*argv)
        assert (ended.code, ended.out) == (code, ""), argv
        assert ended.err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "o").exists()


def test_a_malicious_file_is_refused_by_name(command, pickles, tmp_path):
    canary = tmp_path / "canary"
    order = f"touch {canary}".encode()
    evil = b"\x80\x02cposix\nsystem\nX" + len(order).to_bytes(4, "little") + order + b"\x85R."
    save_zip(pickles / "pytorch_model.bin", evil, {})
    ended = command("convert", pickles, "--out", tmp_path / "out")
    assert (ended.code, ended.out) == (3, "")
    assert "posix.system" in ended.err and "nothing of it was run" in ended.err
    assert not canary.exists() and not (tmp_path / "out").exists()


def test_the_script_is_the_command(pickles, tmp_path):
    argv = [sys.executable, ROOT / "scripts" / "convert.py", pickles, "--out", tmp_path / "out"]
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout == "" and (tmp_path / "out" / "model.safetensors").exists()
