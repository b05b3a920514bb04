"""A small machine in round numbers, and hand-made activity."""

from typing import Any

import numpy as np

from dynajax.config import PolicyConfig
from dynajax.plan import Placement
from dynajax.sim.activity import Activity, Run
from dynajax.sim.hardware import Hardware
from dynajax.sim.records import Load, System

LAYERS, NEURONS = 2, 8
TINY = 1e-12  # seconds: nothing


def machine(**changes: Any) -> Hardware:
    """The device reads 100 bytes a second, the host 10; memory and cores suffice for all, nothing else takes time."""
    base: dict[str, Any] = {
        "name": "small",
        "device_bytes": 1000,
        "device_bps": 100.0,
        "device_flops": 1.0,
        "launch_s": TINY,
        "link_bps": 5.0,
        "pageable_bps": 1.0,
        "t0_s": TINY,
        "host_bps": 1e6,
        "cores": 8,
        "cpu_bps": {"float32": 10.0},
        "cpu_flops": 1.0,
        "gather_bps": 1e9,
        "call_s": TINY,
        "sync_s": TINY,
        "dispatch_s": TINY,
        "layer_s": TINY,
        "token_s": TINY,
        "plan_s": TINY,
        "plan_unit_s": TINY,
        "balance_s": TINY,
    }
    return Hardware(**base | changes)


def load(**changes: Any) -> Load:
    """Neurons of 3 bytes, attention of 20, a head of 50, no cache and no predictors."""
    base: dict[str, Any] = {"layers": LAYERS, "neurons": NEURONS, "unit": 3.0, "host_unit": 3.0,
                            "dtype": "float32", "parts": 3, "attention": 20.0, "kv_token": 0.0, "head": 50.0,
                            "score": 0.0, "scores": 0}  # fmt: skip
    return Load(**base | changes)


def system(**changes: Any) -> System:
    """All is computed, the device reads its whole pool, the host whole neurons, and nothing moves."""
    base: dict[str, Any] = {"policy": "static", "config": PolicyConfig(), "skips": False,
                            "gate_first": False, "one_pool": False}  # fmt: skip
    return System(**base | changes)


def activity(live: np.ndarray, place: np.ndarray | None = None, skip: np.ndarray | None = None) -> Activity:
    """One run [T, L, F] without a prompt."""
    run = Run(
        prompt_tokens=0,
        prompt_counts=np.zeros(live.shape[1:], np.int32),
        live=live,
        place=place,
        placed=np.full(live.shape[:2], place is not None),
        skip=skip,
    )
    return Activity(name="small", synthetic=True, frequency=live.mean(axis=0, dtype=np.float32), mass=None, runs=(run,))


def placement(*buckets: list[int]) -> Placement:
    return Placement(tuple(np.array(bucket, np.int32) for bucket in buckets), NEURONS)
