"""The plots of docs/results.md: small SVG files that are the same for the same runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.results_page import Run

OURS, THEIRS, PALE = "#1f5fa8", "#c8762f", "#c9dcf0"
STYLE = {"svg.hashsalt": "dynajax", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip


def speeds(run: Run, drawn: Any) -> None:
    """Decoding and prompts, best and median, a bar an engine."""
    left, right = drawn.subplots(1, 2, sharey=True)
    names = [row["name"] for row in run.rows]
    colours = [OURS if row["engine"] == "dynajax" else THEIRS for row in run.rows]
    for axes, best, median, title in (
        (left, "best_tok_s", "decode_tok_s", "decoding, tok/s"),
        (right, "best_prefill_tok_s", "prefill_tok_s", "prompt, tok/s"),
    ):
        axes.barh(names, [row[best] for row in run.rows], color=colours, height=0.6)
        axes.plot([row[median] for row in run.rows], names, "|", color="black", markersize=11)
        axes.set_title(title + "; the stroke is the median")
    left.invert_yaxis()


def rates(run: Run, drawn: Any) -> None:
    """Plain reading behind the rows that the kernel reads."""
    axes = drawn.subplots()
    names = [f"{row['dtype']}, {row['threads']} threads" for row in run.rows]
    axes.barh(names, [row["read"]["median_gb_s"] for row in run.rows], color=PALE, height=0.8, label="plain reading")
    axes.barh(names, [row["ffn"]["median_gb_s"] for row in run.rows], color=OURS, height=0.5, label="the kernel's rows")
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, median")
    drawn.legend(frameon=False, loc="outside upper center", ncols=2)


def errors(run: Run, drawn: Any) -> None:
    """Simulated against measured, a point a speed, its spread as a line."""
    axes = drawn.subplots()
    for model in dict.fromkeys(row["model"] for row in run.rows):
        rows = [row for row in run.rows if row["model"] == model]
        middle = [sorted(row["tok_s"])[len(row["tok_s"]) // 2] for row in rows]
        reach = [[value - min(row["tok_s"]) for value, row in zip(middle, rows, strict=True)],
                 [max(row["tok_s"]) - value for value, row in zip(middle, rows, strict=True)]]  # fmt: skip
        axes.errorbar(middle, [row["simulated"] for row in rows], xerr=reach, fmt="o", markersize=4, label=model)
    ends = [pick(value for row in run.rows for value in row["tok_s"]) for pick in (min, max)]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured tok/s", ylabel="simulated tok/s")
    axes.legend(frameon=False)


def sweeps(run: Run, drawn: Any) -> None:
    """A panel a sweep: best times, medians and the line through the best."""
    for axes, found in zip(
        drawn.subplots(1, len(run.told["sweeps"]), squeeze=False)[0], run.told["sweeps"], strict=True
    ):
        x, line = [row["x"] for row in found["rows"]], found["line"]
        axes.plot(x, [1e3 * row["median_s"] for row in found["rows"]], "o", color=PALE, label="median")
        axes.plot(x, [1e3 * row["best_s"] for row in found["rows"]], "o", color=OURS, label="best")
        fitted = [1e3 * (line["slope_s"] * value + line["intercept_s"]) for value in x]
        axes.plot(x, fitted, color=THEIRS, label="line")
        axes.set(xlabel=found["sweep"], ylabel="ms", ylim=(0, None))
        axes.legend(frameon=False)


DRAWN: dict[str, Callable[[Run, Any], None]] = {
    "side_by_side": speeds, "bench": speeds, "kernel": rates, "simulator": errors,
    "linearity": sweeps,
}  # fmt: skip


def draw(run: Run, out: Path) -> None:
    """The plot of one run, as a file of the kind that its name ends with. ModuleNotFoundError: no matplotlib."""
    plots, figures = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    with plots.rc_context(STYLE):
        drawn = figures.Figure(figsize=(9, 1.2 + 0.3 * max(6, min(12, len(run.rows)))), layout="constrained")
        DRAWN[run.kind](run, drawn)
        drawn.savefig(out, metadata={"Date": None})


def draw_all(runs: Sequence[Run], folder: Path) -> None:
    """FOLDER/NAME.svg of every run; plots of runs that are gone are removed. ModuleNotFoundError: no matplotlib."""
    importlib.import_module("matplotlib")  # before anything is removed
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.svg"):
        path.unlink()
    for run in runs:
        draw(run, folder / f"{run.name}.svg")
