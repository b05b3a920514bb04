"""Stage `plans`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import make_checkpoint
from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.models import CTX, budgets
from dynajax import Engine

NEW_TOKENS = 160
CASES = (
    ("static", "exact"),
    ("static", "predicted"),
    ("macro", "predicted"),
    ("macro+micro", "predicted"),
    ("dynamic", "predicted"),
    ("dynamic", "exact"),
)


def run(report: Report) -> None:
    """Is dynamic placement faster than static on this machine, and do its plans arrive in time?

    A synthetic ReLU-sparse model (a few layers of the 1.1B shape; tiny on the CPU backend) with two fifths of its
    neurons on the device. If `dynamic` has a higher hot share but fewer tokens a second than `static`, look at
    late_plans (deadline too short, or transfers slower than the window) and at cold_s: the guard would switch it off.
    `exact` cases must give the same tokens whatever moves.
    """
    report.add(**facts())
    with TemporaryDirectory() as folder:
        name, layers = ("tiny", 4) if is_cpu() else ("1.1b", 6)
        spec = make_checkpoint.SHAPES[name]
        make_checkpoint.build(Path(folder), replace(spec, layers=layers), make_checkpoint.Recipe())
        dtype = "float32" if is_cpu() else "float16"
        budget = budgets(folder, dtype)["two_fifths"] + (2**20 if is_cpu() else 2**27)  # predictors and staging
        cases, tokens = [], []
        for policy, sparsity in CASES:
            case, chosen = generate(folder, dtype, budget, policy, sparsity)
            cases.append(case)
            tokens.append(chosen)
            report.add(shape=name, layers=layers, new_tokens=NEW_TOKENS, cases=cases)
    if tokens[0] != tokens[-1]:
        report.fail("exact: the tokens depend on what moves")


def generate(model: str, dtype: str, budget: int, policy: str, sparsity: str) -> tuple[dict[str, Any], list[int]]:
    """Figures of one policy, and its tokens; the second generation counts, when costs are known."""
    rng = np.random.default_rng(0)
    prompt = make_checkpoint.topic_ids(rng, 1, 64, 2048)[0].tolist()
    settings: dict[str, Any] = {"dtype": dtype, "vram_budget": budget, "ctx": CTX, "host_mode": "threads"}
    with Engine.from_pretrained(model, policy=policy, sparsity=sparsity, **settings) as engine:
        for _ in range(2):
            engine.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=0, ignore_eos=True)
        result, told = engine.last_result, engine.stats()
    units, timings = result.units, result.timings
    figures = {
        "policy": policy,
        "sparsity": sparsity,
        "staging": told["staging"],
        "decode_tok_s": round(timings.decode_tok_s or 0, 2),
        "hot_share": units.hot_share,
        "computed_hot_share": units.computed_hot_share,
        "recall": units.recall,
        "migrated": units.migrated,
        "late_plans": units.late_plans,
        "hot_s": result.ffn["hot_s"],
        "cold_s": result.ffn["cold_s"],
        "layers": [
            {
                key: layer[key]
                for key in ("slots", "hot_share", "migrated", "late_plans", "plan_us", "theta_g", "theta_c")
            }
            for layer in told["layers"]
        ],
    }
    return figures, list(result.token_ids)
