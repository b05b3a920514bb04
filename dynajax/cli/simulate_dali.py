"""What `simulate --table paper` prints of mixtures of experts: Markdown tables, all of which say: simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dynajax.cli.simulate_tables import NONE, grid

if TYPE_CHECKING:
    from dynajax.sim.paper import Cell

SPEEDS = {
    "moe_decode_tok_s_row": ("Decoding speed of each sequence, tok/s", ".2f"),
    "moe_prefill_tok_s": ("Prompts, tokens a second of all sequences together", ".0f"),
}
DETAILS = {
    "moe_weighted_hits": ("Tokens at experts found on the device, batch 32", ".1%"),
    "moe_loads": ("Experts brought to the device, a layer and step, batch 32", ".2f"),
    "moe_busy_host": ("Time that the host's experts take, of all, batch 32", ".0%"),
    "moe_busy_link": ("Time that the link is busy, of all, batch 32", ".0%"),
    "moe_over_best": ("Makespan of assignments over the best ones, batch 32", ".3f"),
}
HEAD = """# Simulated mixtures of experts, beside what is published

Published: DALI (arXiv 2602.03495), as third-party notes give its figures; its body was not available, its code is not
public, and it does not say which type the weights have nor how many experts the device holds. Every system here is a
policy of one engine on the same kernels, rates, pool and text, with a quarter of the experts on the device, or as many
as fit, bfloat16, routing drawn by the recipe `repeating`; see simulator.md. `ours-engine` is ours in the order in which
the engine works today. MoE-Lightning (published: decode 1.48, prefill 2.45) is an offline pipeline of its own, and not
modelled. `hybrimoe` schedules as its paper says, `hybrimoe-shipped` as its code does: only steps of one token, all else
on the device. `llama.cpp-offload` copies the host's experts from 32 tokens a step on. No figure here was measured.
"""


def dali_report(cells: Sequence[Cell]) -> str:
    """Every table of experts."""
    from dynajax.sim.paper import tables

    found = tables(cells)
    parts = [HEAD, _means(found.get("moe_over_mean", []))]
    for name, (title, form) in (SPEEDS | DETAILS).items():
        if name in found:
            parts.append(f"## {title} (simulated)\n\n{_by_system(found[name], form)}")
    parts.append(_ratios(found.get("moe_over", [])))
    parts.append(_sensitivity(found.get("moe_sensitivity", []), found.get("moe_decode_tok_s_row", [])))
    parts.append(_seed(found.get("moe_seed", [])))
    return "\n".join(parts)


def _told(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _by_system(cells: Sequence[Cell], form: str) -> str:
    """A line a row, a column a system; published ones in front of the simulated."""
    systems, rows = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("system", "row"))
    told = {(cell.row, cell.system): cell for cell in cells}

    def figure(cell: Cell | None) -> str:
        if cell is None:
            return NONE
        own = format(cell.simulated, form)
        return own if cell.published is None else f"{cell.published:g} / {own}"

    return grid(("row", *systems), ([row, *(figure(told.get((row, name))) for name in systems)] for row in rows))


def _means(cells: Sequence[Cell]) -> str:
    """Published averages, and what the leaders reach here."""
    rows = list(dict.fromkeys(cell.row for cell in cells))
    found = {(cell.row, cell.system): cell for cell in cells}
    lines = []
    for row in rows:
        dali = found.get((row, "dali"))
        own = [found.get((row, name)) for name in ("dali", "ours", "ours-engine")]
        lines.append([row, _told(dali.published if dali else None, ".2f"),
                      *(_told(cell.simulated if cell else None, ".2f") for cell in own),
                      _told(dali.error if dali else None, "+.0%")])  # fmt: skip
    head = ("mean over models and batches", "DALI, published", "dali", "ours", "ours-engine", "error of dali")
    return f"## How many times as fast as another system (simulated)\n\n{grid(head, lines)}"


def _ratios(cells: Sequence[Cell]) -> str:
    """Ours and DALI's lead by model and batch."""
    told: dict[str, dict[str, float]] = {}
    batches: list[str] = []
    for cell in cells:
        what, model, batch = cell.row.split("/")
        batches += [batch] if batch not in batches else []
        if cell.system != "ours-engine":
            told.setdefault(f"{cell.system}: {what}, {model}", {})[batch] = cell.simulated
    lines = [[row, *(_told(values.get(batch), ".2f") for batch in batches)] for row, values in sorted(told.items())]
    return f"## The same by model and batch (simulated)\n\n{grid(('lead', *batches), lines)}"


def _sensitivity(cells: Sequence[Cell], speeds: Sequence[Cell]) -> str:
    """What other choices change, where the notes are silent."""
    systems = list(dict.fromkeys(cell.system for cell in cells))
    usual = {(cell.row, cell.system): cell.simulated for cell in speeds}
    told: dict[str, dict[str, str]] = {}
    for cell in cells:
        row, change = cell.row.rsplit("/", 1)
        before = usual.get((row, cell.system))
        shown = f"{cell.simulated:.2f}" + ("" if before is None else f" ({cell.simulated / before - 1:+.0%})")
        told.setdefault(f"{row}, {change}", {})[cell.system] = shown
    lines = [[row, *(values.get(name, NONE) for name in systems)] for row, values in told.items()]
    return (
        "## Decoding speed of each sequence with other choices where the notes are silent, tok/s, batch 32 (simulated)"
        f"\n\n{grid(('row', *systems), lines)}"
    )


def _seed(cells: Sequence[Cell]) -> str:
    """The four figures of the document that experts come from, by our definitions."""
    from dynajax.sim.experts.seed import DEFINITIONS, PUBLISHED, VERDICTS

    by_figure: dict[str, dict[str, dict[str, float]]] = {}
    for cell in cells:
        figure, source = cell.row.split("/", 1)
        by_figure.setdefault(figure, {}).setdefault(source, {})[cell.system] = cell.simulated
    parts = ["## The seed's four figures, by our definitions (simulated)\n"]
    for figure, sources in by_figure.items():
        parts.append(
            f"**{figure}**: {DEFINITIONS[figure]}. {VERDICTS[figure]}\n\n{_figure(PUBLISHED[figure], sources)}"
        )
    return "\n".join(parts)


def _figure(published: Mapping[str, float | None], sources: Mapping[str, Mapping[str, float]]) -> str:
    systems = list(dict.fromkeys(name for values in sources.values() for name in values))
    first = ["published", *(_told(published.get(name), ".2f") for name in systems)]
    lines = [[source, *(_told(values.get(name), ".2f") for name in systems)] for source, values in sources.items()]
    return grid(("routing", *systems), [first, *lines])
