"""`profile-machine` as a command and as a script."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dynajax import profiling
from dynajax.config import Activation
from dynajax.profiling import Effort, engine
from dynajax.profiling.pace import Pace
from dynajax.sim.hardware import PROGRAMS, Hardware, load_hardware

ROOT = Path(__file__).parents[2]
ONCE = Pace(seconds=0.0, least=1, most=1)
NARROW = replace(engine.NARROW, layers=1, hidden=32, ffn=64, heads=2, kv_heads=2)
WIDE = replace(NARROW, layers=2, hidden=64, ffn=96)
WIDER = replace(WIDE, hidden=96, ffn=128, activation=Activation(kind="silu"))
TINY = Effort(
    pace=Pace(seconds=0.0, least=3, most=3),
    hidden=64,
    units=96,
    prompt_units=32,
    prompt_bytes=1 << 16,
    tokens=4,
    chunk_bytes=1 << 12,
    most_bytes=1 << 17,
    link_bytes=(1 << 16, 1 << 9),
    widths=(64, 192),
    models=engine.Models(
        narrow=NARROW,
        deep=WIDE,
        attention=(WIDE, WIDER),
        neurons=(WIDE, WIDER),
        vocabulary=WIDE,
        ranked=WIDER,
    ),
    decoding=ONCE,
)


real_sample = engine.sample


@cache
def sampled(spec):
    """Engines are the slow part: each model decodes once for all tests, whatever the policy."""
    return real_sample(spec, "dynamic", 1, ONCE)


@pytest.fixture
def tiny(monkeypatch):
    """Measures next to nothing, whichever effort was asked for."""
    monkeypatch.setattr(engine, "TOKENS", 4)
    monkeypatch.setattr(engine, "TRACED", 4)
    monkeypatch.setattr(engine, "sample", lambda spec, policy, threads, pace: sampled(spec))
    monkeypatch.setattr(profiling, "FULL", TINY)
    monkeypatch.setattr(profiling, "QUICK", TINY)


@pytest.fixture
def unmeasured(monkeypatch):
    """Fails if anything is measured."""

    def measure(*args):
        raise AssertionError("measured")

    monkeypatch.setattr(profiling, "profile_machine", measure)


def as_written(hardware: Hardware) -> dict:
    """The object that a file of it holds."""
    return json.loads(json.dumps(hardware.to_json()))


def test_the_file_is_what_is_printed_and_what_the_simulator_reads(command, tiny, tmp_path):
    out = tmp_path / "machine.json"
    ended = command("profile-machine", "--out", out, "--threads", 1, "--json")
    told = ended.json("profile-machine")
    assert json.loads(out.read_text()) == told
    assert as_written(load_hardware(str(out))) == told
    assert ended.err.endswith("measure: 22/22\n")
    assert out.read_text().startswith('{\n  "version": 1')
    assert set(told["programs"]) == set(PROGRAMS)
    for name in ("layer_s", "token_s", "plan_s", "balance_s"):
        assert 0 < told[name] < 1
    assert told["shared"] is True and told["source"].startswith("measured by profile_machine.py with jax ")
    assert list(tmp_path.iterdir()) == [out]


def test_the_table_names_every_figure(command, tiny, tmp_path):
    ended = command("profile-machine", "--out", tmp_path / "a.json", "--threads", 1)
    assert ended.code == 0, ended.err
    for word in ("device memory", "host rows, bfloat16", "GB/s", "GFLOP/s", "sync_s", "plan_unit_s", " us"):
        assert word in ended.out
    assert ended.err.endswith(f", written to {tmp_path / 'a.json'}\n")


@pytest.mark.parametrize(("place", "words"), [("nowhere/a.json", "there is no folder"), (".", "it is a folder")])
def test_a_file_that_cannot_be_written_costs_no_measuring(command, unmeasured, tmp_path, place, words):
    ended = command("profile-machine", "--out", tmp_path / place)
    assert (ended.code, ended.out, ended.err.count("\n")) == (6, "", 1)
    assert words in ended.err and str(tmp_path) in ended.err


def test_a_folder_that_cannot_be_written_costs_no_measuring(command, unmeasured, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    ended = command("profile-machine", "--out", tmp_path / "a.json")
    assert (ended.code, ended.out, ended.err.count("\n")) == (6, "", 1)
    assert "the folder cannot be written" in ended.err


@pytest.mark.parametrize("argv", [(), ("--out", "a.json", "--threads", "0"), ("--out", "a.json", "--threads", "many")])
def test_mistakes_in_flags(command, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command("profile-machine", *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert not list(tmp_path.iterdir())


def test_help_says_what_is_measured(command):
    told = " ".join(command("profile-machine", "--help").out.split())
    for words in ("host memory", "gather", "launches on the device", "transfers", "plans", "a layer and a token"):
        assert words in told


@pytest.mark.slow
def test_the_script_writes_a_file_of_sane_figures(tmp_path):
    out = tmp_path / "machine.json"
    argv = [sys.executable, ROOT / "scripts" / "profile_machine.py", "--quick", "--json", "--out", out]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == as_written(load_hardware(str(out)))
    rates = [found[name] for name in found if name.endswith(("_bps", "_flops")) and name != "cpu_bps"]
    for rate in (*rates, *found["cpu_bps"].values()):
        assert 1e6 < rate < 1e15
    assert found["gather_bps"] < 1e13 and found["host_bps"] < 1e13
    for name in (name for name in found if name.endswith("_s")):
        assert math.isfinite(found[name]) and 0 < found[name] < 1
    for kind in PROGRAMS:
        program = load_hardware(str(out)).program(kind)
        assert 0 < program.fixed_s <= program.at(2 * program.sizes[-1]) < 10
