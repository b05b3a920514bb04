"""What `simulate` prints: Markdown tables, each of which says that it is simulated, and the paper's constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dynajax.cli.output import size

if TYPE_CHECKING:
    from dynajax.sim.hardware import Hardware
    from dynajax.sim.paper import Cell
    from dynajax.sim.published import PublishedRow
    from dynajax.sim.whatif import Answer, Setup

SPEEDS = "decode_tok_s"
# Tables in the order in which they are printed: title, and how a figure is written.
TITLES = {
    "decode_tok_s_as_sold": ("Decoding speed on a card with 11 GB, which is what is sold, tok/s", ".2f"),
    "ablation": ("What each part of DynamicInfer adds to PowerInfer", "+.1%"),
    "lengths": ("What DynamicInfer gains over a grid of lengths", "+.1%"),
    "gpu_share": ("Computed neurons on the GPU", ".1%"),
    "live_on_gpu_share": ("Live neurons found on the GPU", ".1%"),
    "cpu_share": ("The CPU's share of FFN time", ".1%"),
    "recall": ("Live neurons that are computed", ".1%"),
    "pool_share": ("Neurons that the GPU holds", ".1%"),
    "device_gb": ("GPU memory, GB", ".1f"),
    "host_gb": ("Host memory, GB", ".1f"),
    "share_of_bound": ("Share of the offline bound", ".1%"),
    "ours_over": ("Speed-up of ours over another system, times", ".2f"),
    "ours_steps": ("Where our lead over PowerInfer repaired comes from, step by step", "+.1%"),
    "decode_tok_s_fast_cpu": ("Decoding speed with a host kernel near the memory's bandwidth, tok/s", ".1f"),
    "vram_sweep": ("Decoding speed by GPU memory, tok/s", ".1f"),
    "thread_sweep": ("Decoding speed by host threads, tok/s", ".1f"),
    "sensitivity": ("Decoding speed with other choices where the paper is silent, tok/s", ".1f"),
}
HEAD = """# Simulated, beside what is published

Published: DynamicInfer (ICLR 2026). Error: simulated / published - 1. No figure of this page was measured.
"""
NONE = "-"
FITTED_TO = ("transformers", "llama.cpp", "powerinfer")  # whose published speeds the constants were fitted to
BUSY = ("device", "host", "link")


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned: the first to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    told = [[word.ljust(width) if not i else word.rjust(width) for i, (word, width) in enumerate(zip(line, widths,
             strict=True))] for line in (lines[0], rule, *lines[1:])]  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in told)


# --- the paper's tables ---


def paper_report(cells: Sequence[Cell], rows: Sequence[PublishedRow], machines: Sequence[Hardware]) -> str:
    """Every table of `cells`, then the constants that were fitted, and those that were assumed."""
    from dynajax.sim.paper import tables

    found = tables(cells)
    speeds = found.pop(SPEEDS, [])
    parts = [HEAD]
    parts.append(f"## Decoding speed, tok/s: published / simulated / error\n\n{_speeds(speeds)}")
    for name in (*(name for name in TITLES if name in found), *(name for name in found if name not in TITLES)):
        title, form = TITLES.get(name, (name, ".3g"))
        lines = [(c.row, c.system, _told(c.published, form), _told(c.simulated, form), _told(c.error, "+.1%"))
                 for c in found[name]]  # fmt: skip
        parts.append(f"## {title} (simulated)\n\n{grid(('row', 'system', 'published', 'simulated', 'error'), lines)}")
    parts.append(_activity(dict.fromkeys(row.model for row in rows)))
    parts.append(_fitted(speeds, rows, machines))
    parts.append(_assumed(speeds, found.get("sensitivity", [])))
    return "\n".join(parts)


def _told(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _speeds(cells: Sequence[Cell]) -> str:
    """A line a row, a column a system."""
    systems, rows = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("system", "row"))
    told = {(cell.row, cell.system): _speed(cell) for cell in cells}
    return grid(("row", *systems), ([row, *(told.get((row, system), NONE) for system in systems)] for row in rows))


def _speed(cell: Cell) -> str:
    form = ".2f" if cell.simulated < 10 else ".1f"
    if cell.published is None:
        return format(cell.simulated, form)
    return f"{cell.published:g} / {cell.simulated:{form}} / {_told(cell.error, '+.1%')}"


def fitted_constants(hardware: Hardware, dtypes: Iterable[str]) -> list[tuple[str, str]]:
    """Name and value of what was fitted of a machine; dtypes: of the weights that were run on it."""
    reserved = {name: hardware.for_system(name).reserved_bytes for name in ("transformers", "llama.cpp")}
    return [
        ("pageable_bps", f"{hardware.pageable_bps / 1e9:.1f} GB/s"),
        *((f"reserved_bytes of {name}", f"{count / 1e9:.2f} GB") for name, count in reserved.items()),
        *((f"cpu_bps of {dtype}", f"{hardware.host_rate(dtype) / 1e9:.1f} GB/s") for dtype in dtypes),
        ("sync_s of powerinfer", f"{1e6 * hardware.for_system('powerinfer').sync_s:.0f} us"),
    ]


def _fitted(speeds: Sequence[Cell], rows: Sequence[PublishedRow], machines: Sequence[Hardware]) -> str:
    lines = []
    for hardware in machines:
        dtypes = dict.fromkeys(row.dtype for row in rows if row.hardware == hardware.name)
        lines += [(hardware.name, *constant) for constant in fitted_constants(hardware, dtypes)]
    figures = sum(cell.published is not None and cell.system in FITTED_TO for cell in speeds)
    told = grid(("machine", "constant", "value"), lines)
    return (
        "## Constants of the simulated machines that were fitted\n\n"
        f"{len(lines)} constants fitted to {figures} figures: the published speeds of {', '.join(FITTED_TO)}. "
        f"DynamicInfer's are not among them.\n\n{told}"
    )


def _activity(models: Iterable[str]) -> str:
    """What is published of a text's activity, and what the synthetic texts have of it."""
    from dynajax.sim.synthetic import RECIPES, checked

    lines = [
        (model, figure.name, f"{figure.low:.3f} to {figure.high:.3f}", f"{figure.found:.3f}",
         "assumed" if figure.assumed else "published", "yes" if figure.ok else "NO")
        for model in models for figure in checked(RECIPES[model])
    ]  # fmt: skip
    head = ("model", "figure", "wanted", "found", "which is", "holds")
    return f"## Activity of the synthetic texts (simulated)\n\n{grid(head, lines)}"


def _assumed(speeds: Sequence[Cell], sensitivity: Sequence[Cell]) -> str:
    """What the paper leaves open, and how much DynamicInfer's simulated speed depends on it."""
    usual = {cell.row: cell.simulated for cell in speeds if cell.system == "dynamicinfer"}
    other = {cell.row: cell.simulated for cell in sensitivity if cell.system == "dynamicinfer"}
    rows = [row for row in usual if any(changed.startswith(f"{row}/") for changed in other)]
    lines = []
    for of, name, chosen, values in _choices(rows):
        found = {row: [other[at] / usual[row] - 1 for value in values if (at := f"{row}/{name}={value}") in other]
                 for row in of}  # fmt: skip
        told = (f"{min(found[row]):+.1%} to {max(found[row]):+.1%}" if found.get(row) else NONE for row in rows)
        lines.append([name, chosen, ", ".join(values), *told])
    head = ("constant", "chosen", "instead", *(f"simulated tok/s, {row}" for row in rows))
    return f"## Constants of the simulated systems that were assumed: what other choices change\n\n{grid(head, lines)}"


def _choices(rows: Sequence[str]) -> Iterator[tuple[Sequence[str], str, str, tuple[str, ...]]]:
    """The rows that it holds for, its name, what was chosen, what else was tried: of the systems, then the models."""
    from dynajax.sim.paper import ASSUMED, OPEN
    from dynajax.sim.synthetic import RECIPES

    for name, chosen, others in OPEN:
        solved = "solved from the published recall"  # theta
        yield rows, name, solved if chosen is None else str(chosen), tuple(map(str, others))
    for row in rows:
        model = row.partition("/")[2]
        values: dict[str, list[str]] = {}
        for name, value in ASSUMED.get(model, ()):
            values.setdefault(name, []).append(f"{value:g}")
        for name, tried in values.items():
            yield [row], name, f"{getattr(RECIPES[model], name):g} ({model})", tuple(tried)


# --- policies on a trace ---


def trace_report(setup: Setup, answers: Sequence[Answer]) -> str:
    """A row for every policy and setting."""
    swept = list(answers[0].settings)
    head = ("policy", *swept, "simulated tok/s", "of bound", "held", "hot", "computed hot", "cold time", "recall",
            "moved/token", "late", *(f"{lane} busy" for lane in BUSY))  # fmt: skip
    weights = setup.weights
    return (
        f"Simulated: {setup.name} on {setup.hardware.name}, {weights.dtype} on the device, {weights.host_dtype} on the "
        f"host, {size(setup.budget_bytes)} of device memory, a cache for {setup.context} tokens\n\n"
        f"{grid(head, (_answer(answer) for answer in answers))}\n"
        f"Simulated bound, with all known beforehand and free moves: {answers[0].bound_tok_s:.2f} tok/s\n"
    )


def _answer(answer: Answer) -> list[str]:
    figures = answer.figures
    shares = ("share_of_bound", "pool_share", "hot_share", "computed_hot_share", "cold_share", "recall")
    return [
        answer.policy,
        *(setting_text(value) for value in answer.settings.values()),
        f"{figures['decode_tok_s']:.2f}",
        *(f"{figures[name]:.1%}" for name in shares),
        f"{figures['migrated_per_token']:.1f}",
        f"{figures['late_plans']}",
        *(f"{figures[f'busy_{lane}']:.0%}" for lane in BUSY),
    ]


def setting_text(value: Any) -> str:
    """A constant, as it is typed."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
