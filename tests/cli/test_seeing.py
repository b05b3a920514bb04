"""--timeline, --record and the heat map, as commands."""

import json
import sys

import numpy as np
import pytest

from dynajax.cli.residency import states_of
from dynajax.trace import DECODE, Head, Recorder, read_trace


@pytest.fixture(scope="module")
def budget(bare_model):
    """A budget that holds about half of the neurons."""
    from dynajax.config import EngineConfig
    from dynajax.engine import plan_for

    plan = plan_for(str(bare_model), EngineConfig(ctx=256))
    return f"{plan.smallest_budget_bytes + plan.pool // 2}B"


def test_generate_writes_a_timeline_and_a_record(command, bare_model, budget, tmp_path):
    argv = ("--model", bare_model, "--prompt-ids", "topics:9", "--max-new-tokens", 4, "--vram-budget", budget)
    seen = ("--timeline", tmp_path / "t.json", "--record", tmp_path / "r.npz")
    ended = command("generate", *argv, *seen, "--json")
    result = ended.json("generate")
    assert f"written to {tmp_path / 't.json'}\nwritten to {tmp_path / 'r.npz'}\n" in ended.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    trace = read_trace(tmp_path / "r.npz")
    assert (len(trace.phase), int((trace.phase == DECODE).sum())) == (12, 4)
    live = np.stack([trace.live_of(layer) for layer in range(3)])[:, trace.phase == DECODE]
    assert result["units"]["live_per_token"] == live.sum() / 4


@pytest.mark.parametrize(
    ("flag", "place", "words"),
    [
        ("--timeline", "nowhere/t.json", "there is no folder"),
        ("--record", "nowhere/r.npz", "there is no folder"),
        ("--record", ".", "it is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_costs_no_loading(command, tmp_path, flag, place, words):
    ended = command("generate", "--model", tmp_path / "no model", "--prompt", "a", flag, tmp_path / place)
    assert (ended.code, ended.out, ended.err.count("\n")) == (6, "", 1)
    assert words in ended.err and str(tmp_path) in ended.err


@pytest.fixture
def recorded(tmp_path):
    """Two layers of three neurons; layer 1: of a prompt token and two decoded ones."""
    recorder = Recorder()
    recorder.open(Head(fingerprint="ab" * 32, layers=2, width=3, settings={}), scores=False)
    live = np.array([[1, 1, 1], [0, 0, 1], [0, 1, 1]], np.bool_)
    for i in range(3):
        recorder.begin(np.array([i]), np.array([0]), int(i > 0))
        for layer in range(2):
            recorder.add(layer, live[i : i + 1], np.array([0, 1] if i < 2 else [2], np.int32))
    recorder.write(tmp_path / "r.npz")
    return tmp_path / "r.npz"


def test_the_states_of_neurons_most_often_live_first(recorded):
    states = states_of(read_trace(recorded), 1)
    assert states.tolist() == [[2, 3, 3], [2, 1, 1], [3, 2, 0]]


def test_a_heat_map_is_drawn(command, recorded, tmp_path):
    pytest.importorskip("matplotlib")
    ended = command("plot-residency", "--record", recorded, "--layer", 1, "--out", tmp_path / "a.png", "--json")
    told = ended.json("plot-residency")
    assert (told["tokens"], told["decoded"], told["hot_share"]) == (3, 2, 1 / 3)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    ended = command("plot-residency", "--record", recorded, "--layer", 2, "--out", tmp_path / "b.png")
    assert ended.code == 2 and "--layer must be below the 2 layers" in ended.err


def test_what_a_heat_map_needs_is_named(command, recorded, tmp_path, monkeypatch):
    ended = command("plot-residency", "--record", recorded, "--out", tmp_path / "nowhere" / "a.png")
    assert (ended.code, ended.err.count("\n")) == (6, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = command("plot-residency", "--record", recorded, "--out", tmp_path / "a.png")
    assert (ended.code, ended.err) == (2, "error: matplotlib is not installed: pip install dynajax[plot]\n")
