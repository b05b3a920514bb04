"""DALI's tables: what was published, what is simulated, and how far apart they are. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynajax.sim.experts import published
from dynajax.sim.experts.compare import MixtureJob, bound, outcomes, speed
from dynajax.sim.experts.systems import RIVALS
from dynajax.sim.hardware import load_hardware
from dynajax.sim.paper import Cell

LEADERS = ("dali", "ours", "ours-engine")
BEHIND = ("llama.cpp", "llama.cpp-offload", "ktransformers", "fiddler", "lru", "freetoken", "hybrimoe",
          "hybrimoe-shipped")  # fmt: skip
FIGURES = {  # at batch 32: table, and the figure it shows
    "moe_weighted_hits": "weighted_hits",
    "moe_loads": "loads_per_layer_step",
    "moe_busy_host": "busy_host",
    "moe_busy_link": "busy_link",
    "moe_over_best": "over_best",
}
# What the notes leave open: name, what was chosen, what else it might have been.
OPEN: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("share", 0.25, (0.125, 0.5)),
    ("dtype", "bfloat16", ("int4",)),
    ("recipe", "repeating", ("measured-lru", "popular")),
    ("host_gb_s", 50.0, (100.0,)),
)
TESTED = ("llama.cpp", "ktransformers", "hybrimoe", "dali", "ours")


def job_of(model: str, batch: int) -> MixtureJob:
    """As the paper has it."""
    hardware = load_hardware(published.MACHINE)
    return MixtureJob(model=model, batch=batch, hardware=hardware, prompt=published.PROMPT, tokens=published.SIMULATED)


def mixture_cells_of(model: str) -> list[Cell]:
    """Everything about one model; `mean_cells` needs those of all."""
    found: list[Cell] = []
    for batch in sorted({1, *published.PREFILL_BATCHES, *published.DECODE_BATCHES}):
        job = job_of(model, batch)
        figures = outcomes(job, (*RIVALS, "ours-engine"))
        found += list(_speeds(job, figures))
        found += list(_over(job, figures))
        if batch == published.ROW_TOK_S_BATCH:
            found += list(_details(job, figures))
    found += list(_sensitivity(model))
    return found


def row_of(job: MixtureJob) -> str:
    return f"{job.hardware.name}/{job.model}/batch {job.batch}"


def _speeds(job: MixtureJob, figures: Mapping[str, Mapping[str, float | None]]) -> Iterator[Cell]:
    row, best = row_of(job), bound(job)
    told = published.ROW_TOK_S[job.model] if job.batch == published.ROW_TOK_S_BATCH else {}
    for name, found in figures.items():
        yield Cell(table="moe_decode_tok_s_row", row=row, system=name, published=told.get(name),
                   simulated=speed(found) / job.batch)  # fmt: skip
    yield Cell(table="moe_decode_tok_s_row", row=row, system="bound", published=None,
               simulated=best.decode_tok_s / job.batch)  # fmt: skip
    for name, found in figures.items():
        yield Cell(table="moe_prefill_tok_s", row=row, system=name, published=None, simulated=prefill_speed(found))
    if best.prefill_tok_s is not None:
        yield Cell(table="moe_prefill_tok_s", row=row, system="bound", published=None, simulated=best.prefill_tok_s)


def prefill_speed(figures: Mapping[str, Any]) -> float:
    """Prompt tokens a second, all rows together."""
    return float(figures["prefill_tok_s"])


def _over(job: MixtureJob, figures: Mapping[str, Mapping[str, float | None]]) -> Iterator[Cell]:
    """The leaders' speeds over the others', for the batches that were published."""
    for phase, batches, of in (("decode", published.DECODE_BATCHES, speed),
                               ("prefill", published.PREFILL_BATCHES, prefill_speed)):  # fmt: skip
        if job.batch in batches:
            for leader in LEADERS:
                for other in BEHIND:
                    row = f"{phase} over {other}/{job.model}/batch {job.batch}"
                    ratio = of(figures[leader]) / of(figures[other])
                    yield Cell(table="moe_over", row=row, system=leader, published=None, simulated=ratio)


def _details(job: MixtureJob, figures: Mapping[str, Mapping[str, float | None]]) -> Iterator[Cell]:
    for table, name in FIGURES.items():
        for system, found in figures.items():
            if (value := found[name]) is not None:
                yield Cell(table=table, row=row_of(job), system=system, published=None, simulated=value)


def _sensitivity(model: str) -> Iterator[Cell]:
    """Speeds at batch 32 with other choices where the notes are silent."""
    usual = job_of(model, published.ROW_TOK_S_BATCH)
    for name, _, others in OPEN:
        for value in others:
            job = changed(usual, name, value)
            for system, found in outcomes(job, TESTED).items():
                tok_s = speed(found) / job.batch
                yield Cell(table="moe_sensitivity", row=f"{row_of(job)}/{name}={value}", system=system,
                           published=None, simulated=tok_s)  # fmt: skip


def changed(job: MixtureJob, name: str, value: Any) -> MixtureJob:
    """The job with another choice."""
    if name != "host_gb_s":
        return replace(job, **{name: value})
    rates = dict.fromkeys(job.hardware.cpu_bps, 1e9 * value)
    return replace(job, hardware=replace(job.hardware, cpu_bps=rates))


def mean_cells(cells: Sequence[Cell]) -> Iterator[Cell]:
    """What was published as a mean over models and batches."""
    for phase, told in (("decode", published.DECODE_OVER), ("prefill", published.PREFILL_OVER)):
        for other in BEHIND:
            for leader in LEADERS:
                values = [cell.simulated for cell in cells if cell.table == "moe_over" and cell.system == leader
                          and cell.row.startswith(f"{phase} over {other}/")]  # fmt: skip
                if values:
                    known = told.get(other) if leader == "dali" else None
                    yield Cell(table="moe_over_mean", row=f"{phase} over {other}", system=leader, published=known,
                               simulated=float(np.mean(values)))  # fmt: skip
