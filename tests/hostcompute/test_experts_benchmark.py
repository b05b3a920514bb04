"""benchmarks/experts.py runs, its last line is JSON, and a wrong answer ends it."""

import json

import numpy as np
import pytest

from benchmarks import experts
from hostcompute import HostPool

ARGUMENTS = ["--shapes", "48x20", "--tokens", "1", "5", "--experts", "2", "--repeat", "2", "--threads", "1"]


def test_it_prints_a_row_for_each_kind_and_ends_in_json(capsys):
    experts.main([*ARGUMENTS, "--dense", "own", "blas"])
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    kinds = {"own", "blas"} - set(record["left_out"])
    assert len(record["rows"]) == 4 * len(kinds) == sum("GFLOP/s" in line for line in lines)
    assert {row["dense"] for row in record["rows"]} == kinds
    assert all(row["relative_error"] < 1e-5 and row["median_us"] > 0 for row in record["rows"])


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(experts, "unavailable", lambda name: "it is not there" if name == "onednn" else None)
    experts.main([*ARGUMENTS, "--dense", "own", "onednn"])
    output = capsys.readouterr().out
    assert output.startswith("onednn is left out: it is not there\n")
    assert json.loads(output.splitlines()[-1])["left_out"] == {"onednn": "it is not there"}


def test_a_wrong_answer_ends_the_run():
    layer, units = experts.make_layer("float32", 2, 16, 8), np.arange(2, dtype=np.int32)
    x, weights = experts.make_rows(3, 2, 16)
    with HostPool(1) as pool:
        y = pool.ffn(x, layer, units, activation="silu", weights=weights).y
    assert experts.relative_error(y, x, layer, units, weights) < 1e-5
    with pytest.raises(RuntimeError, match="the answer is wrong"):
        experts.relative_error(y, x, layer, units, weights * np.float32(1.001))
