"""The simulator's benchmarks: which orders count as right, and what a fit of the published tables may move."""

import json
import shutil
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import fit_hardware, simulator
from benchmarks.simulator import Point, orders
from dynajax.checkpoint import resolve_model
from dynajax.errors import ModelError
from dynajax.profiling import engine
from dynajax.sim.compare import Outcome
from dynajax.sim.hardware import NAMED, load_hardware
from dynajax.sim.published import ROWS
from dynajax.testing import make_checkpoint


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def point(median, simulated, spread=1.0, **changes) -> Point:
    values = {"model": "a", "share": 0.5, "policy": "static", "median": median, "low": median - spread,
              "high": median + spread, "simulated": simulated}  # fmt: skip
    return Point(**values | changes)


# --- the simulator against the engine ---


@pytest.mark.parametrize(
    ("points", "known", "right"),
    [
        ([point(10, 20), point(15, 30)], 1, 1),
        ([point(15, 30), point(10, 20)], 1, 1),
        ([point(10, 30), point(15, 20)], 1, 0),
        ([point(15, 20), point(10, 30)], 1, 0),
        ([point(10, 20), point(11, 30)], 0, 0),  # quartiles overlap
        ([point(10, 20), point(12, 30)], 0, 0),  # or touch
        ([point(10, 20), point(15, 30, share=0.8)], 0, 0),
        ([point(10, 20), point(15, 30, model="b")], 0, 0),
        ([point(10, 20), point(15, 30), point(20, 25)], 3, 2),
        ([], 0, 0),
    ],
)
def test_orders_that_are_known_and_right(points, known, right):
    assert orders(points) == (known, right)


def test_errors_are_against_what_was_measured():
    found = point(10, 12, spread=5)
    assert found.error == pytest.approx(12 / 15 - 1)
    assert found.median_error == pytest.approx(0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One small layer."""
    spec = replace(engine.NARROW, layers=1, hidden=32, ffn=64, heads=2, kv_heads=2)
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "narrow", spec)
    for file in resolve_model(engine.TEXT_MODEL).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def machine_file(tmp_path):
    """A described machine that knows float32."""
    path = tmp_path / "machine.json"
    hardware = replace(load_hardware("pc-low"), shared=True, cpu_bps={"float32": 1e10}, systems={})
    path.write_text(json.dumps(hardware.to_json()))
    return path


def test_points_of_a_small_model(model, machine_file, capsys):
    sizes = ("--shares", "0.5", "--policies", "lru", "--tokens", "4", "--rounds", "1")
    simulator.main(["--hardware", str(machine_file), "--models", str(model), *sizes])
    out = last_line(capsys)
    (row,) = out["rows"]
    slow, median, quick = row["tok_s"]
    assert 0 < slow <= median <= quick
    assert row["simulated"] > 0 and (row["model"], row["share"], row["policy"]) == ("narrow", 0.5, "lru")
    assert row["error"] == pytest.approx(row["simulated"] / quick - 1, abs=2e-3)
    assert (out["points"], out["known_orders"], out["right_orders"]) == (1, 0, 0)
    assert out["median_error"] == pytest.approx(abs(row["error"]))


class Quiet:
    """An engine that does nothing."""

    def __init__(self, policy):
        self.policy, self.rounds = policy, 0
        self._parts = SimpleNamespace(prepared=policy)

    def __enter__(self):
        return self

    def __exit__(self, *ended):
        pass


@pytest.fixture
def quiet(monkeypatch):
    """Engines whose tokens take 1, 2, ... 5 ms, a hundred times that with `static`, and a second in their first round;
    the simulator is right of `lru` and thinks `dynamic` the slowest."""
    simulated_s = {"static": 2e-1, "lru": 2e-3, "dynamic": 4e-1}

    def opened(model, policy, share=0.5, **settings):
        if model == "absent":
            raise ModelError("no such model")
        return Quiet(policy)

    def token_times(engine, prompt, tokens):
        engine.rounds += 1
        token_s = 1e-1 if engine.policy == "static" else 1e-3
        return [1.0 if engine.rounds == 1 else token_s * n for n in range(1, 6)]

    monkeypatch.setattr(simulator, "opened", opened)
    monkeypatch.setattr(simulator, "recorded", lambda *args: None)
    monkeypatch.setattr(simulator, "token_times", token_times)
    monkeypatch.setattr(simulator, "simulated_s", lambda prepared, *args: simulated_s[prepared])
    monkeypatch.setattr(simulator, "profiled", lambda: load_hardware("pc-low"))


def test_points_are_of_all_rounds_but_the_first(quiet, capsys):
    simulator.main(["--models", "absent", "a", "--synthetic", "b", "--shares", "0.5", "0.8", "--rounds", "3"])
    lines = capsys.readouterr().out.splitlines()
    out = json.loads(lines[-1])
    assert lines[0] == "absent: left out: no such model"
    found = [(row["model"], row["share"], row["policy"]) for row in out["rows"]]
    assert found == list(product("ab", (0.5, 0.8), ("static", "lru", "dynamic")))
    speeds = {row["policy"]: row["tok_s"] for row in out["rows"]}
    assert speeds["static"] == [2.5, 3.33, 5.0] and speeds["lru"] == speeds["dynamic"] == [250.0, 333.33, 500.0]
    assert [row["error"] for row in out["rows"][:3]] == pytest.approx([0.0, 0.0, -0.995])
    assert (out["points"], out["median_error"], out["median_error_of_medians"]) == (12, 0.0, 0.5)
    assert (out["known_orders"], out["right_orders"]) == (8, 4)  # lru and dynamic are equally fast


# --- the fit of the published tables ---


HIGH = load_hardware("pc-high")
VALUES = {"pageable_bps": 7e9, "transformers_reserved_bytes": 2.5e9, "llama.cpp_reserved_bytes": 3e9,
          "cpu_float16": 4e10, "cpu_int4": 9e11, "sync_s": 3e-4}  # fmt: skip


def test_a_machine_has_the_figures_that_are_fitted_and_no_others():
    found = fit_hardware.machine(HIGH, VALUES)
    assert found.pageable_bps == 7e9
    assert found.cpu_bps == {"float16": 4e10, "int4": HIGH.host_bps, "bfloat16": 4e10}  # memory is no slower
    assert found.systems["transformers"] == {"reserved_bytes": 2_500_000_000}
    assert found.systems["llama.cpp"] == {"reserved_bytes": 3_000_000_000}
    assert found.systems["powerinfer"] == {**HIGH.systems["powerinfer"], "sync_s": 3e-4}
    assert replace(found, pageable_bps=HIGH.pageable_bps, cpu_bps=HIGH.cpu_bps, systems=HIGH.systems) == HIGH


@pytest.mark.parametrize("name", [name for name in NAMED if name != "dali-pc"])  # which is fitted to nothing
def test_a_search_begins_at_the_file(name):
    base = load_hardware(name)
    assert fit_hardware.machine(base, fit_hardware.start_of(base)) == base
    bare = fit_hardware.start_of(replace(base, systems={}))
    assert bare["sync_s"] == base.sync_s
    assert bare["llama.cpp_reserved_bytes"] == bare["transformers_reserved_bytes"] == 3 * base.reserved_bytes


@pytest.fixture
def told(monkeypatch):
    """Systems whose speed hangs on one figure each, and is the published one where that is as here; who was asked."""
    asked = []

    def simulate(job, name):
        asked.append(name)
        own = job.hardware.systems
        factor = {
            "transformers": job.hardware.pageable_bps / 2e10,
            "llama.cpp": job.hardware.cpu_bps[job.dtype] / {"float16": 3e10, "int4": 5e10}[job.dtype],
            "powerinfer": 2e-4 / own["powerinfer"]["sync_s"],
        }[name]
        (row,) = (row for row in ROWS if row.machine == "pc-high" and row.model == job.model)
        assert (job.dtype, job.tokens) == (row.dtype, fit_hardware.TOKENS)
        return Outcome(tok_s=factor * row.tok_s[name])

    monkeypatch.setattr(fit_hardware, "simulate", simulate)
    return asked


def test_errors_are_of_what_is_fitted_alone(told):
    rows = [row for row in ROWS if row.machine == "pc-high"]
    found = fit_hardware.errors(fit_hardware.machine(HIGH, VALUES | {"cpu_int4": 6e10}), rows)
    assert set(told) == set(fit_hardware.FITTED) == {"transformers", "llama.cpp", "powerinfer"}
    assert len(found) == 9
    assert found["pc-high/relullama-13b", "transformers"] == pytest.approx(7 / 20 - 1)
    assert found["pc-high/relullama-13b", "llama.cpp"] == pytest.approx(1 / 3)
    assert found["pc-high/relullama-70b", "llama.cpp"] == pytest.approx(0.2)
    assert found["pc-high/relullama-70b", "powerinfer"] == pytest.approx(-1 / 3)


@pytest.mark.parametrize("write", [False, True])
def test_a_fit_finds_what_explains_the_tables(told, capsys, tmp_path, monkeypatch, write):
    monkeypatch.setattr(fit_hardware, "FOLDER", tmp_path)
    fit_hardware.main(["pc-high", *(["--write"] if write else [])])
    out = last_line(capsys)
    assert (out["machine"], out["figures"]) == ("pc-high", 9)
    assert out["worst"] < 0.05
    expected = {"pageable_bps": 2e10, "cpu_float16": 3e10, "cpu_int4": 5e10, "sync_s": 2e-4}
    assert {name: out["constants"][name] for name in expected} == pytest.approx(expected, rel=0.05)
    assert [path.name for path in tmp_path.iterdir()] == (["pc-high.json"] if write else [])
    if write:
        assert load_hardware(str(tmp_path / "pc-high.json")) == fit_hardware.machine(HIGH, out["constants"])


def test_corners_are_apart():
    corners = fit_hardware.simplex(np.array([0.5, -0.5]))
    assert corners.tolist() == [[0.5, -0.5], [0.65, -0.5], [0.5, -0.35]]
