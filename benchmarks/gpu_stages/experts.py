"""Stage `experts`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import make_moe
from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.models import CTX
from dynajax import Engine
from dynajax.budget import unit_bytes
from dynajax.checkpoint import read_spec
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.observing import Observe

SHARE = 0.4  # of the experts, on the device
NEW_TOKENS = 48
POLICIES = ("none", "static", "auto", "scan", "lru", "dali", "hybrimoe", "bandwidth-split")
LARGE = {"layers": 4, "experts": 64, "top_k": 8, "width": 768}
SMALL = {"layers": 2, "experts": 8, "top_k": 2, "width": 48, "hidden_size": 128, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
LAYER_FIGURES = ("slots", "weighted_hit_share", "loads_per_step", "host_share", "makespan_over_best", "late")


def run(report: Report) -> None:
    """Does a mixture of experts give the same tokens whatever part of it the device holds and whatever moves, and which
    policy is fastest here?

    Random experts of real size (tiny ones on the CPU backend), two fifths of them on the device, and all; batches of 1
    and 8. In float32 the tokens must be those of the resident model: otherwise the grouped kernel, a transfer in pieces
    or an update in place is wrong on this device. If `static` is faster than `auto`, the probed costs are wrong or the
    link is slower than `profile_machine` says: compare makespan_over_best with the measured tokens a second.
    """
    report.add(**facts())
    policies, batches = (POLICIES[1:5], (2,)) if is_cpu() else (POLICIES, (1, 8))
    with TemporaryDirectory() as folder:
        make_moe.write(Path(folder), **(SMALL if is_cpu() else LARGE))
        cases: list[dict[str, Any]] = []
        for dtype in ("float32",) if is_cpu() else ("float32", "bfloat16"):
            for batch in batches:
                whole = generate(folder, dtype, batch, "auto", 1.0)
                for policy in policies:
                    case = generate(folder, dtype, batch, policy, SHARE)
                    agree = case.pop("tokens") == whole["tokens"]
                    cases.append({**case, "agrees": agree})
                    report.add(share=SHARE, new_tokens=NEW_TOKENS, cases=cases)
                    if dtype == "float32" and not agree:
                        report.fail(f"float32, batch {batch}, {policy}: the tokens depend on where experts are")


def generate(
    model: str, dtype: str, batch: int, policy: str, share: float, *, tell: Observe | None = None, **more: str
) -> dict[str, Any]:
    """Figures of one policy and its tokens; the second generation counts, when costs are known. tell: observes the
    first one. more: settings."""
    settings: dict[str, Any] = {"dtype": dtype, "ctx": CTX, "batch": batch, "policy": policy, "host_dtype": dtype}
    settings |= more
    if share < 1:
        settings["vram_budget"] = budget_of(model, settings, share)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, 24).tolist() for _ in range(batch)]
    with Engine.from_pretrained(model, **settings) as engine:
        for observer in (tell, None):
            engine.observe(observer)
            results = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        told = engine.stats()
    assert isinstance(results, list)
    return {
        "dtype": dtype,
        "batch": batch,
        "policy": told["policy"],
        "wanted": policy,
        "staging": told["staging"],
        "decode_tok_s": results[0].timings.decode_tok_s,
        "hot_share": results[0].units.hot_share,
        "computed_hot_share": results[0].units.computed_hot_share,
        "migrated": results[0].units.migrated,
        "layers": [{key: layer[key] for key in LAYER_FIGURES} for layer in told["layers"]],
        "tokens": [list(result.token_ids) for result in results],
    }


def budget_of(model: str, settings: dict[str, Any], share: float) -> int:
    """Bytes that hold this share of the experts beside what the policy needs."""
    plan = plan_for(model, EngineConfig(**settings, vram_budget="auto"))
    unit = unit_bytes(read_spec(Path(model)), settings["dtype"])
    return plan.smallest_budget_bytes + round(share * plan.units_total) * unit
