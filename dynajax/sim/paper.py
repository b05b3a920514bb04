"""The paper's tables: what was published, what is simulated, and how far apart they are. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dynajax.sim.compare import SYSTEMS, Job, Outcome, SystemName, simulate
from dynajax.sim.hardware import Hardware, load_hardware
from dynajax.sim.published import ABLATION, CPU_SHARE, DEVICE_GB, GPU_SHARE, HOST_GB, LENGTHS, ROWS, PublishedRow
from dynajax.sim.synthetic import RECIPES

TOKENS = 48  # simulated of each sequence
GB = 1e9
FAST_SHARE = 0.8  # of the host's memory bandwidth, for a better kernel than the fitted one
USED_THREADS = 8  # what PowerInfer's authors ran with: the fitted host rates are taken to be those of 8 threads
VRAM_GB = (12, 16, 20, 24)
THREADS = (4, 8, 16, 32)
GRID = ((16, 32), (64, 32), (64, 96))  # tokens of prompt and answer
MOVING: tuple[SystemName, ...] = ("powerinfer", "powerinfer-repaired", "dynamicinfer", "ours")
# Steps from PowerInfer repaired to ours, each added to those before it.
STEPS = ("one hand-over", "gate first", "low-bit gates", "our policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of a table."""

    table: str
    row: str
    system: str
    published: float | None
    simulated: float

    @property
    def error(self) -> float | None:
        """simulated / published - 1."""
        return None if self.published is None else self.simulated / self.published - 1

    def to_json(self) -> dict[str, Any]:
        """An entry of `simulate.py --table paper --json`."""
        return {**asdict(self), "error": self.error}


def cells_of(model: str) -> list[Cell]:
    """Everything about one model; `shared_cells` needs those of all."""
    found: list[Cell] = []
    for row in (row for row in ROWS if row.model == model):
        job = job_of(row, load_hardware(row.hardware))
        outcomes = {name: simulate(job, name) for name in SYSTEMS}
        found += list(_speeds(row, outcomes))
        found += list(_fast_cpu(row, job))
        found += list(_shares(row, outcomes))
        found += list(_memory(row, outcomes))
        found += list(_lengths(row, job))
        if row.hardware != row.machine:
            found += list(_as_sold(row))
        if row.name in ABLATION:
            found += list(_ablation(row, job, outcomes["powerinfer"].tok_s))
            found += list(_steps(row, job, outcomes["powerinfer-repaired"].tok_s))
            found += list(_sweeps(row, job))
            found += list(_sensitivity(row, job))
    return found


def job_of(row: PublishedRow, hardware: Hardware) -> Job:
    return Job(model=row.model, dtype=row.dtype, hardware=hardware, tokens=TOKENS)


def shared_cells(cells: Sequence[Cell]) -> Iterator[Cell]:
    """What the paper gives as a mean over the ReluLLaMA models on PC-High."""
    for table, published in (("gpu_share", GPU_SHARE), ("cpu_share", CPU_SHARE)):
        for system in MOVING:
            values = [cell.simulated for cell in cells if (cell.table, cell.system) == (table, system)
                      and cell.row in ABLATION]  # fmt: skip
            if values:
                yield Cell(table=table, row="pc-high/relullama", system=system, published=published.get(system),
                           simulated=float(np.mean(values)))  # fmt: skip


def _speeds(row: PublishedRow, outcomes: Mapping[SystemName, Outcome]) -> Iterator[Cell]:
    for name, outcome in outcomes.items():
        published = row.tok_s.get(name)
        yield Cell(table="decode_tok_s", row=row.name, system=name, published=published, simulated=outcome.tok_s)
    bound, ours = outcomes["bound"].tok_s, outcomes["ours"].tok_s
    for other in MOVING[:-1]:
        lead = ours / outcomes[other].tok_s
        yield Cell(table="ours_over", row=row.name, system=other, published=None, simulated=lead)
    for name in MOVING:
        share = outcomes[name].tok_s / bound
        yield Cell(table="share_of_bound", row=row.name, system=name, published=None, simulated=share)


def _fast_cpu(row: PublishedRow, job: Job) -> Iterator[Cell]:
    """The same with a host kernel that reads at FAST_SHARE of the memory's bandwidth, if that is faster."""
    limit = FAST_SHARE * job.hardware.host_bps
    rates = {dtype: max(rate, limit) for dtype, rate in job.hardware.cpu_bps.items()}
    fast = replace(job, hardware=replace(job.hardware, cpu_bps=rates))
    for name in (*MOVING[1:], "bound"):
        speed = simulate(fast, name).tok_s
        yield Cell(table="decode_tok_s_fast_cpu", row=row.name, system=name, published=None, simulated=speed)


def _as_sold(row: PublishedRow) -> Iterator[Cell]:
    """On the card that is sold, which has less memory than the paper states."""
    job = job_of(row, load_hardware(row.machine))
    for name in SYSTEMS:
        speed = simulate(job, name).tok_s
        yield Cell(table="decode_tok_s_as_sold", row=row.name, system=name, published=row.tok_s.get(name),
                   simulated=speed)  # fmt: skip


def _shares(row: PublishedRow, outcomes: Mapping[SystemName, Outcome]) -> Iterator[Cell]:
    for name in MOVING:
        tally, pool = outcomes[name].tally, outcomes[name].pool_share
        if tally is None or pool is None:
            continue
        figures = tally.figures()
        for table, value in (("pool_share", pool), ("gpu_share", figures["computed_hot_share"]),
                             ("live_on_gpu_share", figures["hot_share"]), ("cpu_share", figures["cold_share"]),
                             ("recall", figures["recall"])):  # fmt: skip
            yield Cell(table=table, row=row.name, system=name, published=None, simulated=value)


def _memory(row: PublishedRow, outcomes: Mapping[SystemName, Outcome]) -> Iterator[Cell]:
    for table, published, name_of in (("device_gb", DEVICE_GB, "device_bytes"), ("host_gb", HOST_GB, "host_bytes")):
        for name in MOVING:
            size = getattr(outcomes[name], name_of)
            if size is not None:
                known = published.get(row.name, {}).get(name)
                yield Cell(table=table, row=row.name, system=name, published=known, simulated=size / GB)


def _lengths(row: PublishedRow, job: Job) -> Iterator[Cell]:
    """DynamicInfer's lead over a grid of lengths, lowest and highest."""
    for rival, (low, high) in LENGTHS.get(row.name, {}).items():
        leads = []
        for prompt, answer in GRID:
            case = replace(job, prompt=prompt, tokens=answer)
            leads.append(simulate(case, "dynamicinfer").tok_s / simulate(case, _named(rival)).tok_s - 1)
        for kind, published, value in (("lowest", low, min(leads)), ("highest", high, max(leads))):
            name = f"{row.name}/over {rival}, {kind}"
            yield Cell(table="lengths", row=name, system="dynamicinfer", published=published, simulated=value)


def _named(rival: str) -> SystemName:
    return next(name for name in SYSTEMS if name == rival)


def _ablation(row: PublishedRow, job: Job, base: float) -> Iterator[Cell]:
    """What each part of DynamicInfer adds to PowerInfer."""
    for part, policy, published in zip(("micro", "macro", "thresholds"), ("micro", "macro+micro", "dynamic"),
                                       ABLATION[row.name], strict=True):  # fmt: skip
        value = simulate(job, "dynamicinfer", policy=policy).tok_s / base - 1
        yield Cell(table="ablation", row=f"{row.name}/+{part}", system="dynamicinfer", published=published,
                   simulated=value)  # fmt: skip


def _steps(row: PublishedRow, job: Job, base: float) -> Iterator[Cell]:
    """Where our lead over PowerInfer repaired comes from: speed-up of each step over it."""
    for count in range(1, len(STEPS) + 1):
        value = simulate(job, "ours", steps=count).tok_s / base - 1
        yield Cell(table="ours_steps", row=f"{row.name}/+{STEPS[count - 1]}", system="ours", published=None,
                   simulated=value)  # fmt: skip


def _sweeps(row: PublishedRow, job: Job) -> Iterator[Cell]:
    """Device memory, and host threads."""
    reserved = job.hardware.reserved_bytes
    for gigabytes in VRAM_GB:
        hardware = replace(job.hardware, device_bytes=gigabytes * 2**30)
        for name in MOVING:
            if hardware.device_bytes - reserved > job.weights.dense:
                speed = simulate(replace(job, hardware=hardware), name).tok_s
                yield Cell(table="vram_sweep", row=f"{row.name}/{gigabytes}GiB", system=name, published=None,
                           simulated=speed)  # fmt: skip
    for threads in THREADS:
        limit = FAST_SHARE * job.hardware.host_bps
        rates = {key: min(rate * threads / USED_THREADS, limit) for key, rate in job.hardware.cpu_bps.items()}
        for name in MOVING:
            speed = simulate(replace(job, hardware=replace(job.hardware, cpu_bps=rates)), name).tok_s
            yield Cell(table="thread_sweep", row=f"{row.name}/{threads}", system=name, published=None, simulated=speed)


# What the paper leaves open: name, what we chose, what else it might have been.
OPEN: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("lam", 1.0, (0.1, 3.0, 10.0)),
    ("lead", 1, (2, 3)),
    ("keep_share", 0.1, (0.0, 0.5)),
    ("decay", 0.98, (0.9, 0.99)),
    ("err_scale", 1.0, (0.5, 1.5)),
    ("theta", None, (0.1, 0.4)),  # solved from the published recall and predicted share
    ("placement", "static", ("shipped",)),
    ("copies", "units", ("blocks",)),
)
ASSUMED: Mapping[str, tuple[tuple[str, float], ...]] = {
    "relullama-13b": (("predicted", 1.0 + 1e-3), ("predicted", 2.0), ("recall", 0.95)),
    "relullama-70b": (("density", 0.20), ("density", 0.30), ("predicted", 2.0), ("recall", 0.95)),
}


def _sensitivity(row: PublishedRow, job: Job) -> Iterator[Cell]:
    """DynamicInfer's speed with other choices where the paper is silent."""
    for name, _, others in OPEN:
        for value in others:
            speed = simulate(job, "dynamicinfer", **{name: value}).tok_s
            yield Cell(table="sensitivity", row=f"{row.name}/{name}={value}", system="dynamicinfer", published=None,
                       simulated=speed)  # fmt: skip
    for name, value in ASSUMED[row.model]:
        changed = replace(job, assumed=replace(RECIPES[row.model], **{name: value}))
        for system in ("powerinfer", "dynamicinfer"):
            speed = simulate(changed, _named(system)).tok_s
            yield Cell(table="sensitivity", row=f"{row.name}/{name}={value:g}", system=system, published=None,
                       simulated=speed)  # fmt: skip


def tables(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """By table, in the order in which they come."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.table, []).append(cell)
    return found
