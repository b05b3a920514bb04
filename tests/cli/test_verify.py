"""The verb `verify`: what goes to stdout, what to stderr, and how it ends."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.checksums import write_checksums
from dynajax.verify import checking
from tests.shared_programs import shared_programs

ROOT = Path(__file__).parents[2]
RULES = json.loads((ROOT / "docs" / "schemas" / "verify.json").read_text())
QUICK = ("--dtype", "float32", "--host-mode", "threads")
SHIPPED = ROOT / "dynajax" / "assets" / "tiny-relullama" / "model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def shared_compilation():
    with shared_programs():
        yield


def checked_json(text):
    """The object on the only line of stdout."""
    assert text.count("\n") == 1
    value = json.loads(text)
    jsonschema.Draft202012Validator(RULES).validate(value)
    return value


def damage(monkeypatch, change):
    """What the engine is given of the final norm is not what the file says."""
    read = Checkpoint.norm

    def damaged(self, dtype):
        parts = read(self, dtype)
        change(parts[0])
        return parts

    monkeypatch.setattr(Checkpoint, "norm", damaged)


def test_the_report_is_the_committed_schema(command, bare_model):
    ended = command("verify", "--model", bare_model, *QUICK, "--json")
    report = ended.json("verify")
    assert report["passed"] and report["model"] == report["against"] == str(bare_model)
    assert (report["tokens"], report["layers"], report["checksums"]) == (48, 3, None)
    assert [run["placement"] for run in report["runs"]] == ["host", "half", "device"]
    assert ended.err.count("  ok\n") == 3 and "reference: 3/3" in ended.err


def test_people_read_a_line_a_run_and_a_summary(command, model):
    ended = command("verify", "--model", model, *QUICK, "--policy", "none")
    assert ended.code == 0
    assert ended.out == (
        f"{model}: 1 of 1 ways of running agree with the reference ({model}, {tokens(model)} tokens, 3 layers), "
        "0 not run; no checksums.json\n"
    )
    assert "float32   host    threads   layers " in ended.err and "allowed 1e-04  same token 100%  ok\n" in ended.err


def tokens(model):
    from dynajax.text import load_tokenizer

    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    return min(48, len(tokenizer.encode(checking.TEXT)))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_weight_ends_with_7_and_its_name(command, bare_model, monkeypatch, as_json):
    damage(monkeypatch, lambda norm: norm.__setitem__(3, 2.5))
    ended = command("verify", "--model", bare_model, *QUICK, *["--json"] * as_json)
    assert ended.code == 7
    said = "in the logits: model.norm.weight on the device (1 of 32 values)"
    assert ended.err.endswith(f"error: float32, host, threads: off {said}\n")
    assert ended.err.count(f"OFF {said}\n") == 3
    if as_json:
        report = checked_json(ended.out)
        assert report["passed"] is False
        (found,) = report["runs"][0]["tensors"]
        assert found | {"error": 0} == {
            "tensor": "model.norm.weight",
            "layer": None,
            "where": "device",
            "values": 1,
            "of": 32,
            "error": 0,
        }
    else:
        assert ended.out.startswith(f"{bare_model}: 0 of 3 ways of running agree")


def test_infinite_errors_are_null(command, bare_model, monkeypatch):
    damage(monkeypatch, lambda norm: norm.__setitem__(3, np.nan))
    ended = command("verify", "--model", bare_model, *QUICK, "--policy", "none", "--json")
    (run,) = checked_json(ended.out)["runs"]
    assert ended.code == 7 and run["logits_error"] is None and run["tensors"][0]["error"] is None


def test_a_wrong_computation_blames_no_weight(command, bare_model, monkeypatch):
    from dynajax.engine.cold import ColdSide

    run = ColdSide.run
    monkeypatch.setattr(ColdSide, "run", lambda self, layer, h: 2 * run(self, layer, h))
    ended = command("verify", "--model", bare_model, *QUICK, "--policy", "none")
    assert ended.code == 7
    assert "off from layer 1 on, and no weight differs: it is the computation\n" in ended.err


def test_changed_bytes_end_with_7_and_the_tensor(command, model, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_checksums(folder, {"model.norm.weight": "0" * 64})
    ended = command("verify", "--model", folder, *QUICK, "--policy", "none")
    assert ended.code == 7 and "1 tensors with other bytes" in ended.out
    assert "error: model.norm.weight is not what was written" in ended.err


def test_if_nothing_could_be_run_the_remedy_is_said(command, bare_model):
    ended = command("verify", "--model", bare_model, *QUICK, "--vram-budget", "1KiB", "--json")
    report = checked_json(ended.out)
    assert ended.code == 4 and report["passed"] is False
    assert all(run["passed"] is None and "--vram-budget" in run["skipped"] for run in report["runs"])
    assert "error: nothing could be run: the part that must be on the device needs" in ended.err
    assert ended.err.count("not run: ") == 3


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--tolerance", "0.1"), 2, "--tolerance goes with --against"),
        (("--tolerance", "2", "--against", "x"), 2, "--tolerance must be above 0 and below 1"),
        (("--dtype", "float16", "--host-dtype", "bfloat16"), 2, "cannot fill a float16 pool"),
        (("--against", "no/such/model/anywhere"), 3, "no model no/such/model/anywhere"),
    ],
)
def test_mistakes_are_one_line(command, bare_model, argv, code, said):
    ended = command("verify", "--model", bare_model, *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert said in ended.err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_after_the_run(command, bare_model, monkeypatch, signum, code):
    run, ran = checking._run, []

    def interrupted(*args):
        os.kill(os.getpid(), signum)
        ran.append(run(*args))
        return ran[-1]

    monkeypatch.setattr(checking, "_run", interrupted)
    ended = command("verify", "--model", bare_model, *QUICK)
    assert (ended.code, ended.out) == (code, "")
    assert len(ran) <= 1 and ended.err.endswith("interrupted\n")


def test_a_signal_ends_the_reference_at_its_next_layer(command, bare_model, monkeypatch):
    layers = []

    def signalled(checkpoint, ids, on_layer):
        os.kill(os.getpid(), signal.SIGINT)
        for layer in range(3):
            layers.append(layer)
            on_layer(layer + 1, 3)

    monkeypatch.setattr(checking, "expected", signalled)
    ended = command("verify", "--model", bare_model, *QUICK)
    assert (ended.code, ended.out, layers) == (130, "", [0])


def test_the_schema_refuses_what_it_does_not_know():
    jsonschema.Draft202012Validator.check_schema(RULES)

    def objects(node):
        if isinstance(node, dict):
            if node.get("type") == "object":
                yield node
            for value in node.values():
                yield from objects(value)
        elif isinstance(node, list):
            for value in node:
                yield from objects(value)

    found = list(objects(RULES))
    assert len(found) == 3
    assert all(node["additionalProperties"] is False for node in found)
    assert all(set(node["required"]) == set(node["properties"]) for node in found)


def test_the_script_runs_outside_its_checkout(bare_model, tmp_path):
    argv = [sys.executable, ROOT / "scripts" / "verify.py", "--model", bare_model, *QUICK, "--policy", "none", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert checked_json(done.stdout)["passed"]


@pytest.mark.slow
@pytest.mark.skipif(not SHIPPED.exists(), reason="the model is not in this checkout")
def test_the_command_in_the_docstring_of_the_script_works():
    (line,) = (
        line for line in (ROOT / "scripts" / "verify.py").read_text().splitlines() if line.startswith("    python ")
    )
    argv = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "10 of 10 ways of running agree" in done.stdout, done.stderr
