"""Stage `host_threads`."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.isolated import Report
from dynajax.benching import kernel
from hostcompute import default_threads

DTYPES = ("float16", "int4")
KEPT = ("threads", "gb_s", "share_of_read_bandwidth", "relative_error")


def run(report: Report) -> None:
    """How do the host's kernels and its gather scale over threads, and how near do they come to memory's bandwidth?

    `gb_s` is what the FFN kernel reads, `gather_gb_s` what the gather into staging does, `read_gb_s` plain reading. If
    the kernel stops to gain before reading does, its threads wait for each other; if the gather is below the link's
    rate (stage `link`), it and not the link bounds what can move, and units should be sent from where they lie. The
    fewest threads that come within 5 % of the best are `enough_threads`: others are better left to the scheduler.
    """
    report.add(**facts())
    most = default_threads()
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count < most] + [most]
    neurons, width, repeat = (2440, 512, 4) if is_cpu() else (11008, 4096, 12)
    shape = kernel.LayerShape(neurons=neurons, parts=3, width=width)
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for threads in counts:
            found = kernel.kernel_figures(shape, dtype, threads, repeat)
            rates = {f"{name}_gb_s": found[name]["median_gb_s"] for name in ("read", "gather")}
            rows.append({"dtype": dtype, **{name: found[name] for name in KEPT}, **rates})
            report.add(rows=rows)
    report.add(enough_threads={dtype: enough(rows, dtype) for dtype in DTYPES})


def enough(rows: list[dict[str, Any]], dtype: str) -> int:
    """The fewest threads within 5 % of the best rate."""
    mine = [row for row in rows if row["dtype"] == dtype]
    best = max(row["gb_s"] for row in mine)
    return min(row["threads"] for row in mine if row["gb_s"] >= 0.95 * best)
