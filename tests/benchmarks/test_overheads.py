"""`benchmarks.overheads`: its checks can fail, its neighbours end, and a reduced run on the shipped model."""

import json
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import overheads
from benchmarks.overheads import main, neighbours, offload_checks, threads_checks
from benchmarks.results_page import Run, page
from dynajax.benching import session
from dynajax.benching.children import Contender
from dynajax.benching.worker import run_round

ECHO = """
from dynajax.benching.worker import Opened, serve
import numpy as np
import time

class Session:
    def prefill(self, prompts):
        return np.eye(4096)[[ids[-1] for ids in prompts]]
    def begin_steps(self):
        pass
    def step(self, ids):
        time.sleep(1e-4)
        return np.eye(4096)[ids]
    def facts(self):
        return {"compile_s": 0.0, "hot_share": None, "floor_bytes": None, "grown_bytes": 0}

serve(lambda settings: Opened(session=Session(), load_s=0.5, row={"on": {"platform": "cpu"}}))
"""


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def step_row(name, p10_us, grown_bytes=0):
    return {"name": name, "p10_step_s": 1e-6 * p10_us, "median_step_s": 2e-6 * p10_us, "grown_bytes": grown_bytes}


def test_what_offloading_costs_a_layer_and_when_that_is_too_much():
    resident = step_row("resident", 1000)
    assert [check.ok for check in offload_checks(resident, resident, 4)] == [True]
    row = step_row("half", 1900)
    assert [check.ok for check in offload_checks(row, resident, 4)] == [True, True]
    assert row["p10_us_per_layer_more"] == pytest.approx(225) and row["median_us_per_layer_more"] == pytest.approx(450)
    taken, slow = offload_checks(step_row("half", 2100, grown_bytes=8), resident, 4)
    assert (taken.ok, slow.ok) == (False, False) and slow.value == pytest.approx(275)


def test_what_threads_keep_and_when_they_collapse():
    def checked(beside_one, sixteen):
        told = [(1, 10.0, 0), (2, 20.0, 0), (2, beside_one, 1), (16, sixteen, 0)]
        rows = [{"name": f"{count} {busy}", "threads": count, "round_tok_s": speed} for count, speed, busy in told]
        return rows, [check.ok for check in threads_checks(rows, [busy for *_, busy in told], 2)]

    rows, fine = checked(10.0, 9.0)
    assert fine == [True, True]
    assert [row["kept"] for row in rows] == pytest.approx([1, 1, 0.75, 0.45])
    assert [row["cpus_owed"] for row in rows] == pytest.approx([1, 2, 4 / 3, 2])
    assert checked(5.0, 9.0)[1] == [False, True] and checked(10.0, 7.9)[1] == [True, False]


def test_device_memory_taken_while_decoding_is_seen(monkeypatch):
    opened = session.open_session({"model": "tiny-relullama", "ctx": 32, "batch": 1, "sparsity": "exact"}).session
    task = [[5, 6, 7]], [[8]] * 3
    assert [run_round(opened, *task)["grown_bytes"] for _ in range(2)] == [0, 0]
    stepper, planted = opened._parts.stepper, []
    step = stepper.step

    def leak(*what):
        planted.append(jnp.ones(256, jnp.float32))
        return step(*what)

    monkeypatch.setattr(stepper, "step", leak)
    assert run_round(opened, *task)["grown_bytes"] == 3 * 1024
    opened._parts.close()


def test_neighbours_are_busy_and_end():
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with neighbours(2):
        busy = set(children.read_text().split()) - before
        assert len(busy) == 2
        assert all(Path(f"/proc/{pid}/stat").read_text().split()[2] == "R" for pid in busy)
    assert not set(children.read_text().split()) & busy


def test_every_part_has_its_rows(monkeypatch, capsys):
    def echo(setup, name, task, sparsity, share=1.0, mode="auto"):
        return Contender(name=name, engine="dynajax", command=(sys.executable, "-c", ECHO), settings={}, file_bytes=0)

    monkeypatch.setattr(overheads.Setup, "contender", echo)
    words = "--sparsities exact --rounds 1 --new-tokens 4 --threads-list 2 --batches 1 4"
    code = main(words.split())
    told = last_line(capsys)
    assert [row["name"] for row in told["rows"]] == [
        "offload exact resident", "offload exact half auto", "offload exact none auto", "threads exact 1",
        "threads exact 2", "threads exact 2 beside 1 busy", "threads exact 2 beside 2 busy", "batch exact 1",
        "batch exact 4",
    ]  # fmt: skip
    assert len(told["checks"]) == 3 + 2 + 2 and code == (0 if all(check["ok"] for check in told["checks"]) else 1)
    assert told["platform"] == "cpu" and told["rows"][-1]["times_first"] > 0
    told["checks"][0] |= {"ok": False, "value": 8}
    text = page([Run("overheads-here", told)])
    assert "**offload exact resident: bytes of the device that decoding took: 8.00, limit 0**" in text
    assert "| batch exact 4 |" in text and "| threads exact 2 beside 2 busy |" in text
    assert {row["neighbours"] for row in told["rows"] if row["part"] == "threads"} == {0, 1, 2}


def test_half_of_the_units_on_the_host(monkeypatch, capsys):
    monkeypatch.setattr(overheads, "FRACTIONS", {"half": 0.5})
    words = "--parts offload --sparsities exact --rounds 1 --new-tokens 4 --prompt-tokens 4"
    assert main(words.split()) in (0, 1)  # its speed is not what is tested
    told = last_line(capsys)
    resident, half = told["rows"]
    assert (resident["host_mode"], half["host_mode"]) == ("resident", "ffi")
    assert half["memory"]["pool_bytes"] * 2 == resident["memory"]["pool_bytes"]
    assert (resident["dtype"], half["dtype"], half["host_dtype"]) == ("bfloat16",) * 3
    assert half["agreement"] == 1.0 and resident["p10_us_per_layer_more"] == 0.0
    assert [check["value"] for check in told["checks"] if "bytes" in check["name"]] == [0, 0]


def test_what_cannot_be_measured(capsys, tmp_path):
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main(["--dtype", "float17"]) == 2
    assert "--dtype must be one of" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--batches", "0"])
    assert ended.value.code == 2 and "--batches must be >= 1, got 0" in capsys.readouterr().err
