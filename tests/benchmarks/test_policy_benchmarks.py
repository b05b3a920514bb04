"""Smoke tests of the policy benchmarks, and what the placement table must show on the shipped model."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import placement, planner
from benchmarks.placement_trace import TOKENS, Trace, calibrate, documents
from dynajax.config import PolicyConfig


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_planner_times(capsys):
    planner.main(["--units", "256", "--repeat", "3"])
    rows = last_line(capsys)["rows"]
    assert [row["swap_rule"] for row in rows] == ["paper", "gain"]
    assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)


def made_up_trace():
    """Topics: in each document another third of the neurons is live, and scores say so imperfectly."""
    rng = np.random.default_rng(0)
    topic = np.arange(6) % 3
    p = np.where(np.arange(96)[None, :] % 3 == topic[:, None], 0.4, 0.02)
    live = rng.random((6, 48, 3, 96)) < p[:, None, None, :]
    noise = rng.random(live.shape)
    score = (255 * np.clip(0.5 * live + 0.5 * noise, 0, 1)).astype(np.uint8)
    return Trace(live, score, live.mean(axis=(0, 1)).astype(np.float32), np.ones((3, 96), np.float32))


def test_placement_table(capsys, tmp_path):
    trace = made_up_trace()
    np.savez(tmp_path / "t.npz", live=trace.live, score=trace.score, frequency=trace.frequency, mass=trace.mass)
    placement.main(["--trace", str(tmp_path / "t.npz"), "--pools", "0.34", "--windows", "0.5", "--prompt", "8"])
    out = last_line(capsys)
    found = {row["policy"]: row["hot_share"] for row in out["rows"]}
    assert found["static"] < found["macro"] < found["macro+micro"] <= found["bound"]
    assert found["static"] < found["micro"] and found["dynamic"] == found["macro+micro"]
    assert out["config"]["swap_rule"] == "paper"


def test_a_window_of_nothing_is_static():
    trace = made_up_trace()
    start = placement.place(trace, 0.34, "equal")
    still = placement.replay(trace, start, "macro+micro", 0.0, 8, PolicyConfig())
    static = placement.replay(trace, start, "static", 0.5, 8, PolicyConfig())
    assert still.figures() == static.figures() and still.moved == 0
    assert placement.bound(replace(trace, live=np.zeros_like(trace.live) | (np.arange(96) < 5)), start, 8) == 1.0


def test_documents_do_not_overlap():
    ids = {"a": np.arange(5 * TOKENS), "b": np.arange(10_000, 10_000 + 2 * TOKENS + 7)}
    test, other = documents(ids, 2)
    assert test.shape == (2, TOKENS) and other.shape[1] == TOKENS
    assert not np.intersect1d(test, other).size


@pytest.mark.parametrize("shift", [-2.0, 0.5])
def test_calibration_gives_probabilities(shift):
    rng = np.random.default_rng(1)
    z = rng.standard_normal((8, 500, 4)).astype(np.float32)
    true = 1 / (1 + np.exp(-(3 * z + shift + np.array([-0.5, 0, 0, 0.5]))))
    slope, bias = calibrate(z, rng.random(z.shape) < true)
    found = 1 / (1 + np.exp(-(slope * z + bias)))
    assert np.abs(found - true).max() < 0.1
