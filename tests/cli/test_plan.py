import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from dynajax.sim.hardware import load_hardware

ROOT = Path(__file__).parents[2]
UNITS = 3 * 64  # of the fixture `model`


@pytest.mark.parametrize(("room", "share"), [(0.5, 0.5), (1.02, 1.0)])
def test_the_plan_is_the_committed_schema_and_adds_up(command, model, room, share):
    whole = command("plan", "--model", model, "--ctx", 256, "--json", "--vram-budget", "64MiB").json("plan")
    kib = int(whole["smallest_budget_bytes"] + room * whole["device"]["pool"]) // 1024
    plan = command("plan", "--model", model, "--ctx", 256, "--vram-budget", f"{kib}KiB", "--json").json("plan")
    device, units = plan["device"], plan["units"]
    assert plan["model"] == str(model)
    assert plan["budget_bytes"] == kib * 1024
    assert plan["plan_bytes"] == sum(device.values()) - device["margin"]
    assert plan["plan_bytes"] + device["margin"] <= plan["budget_bytes"]
    assert units["total"] == UNITS
    assert units["share"] == units["resident"] / units["total"]
    assert 0.8 * share <= units["share"] <= share
    without_units = plan["plan_bytes"] + device["margin"] - device["pool"]
    if share < 1:
        assert plan["smallest_budget_bytes"] == without_units
    else:  # with so little the programs are others, that call the host
        assert 0 <= plan["smallest_budget_bytes"] - without_units < 1024
    assert (plan["host"]["units"] == 0) == (share == 1)


def test_the_smallest_budget_works_and_a_byte_less_does_not(command, model):
    argv = ("--model", model, "--ctx", 256, "--json", "--vram-budget")
    least = command("plan", *argv, "64MiB").json("plan")["smallest_budget_bytes"]
    assert command("plan", *argv, f"{least}B").json("plan")["units"]["resident"] == 0
    ended = command("plan", *argv, f"{least - 1}B")
    assert (ended.code, ended.out, ended.err.count("\n")) == (4, "", 1)
    assert f"--vram-budget {least}B" in ended.err


def test_the_table_names_every_item(command, model):
    ended = command("plan", "--model", model, "--ctx", 256)
    assert (ended.code, ended.err) == (0, "")
    for name in ("dense", "kv", "pool", "scratch", "margin", "budget", "smallest budget", "host units"):
        assert name in ended.out
    assert f"{UNITS} of {UNITS}" in ended.out
    least = command("plan", "--model", model, "--ctx", 256, "--json").json("plan")["smallest_budget_bytes"]
    assert f"({least}B)" in ended.out  # a rounded figure would be refused when typed


def test_a_share_of_the_gpu_needs_a_gpu(command, model):
    ended = command("plan", "--model", model, "--vram-budget", "0.85")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)


def test_a_described_machine_has_its_own_budget_and_policy(command, model, tmp_path):
    shutil.copy(model / "config.json", tmp_path)  # no weights anywhere
    argv = ("--model", tmp_path, "--ctx", 256, "--dtype", "float16", "--json")
    assert command("plan", *argv).json("plan")["expected"] is None
    whole = command("plan", *argv, "--hardware", "pc-low").json("plan")
    assert whole["budget_bytes"] == 10 * 2**30  # 11 GiB, of which 1 is reserved
    assert whole["device"]["margin"] == int(0.03 * 10 * 2**30) + 64 * 2**20
    assert (whole["units"]["share"], whole["device"]["staging"]) == (1.0, 0)
    low, high = whole["expected"]["decode_range"]
    assert low == whole["expected"]["decode_tok_s"] < high
    least = whole["smallest_budget_bytes"]
    part = command("plan", *argv, "--hardware", "pc-low", "--vram-budget", f"{least + 16_000}B").json("plan")
    assert part["budget_bytes"] == least + 16_000
    assert 0 < part["units"]["share"] < 1
    assert part["device"]["staging"] > 0  # neurons move there, as they would not here
    assert part["expected"]["decode_range"][0] <= part["expected"]["decode_tok_s"]
    assert part["expected"]["bound_by"] == "latency"  # of so small a model
    assert command("plan", *argv, "--hardware", "pc-low", "--vram-budget", f"{least}B").code == 0
    assert command("plan", *argv, "--hardware", "pc-low", "--vram-budget", f"{least - 100}B").code == 4


def test_a_described_cpu_backend_is_planned_as_one(command, model, tmp_path):
    figures = load_hardware("pc-low").to_json() | {"shared": True, "reserved_bytes": 0, "device_bytes": 2**30}
    figures |= {"cpu_bps": {"float32": 5e10}, "systems": {}}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(figures))
    argv = ("--model", model, "--ctx", 256, "--json")
    plan = command("plan", *argv, "--hardware", path).json("plan")
    assert (plan["budget_bytes"], plan["device"]["margin"]) == (2**30, 0)
    part = command("plan", *argv, "--vram-budget", "950KiB")
    same = command("plan", *argv, "--vram-budget", "950KiB", "--hardware", path).json("plan")
    assert same.pop("expected")["simulated"] is True
    assert part.json("plan") == same | {"expected": None}


def test_the_table_calls_what_was_simulated_so(command, model):
    argv = ("plan", "--model", model, "--ctx", 256, "--dtype", "float16")
    here, there = command(*argv), command(*argv, "--hardware", "pc-high")
    assert (there.code, there.err) == (0, "")
    assert "simulated" not in here.out
    lines = [line for line in there.out.splitlines() if line.startswith("simulated ")]
    assert [line.split()[1] for line in lines] == ["decoding", "range", "prefill", "bound"]
    assert all("tok/s" in line for line in lines[:3])


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"version": 1}', '{"version": 1, "name": "toy", "device_bytes": "2"}']
)
def test_a_refused_machine_is_one_line(command, model, tmp_path, text):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    ended = command("plan", "--model", model, "--hardware", path)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert str(path) in ended.err


def test_what_a_machine_cannot_do_is_refused(command, model):
    argv = ("plan", "--model", model, "--ctx", 256, "--hardware", "pc-high", "--vram-budget")
    ended = command(*argv, "30GiB")
    assert (ended.code, ended.out, ended.err.count("\n")) == (4, "", 1)
    assert "XLA" not in ended.err
    least = command(*argv, "1GiB", "--json").json("plan")["smallest_budget_bytes"]
    ended = command(*argv, f"{least + 16_000}B")  # the model is float32
    assert (ended.code, ended.out) == (2, "")
    assert "pc-high has host rates for float16" in ended.err
    assert command(*argv, "0.01", "--json").json("plan")["budget_bytes"] == int(0.01 * 23 * 2**30)


@pytest.mark.parametrize("schema", ["plan", "generate", "bench"])
def test_schemas_refuse_what_they_do_not_know(schema):
    rules = json.loads((ROOT / "docs" / "schemas" / f"{schema}.json").read_text())

    def objects(node):
        if isinstance(node, dict):
            if node.get("type") == "object":
                yield node
            for value in node.values():
                yield from objects(value)

    assert all(node["additionalProperties"] is False for node in objects(rules))
    assert all(set(node["required"]) == set(node["properties"]) for node in objects(rules))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(rules).validate({})


SHIPPED = ROOT / "dynajax" / "assets" / "tiny-relullama" / "config.json"


@pytest.mark.skipif(not SHIPPED.exists(), reason="the model is not in this checkout")
@pytest.mark.parametrize("script", ["generate", "plan"])
def test_the_command_in_the_docstring_of_a_script_works(script):
    lines = (ROOT / "scripts" / f"{script}.py").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("    python scripts/"))
    words = shlex.split(line)
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert done.stdout


def test_the_script_runs_outside_its_checkout(model, tmp_path):
    command = [sys.executable, ROOT / "scripts" / "plan.py", "--model", model, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model"] == str(model)
