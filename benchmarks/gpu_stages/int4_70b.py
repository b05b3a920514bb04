"""Stage `int4_70b`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_stages.arms import UNPREDICTED, Setting, prepared_model, run_arms
from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.isolated import Report
from benchmarks.make_checkpoint import SHAPES

SHARE = 0.5  # of the layers and of a 24 GB budget, for the sake of time and host memory
BUDGET_BYTES = 24 * 10**9


def run(report: Report) -> None:
    """How fast is half of a 70B model in int4 under half of 24 GB, and does sparsity help where bytes are few?

    A token of the whole model takes twice as long. No predictors are drawn: `static_exact` finds on each side what is
    zero, `macro_exact` also moves neurons by frequency. If they do not beat `layer_split`, the host's int4 kernel or
    the device's unpacking is the limit (stages `host_threads`, `step`), and not memory.
    """
    report.add(**facts(), share_of_layers=SHARE)
    spec = SHAPES["70b"]
    spec = replace(spec, layers=round(SHARE * spec.layers))
    with TemporaryDirectory() as folder:
        wanted = round(SHARE * BUDGET_BYTES)
        drawn, budget = prepared_model(report, Path(folder), spec, "int4", wanted, predictors=False)
        run_arms(report, "arms", drawn, UNPREDICTED[::2] if is_cpu() else UNPREDICTED, Setting(budget_bytes=budget))
