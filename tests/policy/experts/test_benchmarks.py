"""The benchmarks of the expert policies run, and end with one line of JSON."""

import json

import numpy as np

from benchmarks import assignment, expert_cache
from dynajax.policy.experts.assign import ASSIGN


def test_assignment(capsys):
    assignment.main(["--cases", "12", "--large", "2", "--repeat", "1"])
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert [row["assign"] for row in figures["rows"]] == list(ASSIGN)
    assert figures["rows"][0]["small"]["mean"] > 0.999 and set(figures["rows"][0]["us"]) == set(figures["step_us"])


def test_expert_cache_on_synthetic_routing(capsys):
    small = ["--steps", "15", "--layers", "1", "--experts", "16", "--top-k", "2", "--share", "0.25"]
    expert_cache.main(["--recipe", "popular", "--rows", "1", "16", "--transit", "2", *small])
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert figures["synthetic"] and len(figures["results"]) == 2 and "decayed alone" in out
    policies = figures["results"][1]["policies"]
    assert policies["bound, weighted"]["weighted_hits"] >= policies["lru on demand"]["weighted_hits"]
    assert figures["targets"]["least_gain_rows_16_share_25"] is not None


def test_expert_cache_on_a_recorded_trace(capsys, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 3, (20, 2, 6))
    np.savez(tmp_path / "routing.npz", tokens=tokens)
    expert_cache.main(["--trace", str(tmp_path / "routing.npz"), "--share", "0.5", "--policy", "auto", "lru"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not figures["synthetic"] and figures["targets"] == {}
    assert set(figures["results"][0]["policies"]) >= {"auto", "lru", "MIN, bypass", "ceiling"}
