"""Stage `tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.isolated import Report, run_isolated
from benchmarks.gpu_stages.models import CTX, budgets, tiny_model
from dynajax import Engine

PROMPT_TOKENS, NEW_TOKENS = 16, 48
CPU_LIMIT_S = 120
CASES = (  # on the CPU backend the first two: there everything on the device is the reference itself
    *(("float32", name) for name in ("smallest", "two_fifths", "everything")),
    ("float16", "two_fifths"),
    ("bfloat16", "two_fifths"),
)


def run(report: Report) -> None:
    """Does the device choose the tokens the CPU chooses, whatever part of the model it holds?

    In float32 it must, for no neuron, two fifths and all of them on the device: otherwise a program computes
    something else there (TF32 products, a reordered update) and nothing measured afterwards counts. In 16 bit the
    agreement with the CPU's float32 is reported: if bfloat16 parts much earlier than float16, float16 is the type to
    recommend for this model.
    """
    with tiny_model() as model:
        cpu = run_isolated(f"{__name__}:reference", {"model": model}, limit_s=CPU_LIMIT_S, env={"JAX_PLATFORMS": "cpu"})
        if not cpu.ok:
            raise RuntimeError(f"the run on the CPU failed: {cpu.error}")
        expected = cpu.figures["tokens"]
        report.add(**facts(), model=model, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
        runs: list[dict[str, Any]] = []
        for dtype, name in CASES[:2] if is_cpu() else CASES:
            budget = budgets(model, dtype)[name]
            found = compare(model, dtype, budget, expected)
            runs.append({"dtype": dtype, "budget": name, "budget_bytes": budget, **found})
            report.add(runs=runs)
            if dtype == "float32" and found["agreement"] < NEW_TOKENS:
                report.fail(f"float32, budget {name}: token {found['agreement']} differs from the CPU's")


def reference(report: Report, model: str) -> None:
    """The tokens of the CPU backend, everything resident, in float32."""
    report.add(tokens=generate(model, "float32", "auto")[0])


def compare(model: str, dtype: str, budget: int, expected: list[int]) -> dict[str, Any]:
    """Generate and count the tokens that agree from the start."""
    tokens, hot_share = generate(model, dtype, budget)
    different = np.flatnonzero(np.asarray(tokens) != np.asarray(expected))
    return {"agreement": int(different[0]) if len(different) else len(expected), "hot_share": hot_share}


def generate(model: str, dtype: str, budget: int | str) -> tuple[list[int], float | None]:
    """Greedy tokens after a prompt that is always the same, and the share of live neurons found on the device."""
    prompt = np.random.default_rng(0).integers(3, 96, PROMPT_TOKENS).tolist()
    settings: dict[str, Any] = {"vram_budget": budget, "ctx": CTX, "sparsity": "exact", "policy": "static"}
    with Engine.from_pretrained(model, dtype=dtype, **settings) as engine:
        engine.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        result = engine.last_result
    return list(result.token_ids), result.units.hot_share
