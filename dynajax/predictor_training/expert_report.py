"""What the predictors of a mixture's folder can do, as its manifest tells it: rows, a table, a picture."""

from __future__ import annotations

from typing import Any

from predictors.folder import DTYPES
from predictors.routing_folder import RoutingManifest

KINDS = ("corrected", "residual", "residual-mean", "gate", "frequency", "random")
SHOWN = ("corrected", "residual")  # in the table, of workloads


def rows_of(manifest: RoutingManifest) -> list[dict[str, Any]]:
    """One row a lead and layer, measured on held-out tokens. asked and layer: of the decoder's layers."""
    return [
        {
            "lead": entry.lead,
            "asked": manifest.layers[entry.asked],
            "layer": manifest.layers[entry.asked + entry.lead],
            "kind": entry.kind,
            "rank": entry.rank,
            "bytes": _bytes(manifest, entry.rank),
            "recall": {kind: entry.metrics[kind]["recall"] for kind in KINDS},
            "top1": {kind: entry.metrics[kind]["top1"] for kind in KINDS if kind != "random"},
        }
        for entry in manifest.entries
    ]


def _bytes(manifest: RoutingManifest, rank: int) -> int:
    """On the device, where the engine keeps them in float32."""
    return DTYPES["float32"].itemsize * manifest.hidden * (2 * rank + 1)


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows for people: recall of each kind, and how often the busiest expert of a batch was told."""
    batches = list(rows[0]["top1"]["corrected"])
    heads = ["lead", "layer", "kind", *(f"recall {kind}" if i == 0 else kind for i, kind in enumerate(KINDS))]
    heads += [f"busiest of {batch}: {kind}" for batch in batches for kind in SHOWN]
    cells = [
        [str(row["lead"]), str(row["layer"]), row["kind"] + (f" {row['rank']}" if row["rank"] else "")]
        + [f"{row['recall'][kind]:.1%}" for kind in KINDS]
        + [_share(row["top1"][kind][batch]) for batch in batches for kind in SHOWN]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    return "\n".join(
        "  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)) for line in [heads, *cells]
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def picture(make: Any, rows: list[dict[str, Any]]) -> Any:
    """A figure: for each lead recall by layer, a line a kind."""
    leads = sorted({row["lead"] for row in rows})
    figure = make(figsize=(8, 3.4 * len(leads)), layout="constrained")
    grid = figure.subplots(len(leads), 1, squeeze=False)
    for (axes,), lead in zip(grid, leads, strict=True):
        mine = [row for row in rows if row["lead"] == lead]
        for kind in KINDS:
            axes.plot([row["layer"] for row in mine], [row["recall"][kind] for row in mine], marker=".", label=kind)
        axes.set(title=f"lead {lead}", xlabel="layer", ylabel="experts found", ylim=(0, 1))
        axes.legend(fontsize="x-small", ncols=2)
    return figure
