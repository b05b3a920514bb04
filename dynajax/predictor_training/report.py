"""What a predictor folder's predictors can do, as its manifest tells it: rows, a table, a picture."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynajax.checkpoint.drafts import draft_file
from predictors.folder import Manifest

REPORT_NAME, PLOT_NAME = "report.json", "report.png"
RECALLS, PRECISION = ("1.0", "1.3", "1.6", "2.0"), "1.6"  # in the table: so many times the live neurons predicted
_REPORT_BYTES = 2**24

Draw = Callable[[Any, list[dict[str, Any]]], Any]  # matplotlib's Figure, rows -> a figure


def rows_of(manifest: Manifest) -> list[dict[str, Any]]:
    """One row a predictor, by lead and layer; on held-out tokens. recall and precision: by multiples of density."""
    return [
        {
            "lead": entry.lead,
            "layer": entry.layer,
            "form": entry.form.name,
            "bytes": told["bytes"],
            **{name: told[name] for name in ("density", "recall", "precision", "calibration_error", "reliability")},
            **{name: told[name] for name in ("entropy", "prior_entropy")},
        }
        for entry in sorted(manifest.entries, key=lambda entry: (entry.lead, entry.layer))
        if (told := entry.metrics) is not None
    ]


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    heads = ["lead", "layer", "form", "bytes", "density", *(f"recall x{factor}" for factor in RECALLS)]
    heads += [f"precision x{PRECISION}", "calibration error"]
    cells = [
        [str(row["lead"]), str(row["layer"]), row["form"], str(row["bytes"]), f"{row['density']:.1%}"]
        + [f"{row['recall'][factor]:.1%}" for factor in RECALLS]
        + [f"{row['precision'][PRECISION]:.1%}", f"{row['calibration_error']:.4f}"]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    return "\n".join(
        "  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in [heads, *cells]
    )


def write_report(folder: Path, record: dict[str, Any], draw: Draw | None = None) -> bool:
    """report.json and, if matplotlib is installed, report.png in the folder; -> whether there is a picture.

    draw: makes it of the record's rows; None: `picture`.
    """
    with draft_file(folder / REPORT_NAME, _REPORT_BYTES) as file:
        file.write((json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    with draft_file(folder / PLOT_NAME, _REPORT_BYTES) as file:
        (draw or picture)(figures.Figure, record["rows"]).savefig(file, format="png", dpi=110)
    return True


def picture(make: Any, rows: list[dict[str, Any]]) -> Any:
    """A figure: for each lead recall against the share of neurons predicted, and reliability; a line a layer."""
    leads, last = sorted({row["lead"] for row in rows}), max(row["layer"] for row in rows)
    figure = make(figsize=(11, 3.6 * len(leads)), layout="constrained")
    grid = figure.subplots(len(leads), 2, squeeze=False)
    for (left, right), lead in zip(grid, leads, strict=True):
        for row in (row for row in rows if row["lead"] == lead):
            tint = {"color": _tint(row["layer"] / max(last, 1)), "marker": ".", "label": f"{row['layer']}"}
            shares = [min(float(factor) * row["density"], 1) for factor in row["recall"]]
            left.plot(shares, list(row["recall"].values()), **tint)
            bins = [one for one in row["reliability"] if one["count"]]
            right.plot([one["predicted"] for one in bins], [one["live"] for one in bins], **tint)
        right.plot([0, 1], [0, 1], color="0.7", linestyle="--")
        left.set(title=f"lead {lead}", xlabel="share of neurons predicted", ylabel="recall", xlim=(0, None))
        right.set(title=f"lead {lead}", xlabel="predicted probability", ylabel="share live")
        left.legend(title="layer", fontsize="x-small", ncols=1 + len(rows) // (16 * len(leads)))
    return figure


def _tint(share: float) -> tuple[float, float, float]:
    """From blue, the first layer, to red."""
    return (0.1 + 0.8 * share, 0.35 * (1 - abs(2 * share - 1)), 0.9 - 0.8 * share)
