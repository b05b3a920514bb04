"""Stage `throttled`."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_stages.arms import Setting, chosen, prepared_model, run_arms
from benchmarks.gpu_stages.arms_13b import BUDGET_BYTES
from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.other_ways import Throttled
from benchmarks.make_checkpoint import SHAPES
from dynajax.staging import Staging

LINKS_GB_S = (25, 12)  # a desktop with PCIe 4, and one with PCIe 3
THREADS = 8
SLACK = 1.02  # of the clock


def run(report: Report) -> None:
    """Does dynamic placement still pay on a desktop: the link held to 25 and 12 GB/s, the host to 8 CPUs?

    The model and the arms of `arms_13b` that a desktop decides between; every send waits until the slower link would be
    through. If `dynamic` falls below `static` at 12 GB/s, the window has to follow the measured link, and the guard
    must see it. Nothing may have been sent faster than the link.
    """
    report.add(**facts())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    names = ("streaming", "dynamic") if is_cpu() else ("layer_split", "static", "dynamic", "exact", "streaming")
    with TemporaryDirectory() as folder:
        dtype = "float32" if is_cpu() else "float16"
        drawn, budget = prepared_model(report, Path(folder), SHAPES["13b"], dtype, BUDGET_BYTES)
        for link in LINKS_GB_S[1:] if is_cpu() else LINKS_GB_S:
            links: list[Throttled] = []

            def around(way: Staging, link=link, links=links) -> Throttled:
                links.append(Throttled(way, link * 1e9))
                return links[-1]

            threads = min(THREADS, len(os.sched_getaffinity(0)))
            setting = Setting(budget_bytes=budget, threads=threads, around=around)
            run_arms(report, f"link_{link}_gb_s", drawn, chosen(*names), setting)
            seen = max(one.fastest_bytes_s for one in links) / 1e9
            report.add(**{f"fastest_at_{link}_gb_s": round(seen, 2)})
            if seen > SLACK * link:
                report.fail(f"{seen:.2f} GB/s over a link held to {link}")
            if not seen:
                report.fail(f"nothing was sent over the link held to {link} GB/s")
