"""What the engine's own Python costs: a plan, and a layer and a token beside programs and kernels."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.config import EngineConfig, ModelSpec, PolicyConfig
from dynajax.engine import Engine, plan_for
from dynajax.engine.plans import first_costs
from dynajax.plan import Placement
from dynajax.policy.planner import NeuronPlanner
from dynajax.profiling.device import Launch
from dynajax.profiling.pace import Line, Pace
from dynajax.testing import make_checkpoint

LAYERS = 4  # planned in turn
SETTLE = 16  # tokens after which hardly anything moves
UNIT_BYTES = 3 * 4096 * 2  # of a plan's costs
CTX = 256
PROMPT = (1, 2, 3)
LAYER_PROGRAMS = 3  # attend, score, hot
TOKEN_PROGRAMS = 2  # embed, head
LEAST_S = 1e-7  # of what is left after a subtraction


def plan_s(units: int, pace: Pace) -> float:
    """Seconds of a plan of a layer of so many units, and of what it learns afterwards, while hardly anything moves."""
    rng = np.random.default_rng(0)
    frequency = (rng.random((LAYERS, units)) ** 4).astype(np.float32)
    order = np.argsort(-frequency, axis=1, kind="stable")[:, : units // 2]
    placement = Placement(tuple(np.sort(row).astype(np.int32) for row in order), units)
    mass = rng.random((LAYERS, units)).astype(np.float32)
    planner = NeuronPlanner(placement, frequency, "dynamic", PolicyConfig(), mass)
    costs = first_costs(UNIT_BYTES, UNIT_BYTES)
    jobs = cycle([(layer, scores[layer]) for scores in _scores(frequency, rng) for layer in range(LAYERS)])

    def token() -> None:
        layer, scores = next(jobs)
        plan = planner.plan(layer, scores, None, costs)
        planner.applied(layer, plan)
        planner.observe(layer, scores >= plan.theta)

    for _ in range(SETTLE * LAYERS):
        token()
    return pace.median_s(token)


def plan_line(widths: tuple[int, int], pace: Pace) -> Line:
    """Seconds of a plan by the units of its layer."""
    first, second = ((float(units), plan_s(units, pace)) for units in widths)
    return Line.through(first, second)


def engine_overhead(threads: int, depths: tuple[int, int], tokens: int, runs: int) -> Line:
    """Seconds of a token by the layers of a model whose programs and kernels have almost nothing to do.

    Two engines that skip neurons and move none, half of the neurons on the host, decode in turn; of all tokens of an
    engine the fastest quarter counts. The slope is what a layer costs, the intercept what a token costs beside them.
    """
    times: dict[int, list[float]] = {depth: [] for depth in depths}
    with TemporaryDirectory(prefix="dynajax-profile-") as folder, ExitStack() as stack:
        engines = {depth: stack.enter_context(_engine(Path(folder), depth, threads)) for depth in depths}
        for _ in range(runs):
            for depth, engine in engines.items():
                times[depth] += _token_times(engine, tokens)
    first, second = ((float(depth), _fastest_quarter_s(spent)) for depth, spent in times.items())
    return Line.through(first, second)


def own_work(overhead: Line, started: Launch, call_s: float) -> tuple[float, float]:
    """(layer_s, token_s): of `engine_overhead` what is left beside programs, kernels and copies."""
    program_s = started.ready_s
    layer_s = overhead.slope - (LAYER_PROGRAMS * program_s + call_s + started.sync_s)
    token_s = overhead.intercept - TOKEN_PROGRAMS * program_s
    return max(LEAST_S, layer_s), max(LEAST_S, token_s)


def _scores(frequency: npt.NDArray[np.float32], rng: np.random.Generator) -> list[npt.NDArray[np.uint8]]:
    """Of a few tokens [L, F]: the frequencies and a little noise."""
    noise = 0.02 * rng.standard_normal((8, *frequency.shape), dtype=np.float32)
    return list((255 * np.clip(frequency + noise, 0, 1)).astype(np.uint8))


def _engine(folder: Path, layers: int, threads: int) -> Engine:
    spec = ModelSpec(
        layers=layers, hidden=64, ffn=192, heads=4, kv_heads=4, head_dim=16, vocab=128, max_positions=CTX, tied=True
    )
    model = str(make_checkpoint(folder / f"layers-{layers}", spec))
    settings: dict[str, Any] = {
        "ctx": CTX,
        "host_mode": "threads",
        "sparsity": "predicted",
        "predictor": "gate",
        "policy": "static",
        "stats": "none",
        "threads": threads,
        "offline": True,
    }
    plan = plan_for(model, EngineConfig(**settings))
    return Engine.from_pretrained(model, vram_budget=plan.smallest_budget_bytes + plan.pool // 2, **settings)


def _token_times(engine: Engine, tokens: int) -> list[float]:
    """Seconds of each token but the first, which waits for the prompt."""
    times, before = [], time.perf_counter()
    for _ in engine.stream(list(PROMPT), max_new_tokens=tokens, seed=0, ignore_eos=True):
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times[1:]


def _fastest_quarter_s(times: list[float]) -> float:
    """Their mean."""
    return float(np.mean(np.sort(times)[: max(1, len(times) // 4)]))
