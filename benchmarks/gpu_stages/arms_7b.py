"""Stage `arms_7b`."""

from __future__ import annotations

from benchmarks.gpu_stages.arms import FASTER, chosen, run_shape
from benchmarks.gpu_stages.device import is_cpu
from benchmarks.gpu_stages.isolated import Report

BUDGET_BYTES = 11 * 10**9


def run(report: Report) -> None:
    """Does the order of `arms_13b` hold for a 7B float16 model under 11 GB, where more of the neurons are resident?

    If another arm wins here, which one is best depends on how much is absent, and the guard has to decide at start-up.
    On the CPU backend, where both stages have the tiny model, two arms.
    """
    run_shape(report, "7b", BUDGET_BYTES, chosen("layer_split", "static") if is_cpu() else chosen(*FASTER))
