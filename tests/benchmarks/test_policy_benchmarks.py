"""Smoke tests of the policy benchmarks, and what the placement table must show on the shipped model."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import placement, planner
from benchmarks.placement_replay import bound, place, replay
from benchmarks.placement_table import claims
from benchmarks.placement_trace import TOKENS, Trace, calibrate, documents, made_up, record
from dynajax.config import PolicyConfig
from dynajax.testing import TINY, TINY_SILU, make_checkpoint


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


def keep(trace, path):
    """As the benchmark keeps what it recorded."""
    scores = {"score1": trace.score, "score4": trace.score}
    np.savez(path, live=trace.live, frequency=trace.frequency, mass=trace.mass, **scores)


def test_placement_of_one_model(capsys, tmp_path):
    keep(made_up_trace(), tmp_path / "t.npz")
    placement.main(["--trace", str(tmp_path / "t.npz"), "--pools", "0.34", "--windows", "0.5", "--prompt", "8"])
    out = last_line(capsys)
    case = out["cases"][0]
    found = {row["policy"]: row for row in case["rows"]}
    share = {policy: row["hot_share"] for policy, row in found.items()}
    assert share["static"] < share["macro"] < share["macro+micro"] <= share["bound"]
    assert share["static"] < share["micro"] and share["dynamic"] == share["macro+micro"]
    assert found["dynamic"]["ffn_us"] <= found["macro+micro"]["ffn_us"]
    assert found["dynamic"]["err"] <= found["macro+micro"]["err"]
    assert case["claims"]["static < macro"] == [1, 1] and out["config"]["swap_rule"] == "paper"


def test_the_page(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path))  # no fetched model
    keep(made_up_trace(), tmp_path / "0-tiny-relullama.npz")
    target = tmp_path / "page.md"
    options = ["--pools", "0.34", "--windows", "0.25", "0.5", "--prompt", "8"]
    placement.main(["--table", str(target), "--traces", str(tmp_path), *options])
    cases, page = last_line(capsys)["cases"], target.read_text()
    assert [case["bits"] for case in cases] == [1, 4]
    rows = [row for row in cases[0]["rows"] if row["policy"] == "macro+micro"]
    cells = " | ".join(f"{row['hot_share']:.3f}" for row in rows)
    closed = " / ".join(f"{100 * row['gap_closed']:.0f}" for row in rows)
    assert f"| 34 % | macro+micro | {cells} | {closed} |" in page
    assert page.count("## tiny-relullama") == 2


def test_claims_notice_an_order_that_does_not_hold():
    shares = {"static": 0.4, "micro": 0.5, "macro": 0.4, "macro+micro": 0.6, "dynamic": 0.6}
    rows = [
        {"pool": 0.2, "policy": policy, "hot_share": share, "ffn_us": 1.0 if policy == "dynamic" else 2.0, "err": 0.1}
        | ({} if policy == "static" else {"window": 0.5})
        for policy, share in shares.items()
    ]
    found = claims(rows)
    assert found.pop("static < macro") == (0, 1)
    assert set(found.values()) == {(1, 1)}


@pytest.mark.parametrize(("spec", "density"), [(TINY, None), (TINY_SILU, 0.25)])
def test_recorded_scores_know_something(tmp_path, spec, density):
    make_checkpoint(tmp_path, spec)
    test, other = made_up("random:24", spec, 2, 8)
    traces = record(tmp_path, test, other, (1, 8), density)
    for trace in traces.values():
        live, score = trace.live[:, :, 1:], trace.score[:, :, 1:]
        assert trace.live.shape == trace.score.shape == (2, 24, spec.layers, spec.ffn)
        assert score[live].mean() > score[~live].mean() + 5 and not trace.score[:, :, 0].any()
        assert density is None or live.mean() == pytest.approx(density, abs=1 / spec.ffn)


def test_what_is_live_must_be_said_for_silu(tmp_path):
    make_checkpoint(tmp_path, TINY_SILU)
    with pytest.raises(ValueError, match="density must be given, silu has no zeros"):
        record(tmp_path, np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32), (1,), None)


@pytest.mark.parametrize("kind", ["topics", "topic", "random"])
def test_ids_for_statistics_are_other_ones(kind):
    spec = replace(TINY, vocab=1024)
    test, other = made_up(f"{kind}:20", spec, 2, 3)
    assert test.shape == (2, 20) and other.shape == (3, 20) and other.max() < spec.vocab
    assert not (test[:, None] == other[None]).all(axis=2).any()
    if kind == "topic":
        assert all(np.bincount(row % 16).max() > 10 for row in test)


def test_a_window_of_nothing_is_static():
    trace = made_up_trace()
    start = place(trace, 0.34, "equal")
    still = replay(trace, start, "macro+micro", 0.0, 8, PolicyConfig())
    static = replay(trace, start, "static", 0.5, 8, PolicyConfig())
    assert still.figures() == static.figures() and still.moved == 0
    assert bound(replace(trace, live=np.zeros_like(trace.live) | (np.arange(96) < 5)), start, 8) == 1.0


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
