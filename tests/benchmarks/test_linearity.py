"""The fit of `benchmarks.linearity`, and a small run of it."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import linearity
from benchmarks.linearity import fit_line


def test_a_line_is_found():
    line = fit_line([1, 2, 4], [3.0, 5.0, 9.0])
    assert (line.slope_s, line.intercept_s) == (pytest.approx(2), pytest.approx(1))
    assert line.worst_residual < 1e-9 and line.r2 == pytest.approx(1)


def test_a_parabola_is_none():
    line = fit_line([1, 2, 4, 8], [1.0, 4.0, 16.0, 64.0])
    assert line.worst_residual > 0.5 and line.r2 < 0.97


@pytest.mark.parametrize(("x", "times_s"), [([1], [1.0]), ([2, 2], [1.0, 1.0]), ([1, 2], [1.0])])
def test_too_little_for_a_line(x, times_s):
    with pytest.raises(ValueError, match="two different x"):
        fit_line(x, times_s)


def test_every_sweep_has_its_points_and_a_line(monkeypatch, capsys):
    small = replace(linearity.BASE, hidden=32, ffn=64, heads=2, kv_heads=2, head_dim=16, vocab=2048)
    monkeypatch.setattr(linearity, "BASE", small)
    monkeypatch.setattr(linearity, "LENGTHS", (16, 32, 64))
    monkeypatch.setattr(linearity, "LAYERS", (1, 2))
    monkeypatch.setattr(linearity, "WIDTHS", (64, 96))
    linearity.main(["--repeat", "2"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [sweep["sweep"] for sweep in told["sweeps"]] == ["length", "prompt", "layers", "ffn"]
    assert [[row["x"] for row in sweep["rows"]] for sweep in told["sweeps"]] == [[16, 32, 64]] * 2 + [[1, 2], [64, 96]]
    assert all(0 < row["best_s"] <= row["median_s"] for sweep in told["sweeps"] for row in sweep["rows"])


def test_a_plot_needs_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        linearity.main(["--plot", str(tmp_path / "a.png")])
    assert "dynajax[plot]" in capsys.readouterr().err


def test_a_plot_has_a_panel_a_sweep(tmp_path):
    drawn = []

    class Axes:
        def plot(self, *args, **how):
            drawn.append(how["label"])

        def set(self, **how):
            drawn.append(how["xlabel"])

        def legend(self):
            pass

    class Figure:
        def __init__(self, **how):
            pass

        def subplots(self, rows, columns, squeeze):
            return [[Axes() for _ in range(columns)] for _ in range(rows)]

        def savefig(self, out, dpi):
            out.write_bytes(b"png")

    line = {"slope_s": 1.0, "intercept_s": 0.0, "worst_residual": 0.0, "r2": 1.0}
    sweep = {"sweep": "ffn", "rows": [{"x": 1, "best_s": 1.0, "median_s": 2.0}], "line": line}
    linearity.plot([sweep, sweep], tmp_path / "a.png", SimpleNamespace(Figure=Figure))
    assert drawn == ["median", "best", "line", "ffn"] * 2 and (tmp_path / "a.png").exists()
