"""What experts cost on this machine before the first one was asked for: a few of each side, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from dynajax.bundles import HostStore
from dynajax.engine.mixture.groups import Routed
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.policy.costs import LOW_S
from dynajax.policy.expert_costs import LEAST_SHARE, ExpertCostEstimator
from dynajax.policy.experts.records import ExpertCosts

REPEATS, SEVERAL = 3, 4
START = ExpertCosts(  # of a GPU on PCIe 4 and a desktop's memory, for an expert of 10 MB; those of --deterministic
    t0_s=1e-5, t_trans_s=4e-4, gpu_s=2e-5, gpu_token_s=5e-7, cpu_s=2.5e-4, cpu_token_s=2e-5, t_sync_s=2e-5
)


def probed(layers: MixtureLayers, store: HostStore, safety: float, *, moves: bool) -> ExpertCostEstimator:
    """An estimator that starts from what was measured with one row, with as many rows as the engine decodes, and with
    several experts; what cannot be had here is a typical figure."""
    spec, batch = layers.spec, layers.programs.shapes.batch
    h = np.random.default_rng(0).standard_normal((batch, spec.hidden), np.float32)
    several, calls, seen = min(SEVERAL, spec.units), {}, []
    for side, run in (("cpu", _host), ("gpu", _device)):
        steps = {(n, rows): run(layers, h, n, rows) for n, rows in {(1, 1), (1, batch), (several, 1)}}
        times = {key: _fastest(step) for key, step in steps.items() if step is not None}
        if several > 1 and {(1, 1), (several, 1)} <= times.keys():
            one, more = times[1, 1], times[several, 1]
            calls[side] = min(max(0.0, one - (more - one) / (several - 1)), (1 - LEAST_SHARE) * one)
        seen += [(side, n, n * rows, seconds) for (n, rows), seconds in times.items()]
    start = replace(START, t_sync_s=max(LOW_S, _fastest(lambda: np.asarray(jax.device_put(h) + 0))))
    estimator = ExpertCostEstimator(start, safety, calls=calls)
    for observation in seen:
        estimator.observe(*observation)
    if moves:
        rows = store.arenas[0][0]
        estimator.observe_move(_fastest(lambda: jax.device_put(rows).block_until_ready()))
    return estimator


def _routed(experts: int, rows: int) -> Routed:
    """`rows` tokens that all go to the first experts."""
    ids = np.broadcast_to(np.arange(experts, dtype=np.int32), (rows, experts))
    return Routed(np.ascontiguousarray(ids), np.full(ids.shape, 1 / experts, np.float32))


def _host(layers: MixtureLayers, h: np.ndarray, experts: int, rows: int) -> Callable[[], object]:
    routed, wanted = _routed(experts, rows), np.arange(experts, dtype=np.int32)
    return lambda: layers.cold.run(0, h[:rows], routed, wanted)


def _device(layers: MixtureLayers, h: np.ndarray, experts: int, rows: int) -> Callable[[], object] | None:
    m = next((m for m, slots in enumerate(layers.pool.slots) if slots >= experts), None)
    if m is None:
        return None
    there = np.sort(layers.pool.bucket(m)[:experts])
    routed = Routed(np.ascontiguousarray(np.broadcast_to(there, (rows, experts))), _routed(experts, rows).weights)
    x = jax.device_put(h)
    return lambda: layers.hot_rows(m, x, x, there, routed).block_until_ready()


def _fastest(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
