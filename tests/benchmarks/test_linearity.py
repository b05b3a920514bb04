"""The fit of `benchmarks.linearity`, and a small run of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import linearity
from benchmarks.linearity import fit_line
from benchmarks.results_page import Run, page
from benchmarks.results_plots import draw, sweeps


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
    monkeypatch.setattr(linearity, "PROMPTS", (16, 32, 64))
    monkeypatch.setattr(linearity, "LAYERS", (1, 2))
    monkeypatch.setattr(linearity, "WIDTHS", (64, 96))
    linearity.main(["--repeat", "2"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [sweep["sweep"] for sweep in told["sweeps"]] == ["length", "prompt", "layers", "ffn"]
    assert [[row["x"] for row in sweep["rows"]] for sweep in told["sweeps"]] == [[16, 32, 64]] * 2 + [[1, 2], [64, 96]]
    assert all(0 < row["best_s"] <= row["median_s"] for sweep in told["sweeps"] for row in sweep["rows"])


def test_a_plot_needs_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(linearity, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        linearity.main(["--plot", str(tmp_path / "a.svg")])
    assert "dynajax[plot]" in capsys.readouterr().err


def found():
    """A result as the benchmark tells it, of two sweeps."""
    line = {"slope_s": 1e-6, "intercept_s": 2e-3, "worst_residual": 0.05, "r2": 0.99}
    rows = [{"x": x, "best_s": 2e-3 + 1e-6 * x, "median_s": 4e-3} for x in (64, 4096)]
    told = [{"sweep": name, "rows": rows, "line": line} for name in ("length", "ffn")]
    return Run("linearity-here", {"machine": "epyc", "threads": 2, "dtype": "float16", "base": {"layers": 4},
                                  "repeat": 5, "sweeps": told})  # fmt: skip


def test_the_page_shows_the_lines_and_their_plot():
    text = page([found()])
    assert "| length | 64 | 4096 | 1.000 | 2.000 | 5 % | 0.9900 |" in text
    assert "](results/linearity-here.svg)" in text


def test_a_plot_has_a_panel_a_sweep():
    drawn = []

    class Axes:
        def plot(self, x, y, *args, **how):
            drawn.append((how["label"], y))

        def set(self, **how):
            drawn.append(how["xlabel"])

        def legend(self, **how):
            pass

    sweeps(found(), SimpleNamespace(subplots=lambda rows, columns, squeeze: [[Axes() for _ in range(columns)]]))
    assert [one for one in drawn if isinstance(one, str)] == ["length", "ffn"]
    assert [label for label, _ in drawn[:3]] == ["median", "best", "line"]
    assert drawn[1][1] == pytest.approx(drawn[2][1])  # these lie on their line


def test_the_file_of_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    draw(found(), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml") and (tmp_path / "a.svg").stat().st_size < 2**16
