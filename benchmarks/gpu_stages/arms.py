"""What `arms_13b`, `arms_7b`, `throttled` and `int4_70b` share: one drawn model, run by one arm after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benchmarks.gpu_stages.device import facts, is_cpu, the_device
from benchmarks.gpu_stages.drawn import Drawn, draw
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.models import CTX, budgets
from benchmarks.gpu_stages.other_ways import Around, PinnedCold, StreamedCold
from benchmarks.make_checkpoint import SHAPES, Recipe, topic_ids
from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig, ModelSpec
from dynajax.engine.cold import ColdSide
from dynajax.engine.given import Given
from dynajax.engine.opening import load_parts
from dynajax.engine.planning import Prepared, prepare
from dynajax.plan import Placement

PROMPT_TOKENS, WARM_TOKENS, NEW_TOKENS = 48, 8, 48
RECIPE = Recipe(rank=95)  # whose predictors take little of a budget
SPARE_BYTES = 2**20  # for predictors and staging of the tiny model
ROOM = 1.2  # times as much as the longest arm took has to be left for the next
STREAMED_LAYERS = 3  # on the device at once: one that is computed, its parts, and one that comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the model."""

    name: str
    policy: str
    sparsity: str
    whole: bool = False  # a layer's FFN is on the device or it is not; attention is there in every arm
    cold: Callable[..., ColdSide] = ColdSide
    may_fail: bool = False  # not every device can


ARMS = (
    Arm(name="layer_split", policy="static", sparsity="dense", whole=True),
    Arm(name="dynamic", policy="dynamic", sparsity="predicted"),
    Arm(name="static", policy="static", sparsity="predicted"),
    Arm(name="exact", policy="dynamic", sparsity="exact"),
    Arm(name="streaming", policy="static", sparsity="dense", whole=True, cold=StreamedCold, may_fail=True),
    Arm(name="macro+micro", policy="macro+micro", sparsity="predicted"),
    Arm(name="micro", policy="micro", sparsity="predicted"),
    Arm(name="pinned_slice", policy="static", sparsity="predicted", cold=PinnedCold, may_fail=True),
)
UNPREDICTED = (  # where no predictors are drawn
    ARMS[0],
    Arm(name="static_exact", policy="static", sparsity="exact"),
    Arm(name="macro_exact", policy="macro", sparsity="exact"),
)
FASTER = ("layer_split", "dynamic", "static", "exact", "streaming")  # where there is time for some only
EQUAL = (
    ("layer_split", "exact", "streaming", "static_exact", "macro_exact"),
    ("static", "macro+micro", "micro", "pinned_slice"),
)  # their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Under which all arms of a run stand."""

    budget_bytes: int
    threads: int | None = None
    around: Around | None = None  # the link


def chosen(*names: str) -> tuple[Arm, ...]:
    return tuple(arm for arm in ARMS if arm.name in names)


def run_shape(report: Report, shape: str, budget_bytes: int, arms: Sequence[Arm]) -> None:
    """A shape of `make_checkpoint` in 16 bits with predictors; the tiny one in float32 on the CPU backend."""
    report.add(**facts())
    with TemporaryDirectory() as folder:
        dtype = "float32" if is_cpu() else "float16"
        drawn, budget = prepared_model(report, Path(folder), SHAPES[shape], dtype, budget_bytes)
        run_arms(report, "arms", drawn, arms, Setting(budget_bytes=budget))


def prepared_model(
    report: Report, folder: Path, spec: ModelSpec, dtype: str, budget_bytes: int, *, predictors: bool = True
) -> tuple[Drawn, int]:
    """The model (the tiny one on the CPU backend), and what of the budget this device has."""
    begin = time.perf_counter()
    drawn = draw(folder, SHAPES["tiny"] if is_cpu() else spec, dtype, RECIPE, predictors=predictors)
    budget, spent = budget_here(drawn, budget_bytes), round(time.perf_counter() - begin, 2)
    sizes = {name: getattr(drawn.spec, name) for name in ("layers", "hidden", "ffn")}
    report.add(dtype=dtype, **sizes, budget_bytes=budget, host_bytes=drawn.store.nbytes, draw_s=spent)
    return drawn, budget


def budget_here(drawn: Drawn, wanted_bytes: int) -> int:
    """The budget, or what jax may have here; on the CPU backend two fifths of the tiny model's neurons."""
    if is_cpu():
        return budgets(str(drawn.folder), drawn.dtype)["two_fifths"] + SPARE_BYTES
    return min(wanted_bytes, (the_device().memory_stats() or {}).get("bytes_limit", wanted_bytes))


def run_arms(report: Report, called: str, drawn: Drawn, arms: Sequence[Arm], setting: Setting) -> None:
    """Each arm's figures, and a failure where arms that compute the same choose other tokens in float32. Arms for which
    no time is left are named."""
    found: list[dict[str, Any]] = []
    tokens: dict[str, list[int]] = {}
    longest_s = 0.0
    for number, arm in enumerate(arms):
        begin = time.perf_counter()
        if report.left_s < ROOM * longest_s:
            report.add(**{f"{called}_left_out": [later.name for later in arms[number:]]})
            break
        figures, chose = tried(drawn, arm, setting)
        found.append({"arm": arm.name, **figures})
        if chose is None and not arm.may_fail:
            report.fail(f"{arm.name}: {figures['error']}")
        elif chose is not None:
            tokens[arm.name] = chose
            found[-1]["agrees"] = agreement(arm.name, tokens)
            if drawn.dtype == "float32" and found[-1]["agrees"] < len(chose):
                report.fail(f"{arm.name}: token {found[-1]['agrees']} is another than without it")
            if arm.policy == "static" and figures["migrated"]:
                report.fail(f"{arm.name}: {figures['migrated']} neurons moved")
        report.add(**{called: found})
        gc.collect()  # the last engine's device memory
        longest_s = max(longest_s, time.perf_counter() - begin)


def agreement(name: str, tokens: dict[str, list[int]]) -> int:
    """Tokens from the start that are those of the first arm that computes the same."""
    peers = next((group for group in EQUAL if name in group), (name,))
    first = next(tokens[peer] for peer in tokens if peer in peers)
    different = np.flatnonzero(np.asarray(tokens[name]) != np.asarray(first))
    return int(different[0]) if len(different) else len(first)


def tried(drawn: Drawn, arm: Arm, setting: Setting) -> tuple[dict[str, Any], list[int] | None]:
    """Figures and tokens; or what went wrong, and None."""
    try:
        return run_arm(drawn, arm, setting)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}, None


def run_arm(drawn: Drawn, arm: Arm, setting: Setting) -> tuple[dict[str, Any], list[int]]:
    """Figures of one arm, and its tokens; a short generation before lets costs and guesses settle."""
    prompt = topic_ids(np.random.default_rng(0), 1, PROMPT_TOKENS, drawn.spec.vocab)[0].tolist()
    with open_engine(drawn, arm, setting) as engine:
        for count in (WARM_TOKENS, WARM_TOKENS if is_cpu() else NEW_TOKENS):
            engine.generate(prompt, max_new_tokens=count, ignore_eos=True)
        result, told = engine.last_result, engine.stats()
    units, timings = result.units, result.timings
    figures = {
        "policy": told["policy"],
        "sparsity": arm.sparsity,
        "staging": told["staging"],
        "decode_tok_s": round(timings.decode_tok_s or 0, 2),
        "prefill_tok_s": round(timings.prefill_tok_s or 0, 2),
        "load_s": round(timings.load_s, 2),
        "compile_s": round(timings.compile_s, 2),
        **{name: getattr(units, name) for name in ("hot_share", "recall", "density", "migrated", "late_plans")},
        **{name: result.ffn[name] for name in ("hot_s", "cold_s")},
        "pool_bytes": result.memory["pool_bytes"],
    }
    if arm.cold is StreamedCold:  # nobody counts what is live in what was sent
        figures |= {"hot_share": None, "density": None}
    return figures, list(result.token_ids)


def open_engine(drawn: Drawn, arm: Arm, setting: Setting) -> Engine:
    """An engine of the drawn model; its units are not copied."""
    config = EngineConfig(
        dtype=drawn.dtype, host_dtype=drawn.dtype, ctx=CTX, policy=arm.policy, sparsity=arm.sparsity,
        host_mode="threads", vram_budget=setting.budget_bytes, threads=setting.threads, set={"theta": 0.5},
    )  # fmt: skip
    prepared = prepare("drawn", config, folder=drawn.folder, fingerprint=drawn.fingerprint())
    if arm.whole:
        spare = STREAMED_LAYERS if arm.cold is StreamedCold else 0
        prepared = replace(prepared, placement=whole_layers(prepared, spare))
    cold = partial(arm.cold, around=setting.around) if arm.cold is StreamedCold else arm.cold
    given = Given(store=drawn.store, cold=cold, around=setting.around)
    return Engine(load_parts(cast("Checkpoint", drawn), prepared, config, lambda *_: None, given))


def whole_layers(prepared: Prepared, spare: int) -> Placement:
    """As many first layers as the pool's bytes hold, without so many; of the others nothing."""
    units, layers = prepared.placement.units, len(prepared.placement.buckets)
    count = max(0, prepared.placement.resident // units - spare)
    all_of, none = np.arange(units, dtype=np.int32), np.empty(0, np.int32)
    return Placement((all_of,) * count + (none,) * (layers - count), units)
