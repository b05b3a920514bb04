"""Write docs/results.md and its plots from the files in benchmarks/results/ and from nothing else.

    python -m benchmarks.results_page
    python -m benchmarks.results_page --no-plots     # without matplotlib (pip install dynajax[plot])

A file's kind is its name up to the first "-"; what is of a kind without a table is listed. A run belongs to CUDA if it
says that its platform is one, else to the CPU. The page begins with where this engine loses: of every other engine's
row the figures in which no row of ours with as many bits, and with the plain model's answers, is as good.

Exit codes: 0; 2 matplotlib is missing, or a file in benchmarks/results/ is no result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynajax.benching.children import ROOT

RESULTS, PAGE, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md", ROOT / "docs" / "results"
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "F16": 16, "int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}
GIB = 2**30

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A committed file."""

    name: str  # without .json
    told: Row

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]

    @property
    def on_cuda(self) -> bool:
        return self.told.get("platform") in ("cuda", "gpu")

    @property
    def rows(self) -> list[Row]:
        return self.told.get("rows", [])


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that engines are held against each other by."""

    words: str
    of: Callable[[Row], float]
    show: Callable[[float], str]
    more_is_better: bool = True


MEASURES = (
    Measure("prompts", lambda row: row["best_prefill_tok_s"], lambda value: f"{value:.1f} tok/s"),
    Measure("decoding", lambda row: row["best_tok_s"], lambda value: f"{value:.1f} tok/s"),
    Measure("peak memory", lambda row: row["peak_rss_bytes"] / GIB, lambda value: f"{value:.2f} GiB", False),
    Measure(
        "until it can begin (loading and compiling)",
        lambda row: row["load_s"] + row["compile_s"],
        lambda value: f"{value:.1f} s",
        False,
    ),
)


class NoResult(Exception):
    """A file that is none, with the remedy."""


def read_runs(folder: Path = RESULTS) -> list[Run]:
    """Every file, in the order of their names. NoResult: one cannot be read."""
    runs = []
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise NoResult(f"{path.name} is no JSON ({error}): keep the last line that a benchmark prints") from error
        if not isinstance(told, dict) or "machine" not in told:
            raise NoResult(f"{path.name} does not name its machine: keep the whole last line that a benchmark prints")
        runs.append(Run(path.stem, told))
    return runs


# --- where we lose ---


def losses(run: Run) -> Iterator[str]:
    """A line for every figure of another engine that none of ours with as many bits reaches."""
    ours = [row for row in run.rows if row["engine"] == "dynajax" and row["sparsity"] != "predicted"]
    for measure in MEASURES:
        for rival in (row for row in run.rows if row["engine"] != "dynajax"):
            equal = [row for row in ours if BITS.get(row["dtype"]) == BITS.get(rival["dtype"], 0)]
            if not equal:
                continue
            choose = max if measure.more_is_better else min
            best = choose(equal, key=measure.of)
            mine, theirs = measure.of(best), measure.of(rival)
            if (mine < theirs) if measure.more_is_better else (mine > theirs):
                yield (
                    f"- {measure.words}, {rival['model']}: {measure.show(mine)} ({best['name']}) against "
                    f"{measure.show(theirs)} ({rival['name']}), {mine / theirs:.2f} times that"
                )


# --- tables ---


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every column but the first to the right."""
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def percent(value: float | None) -> str:
    """0.713 -> "71 %"; "-" for what was not measured."""
    return "-" if value is None else f"{value:.0%}".replace("%", " %")


def engines(run: Run) -> str:
    """Rows of `side_by_side` and of `bench`."""
    heads = ("engine", "decode tok/s, best", "median", "of the floor", "prompt tok/s, best", "CPU", "peak GiB",
             "load s", "compile s", "found on the device", "same tokens")  # fmt: skip
    rows = []
    for row in run.rows:
        speeds = (f"{row['best_tok_s']:.1f}", f"{row['decode_tok_s']:.1f}", percent(row["share_of_floor"]))
        rest = (f"{row['best_prefill_tok_s']:.1f}", percent(row["cpu_share"]), f"{row['peak_rss_bytes'] / GIB:.2f}")
        ready = (f"{row['load_s']:.1f}", f"{row['compile_s']:.1f}", percent(row["hot_share"]))
        rows.append((row["name"], *speeds, *rest, *ready, percent(row["agreement"])))
    first = run.rows[0]
    lengths = f"{first['prompt_tokens']} tokens of prompt, {first['new_tokens']} that follow, batch {first['batch']}"
    budget = "" if first.get("budget") in (None, "auto") else f", a device budget of {first['budget']}"
    said = f"`{first['model']}`, {lengths}, {first['threads']} threads{budget}"
    if run.told.get("read_gb_s"):
        said += f"; memory is read at {run.told['read_gb_s']:.1f} GB/s at best"
    if (kernel := run.told.get("kernel")) is not None:
        share = percent(kernel["share_of_read_bandwidth"])
        said += f"; the host's row kernel reads {kernel['dtype']} rows at {kernel['gb_s']:.1f} GB/s, {share} of reading"
    if (link := run.told.get("link")) is not None:
        said += f"; the link ({link['staging']}) carries {link['gb_s']:.1f} GB/s"
    said += ". same tokens: positions at which the most likely token is that of the first row"
    return f"{said}.\n\n{markdown(heads, rows)}"


def kernels(run: Run) -> str:
    """Rows of `kernel`."""
    heads = ("rows of", "threads", "read GB/s", "rows GB/s", "of reading", "gather GB/s", "median us", "best us")
    rows = [
        (row["dtype"], str(row["threads"]), f"{row['read']['median_gb_s']:.1f}", f"{row['ffn']['median_gb_s']:.1f}",
         percent(row["share_of_read_bandwidth"]), f"{row['gather']['median_gb_s']:.1f}",
         f"{row['ffn']['median_us']:.0f}", f"{row['ffn']['min_us']:.0f}")
        for row in run.rows
    ]  # fmt: skip
    shape = f"A layer of {run.told['neurons']} neurons of {run.told['width']} values, a tenth of them a call, all live"
    return f"{shape}; medians.\n\n{markdown(heads, rows)}"


def counts(run: Run) -> str:
    """Rows of `instructions`."""
    heads = ("kernel", "rows of", "instructions", "a weight")
    rows = [(row["kernel"], row["dtype"], f"{row['instructions']:,}", f"{row['instructions_per_weight']:.3f}")
            for row in run.rows]  # fmt: skip
    return f"Counted by callgrind, kernels for {run.rows[0]['isa']}.\n\n{markdown(heads, rows)}"


def predictors(run: Run) -> str:
    """Rows of `predictors`, the mean over layers."""
    told: dict[tuple[str, int], list[Row]] = {}
    for row in run.rows:
        told.setdefault((row["form"], row["lead"]), []).append(row)
    budgets = list(run.rows[0]["recall"])
    heads = ("form", "layers ahead", "KB a layer", *(f"recall at {budget} x live" for budget in budgets))
    rows = []
    for (form, lead), layers in told.items():
        means = [sum(row["recall"][budget] for row in layers) / len(layers) for budget in budgets]
        size = sum(row["bytes"] for row in layers) / len(layers) / 1e3
        rows.append((form, str(lead), f"{size:.0f}", *(percent(mean) for mean in means)))
    return (
        f"`{run.told['model']}`, {run.told['fit_tokens']} tokens to fit; means over layers.\n\n{markdown(heads, rows)}"
    )


def stages(run: Run) -> str:
    """Stages of `gpu_check`."""
    rows = [(stage["stage"], "ok" if stage["ok"] else "WRONG", f"{stage['seconds']:.0f}")
            for stage in run.told["stages"]]  # fmt: skip
    return markdown(("stage", "found", "seconds"), rows)


def simulated(run: Run) -> str:
    """Rows of `simulator`: what it says beside what was measured."""
    told = run.told
    heads = ("model", "share on the device", "policy", "tok/s, quicker quartile", "median", "simulated", "error")
    rows = [
        (row["model"], percent(row["share"]), row["policy"], f"{max(row['tok_s']):.1f}",
         f"{sorted(row['tok_s'])[len(row['tok_s']) // 2]:.1f}", f"{row['simulated']:.1f}",
         f"{row['error']:+.0%}".replace("%", " %"))
        for row in run.rows
    ]  # fmt: skip
    orders = f"{told['right_orders']} of {told['known_orders']} orders of policies are right"
    error = f"of the quicker quartile the median error is {percent(told['median_error'])}"
    return f"{told['points']} decoding speeds; {error}, {orders}.\n\n{markdown(heads, rows)}"


def lines(run: Run) -> str:
    """Sweeps of `linearity`."""
    heads = ("time against", "from", "to", "us each", "ms at 0", "worst residual", "r2")
    rows = [
        (found["sweep"], str(found["rows"][0]["x"]), str(found["rows"][-1]["x"]),
         f"{1e6 * found['line']['slope_s']:.3f}", f"{1e3 * found['line']['intercept_s']:.3f}",
         percent(found["line"]["worst_residual"]), f"{found['line']['r2']:.4f}")
        for found in run.told["sweeps"]
    ]  # fmt: skip
    base = ", ".join(f"{name} {value}" for name, value in run.told["base"].items())
    said = (
        f"Random ReLU models ({base}, {run.told['dtype']}), {run.told['threads']} threads; a line through the best of"
    )
    return f"{said}\n{run.told['repeat']} times.\n\n{markdown(heads, rows)}"


def overheads(run: Run) -> str:
    """Rows of `overheads`."""
    heads = ("what", "decode tok/s, median", "p10 ms a step", "tok per CPU second", "us a layer more, p10", "median",
             "bytes taken", "kept per CPU", "times the first")  # fmt: skip
    rows = []
    for row in run.rows:
        extra = [("p10_us_per_layer_more", ".0f"), ("median_us_per_layer_more", ".0f"), ("grown_bytes", "d")]
        behind = [format(row[key], form) if row["part"] == "offload" else "" for key, form in extra]
        kept, times = percent(row["kept"]) if "kept" in row else "", row.get("times_first")
        speeds = (f"{row['decode_tok_s']:.1f}", f"{1e3 * row['p10_step_s']:.2f}", f"{row['tok_per_cpu_s']:.1f}")
        rows.append((row["name"], *speeds, *behind, kept, "" if times is None else f"{times:.2f}"))
    lost = [check for check in run.told["checks"] if not check["ok"]]
    verdict = "; ".join(f"**{one['name']}: {one['value']:.2f}, limit {one['limit']:g}**" for one in lost)
    first = run.rows[0]
    said = f"`{first['model']}`, {first['dtype']}, {first['prompt_tokens']} tokens of prompt"
    return f"{said}, {first['new_tokens']} that follow. {verdict or 'Every limit was kept'}.\n\n{markdown(heads, rows)}"


@dataclass(frozen=True, slots=True)
class Section:
    """What is shown of a kind."""

    title: str
    show: Callable[[Run], str]
    drawn: bool = False  # there is a plot


SECTIONS = {
    "side_by_side": Section("Beside other engines", engines, drawn=True),
    "bench": Section("Policies against each other", engines, drawn=True),
    "kernel": Section("The host's row kernel", kernels, drawn=True),
    "instructions": Section("Instructions of the host's kernels", counts),
    "overheads": Section("What offloading, threads and batches cost", overheads),
    "linearity": Section("Time against length, layers and width", lines, drawn=True),
    "predictors": Section("Predictors", predictors),
    "gpu_check": Section("What the engine relies on", stages),
    "simulator": Section("The simulator beside the engine", simulated, drawn=True),
}


def conditions(run: Run) -> str:
    """Where, when and how, in one paragraph."""
    told = run.told
    place = [told["machine"], f"{told['cores']} cores" if "cores" in told else "", told.get("device") or ""]
    words = [", ".join(word for word in place if word and word != "cpu"), f"commit {told.get('commit', 'unknown')}"]
    words.append(str(told.get("date", "no date")))
    if "load_average" in told:
        words.append(f"load average {told['load_average']:.1f}")
    if note := told.get("note"):
        words.append(str(note))
    command = f"\n`{told['command']}`" if "command" in told else ""
    return f"{'; '.join(words)}. [{run.name}.json](../benchmarks/results/{run.name}.json){command}"


def section(run: Run) -> str:
    """A run with its table, and its plot if its kind has one."""
    found = SECTIONS[run.kind]
    plot = f"![{found.title}](results/{run.name}.svg)" if found.drawn else ""
    return "\n\n".join(piece for piece in (f"### {found.title}", conditions(run), found.show(run), plot) if piece)


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    known = [run for run in runs if run.kind in SECTIONS]
    order = {kind: index for index, kind in enumerate(SECTIONS)}
    known.sort(key=lambda run: order[run.kind])  # equal kinds stay in the order of their names
    lost = [line for run in known if run.kind == "side_by_side" for line in losses(run)]
    cpu = [section(run) for run in known if run.kind != "simulator" and not run.on_cuda]
    cuda = [section(run) for run in known if run.kind != "simulator" and run.on_cuda]
    model = [section(run) for run in known if run.kind == "simulator"]
    others = [f"- {run.name}: {conditions(run)}" for run in runs if run.kind not in SECTIONS]
    pieces = [
        "# Results",
        "Written by `python -m benchmarks.results_page` from the files in `benchmarks/results/`: change those. best\n"
        "is the best single step or prompt of a run, of the floor is how much of the best step it would take to read\n"
        "its bytes once.",
        "## Where this engine loses",
        "\n".join(lost) or "In nothing, of what was measured beside another engine with as many bits.",
        "## Measured on CPUs",
        *(cpu or ["Nothing yet."]),
        "## Measured on CUDA",
        *(cuda or ["Nothing yet: no figure in this repository was taken on a GPU."]),
        "## Simulated",
        "No figure of [simulated_tables.md](simulated_tables.md) was measured; [simulator.md](simulator.md) says what\n"
        "they are good for.",
        *model,
    ]
    if others:
        pieces += ["## Other runs", "\n".join(others)]
    return "\n\n".join(pieces) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-plots", action="store_true", help="only the page; the plots stay as they are")
    args = parser.parse_args(argv)
    try:
        runs = read_runs()
        text = page(runs)
        if not args.no_plots:
            from benchmarks.results_plots import draw_all

            draw_all([run for run in runs if run.kind in SECTIONS and SECTIONS[run.kind].drawn], PLOTS)
    except NoResult as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install dynajax[plot], or say --no-plots", file=sys.stderr)
        return 2
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
