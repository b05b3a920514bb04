"""Stage `arms_13b`."""

from __future__ import annotations

from benchmarks.gpu_stages.arms import ARMS, run_shape
from benchmarks.gpu_stages.isolated import Report

BUDGET_BYTES = 24 * 10**9


def run(report: Report) -> None:
    """Which way of running a 13B float16 model under 24 GB is the fastest here, and do plans arrive in time?

    A drawn ReLU-sparse model with 12.5 % of its neurons live and predictors that know them. If `layer_split` or
    `streaming` beats `static`, sparsity gains nothing on this machine: look at cold_s against hot_s. If `dynamic` has a
    higher hot share than `static` but fewer tokens a second, look at late_plans and at the link. If `pinned_slice` is
    as fast as `static`, absent neurons can be computed without the host. The tokens of arms that compute the same must
    be equal in float32; `agrees` counts how many are.
    """
    run_shape(report, "13b", BUDGET_BYTES, ARMS)
