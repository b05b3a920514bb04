"""What a plan costs."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt

from dynajax.config import PolicyConfig
from dynajax.engine.plans import first_costs
from dynajax.plan import Placement
from dynajax.policy.planner import NeuronPlanner
from dynajax.profiling.pace import Line, Pace

LAYERS = 4  # planned in turn
SETTLE = 16  # tokens after which hardly anything moves
UNIT_BYTES = 3 * 4096 * 2  # of a plan's costs


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


def _scores(frequency: npt.NDArray[np.float32], rng: np.random.Generator) -> list[npt.NDArray[np.uint8]]:
    """Of a few tokens [L, F]: the frequencies and a little noise."""
    noise = 0.02 * rng.standard_normal((8, *frequency.shape), dtype=np.float32)
    return list((255 * np.clip(frequency + noise, 0, 1)).astype(np.uint8))
