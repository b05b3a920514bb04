"""A small machine and a small mixture in round numbers, and routing by hand."""

from dataclasses import replace
from typing import Any

import numpy as np

from dynajax.plan import Placement
from dynajax.policy.experts.presets import PRESETS
from dynajax.policy.experts.records import ExpertCosts
from dynajax.sim.experts.activity import MixtureActivity, MixtureRun, Prompt
from dynajax.sim.experts.shapes import MixtureLoad
from dynajax.sim.experts.sides import Sides
from dynajax.sim.experts.systems import MixtureSystem
from dynajax.sim.hardware import Hardware
from tests.sim.cases import TINY, machine

UNITS = 6


def small_machine(**changes: Any) -> Hardware:
    """An expert is read in 1 ms by the device, in 10 ms by the host, and comes over the link in 4 ms; a token at one
    takes the device 0.3 ms, the host 4 ms. Nothing else takes time. Changes are given per millisecond, or in them."""
    base = {"device_bps": 100.0, "device_flops": 100.0, "cpu_flops": 7.5, "link_bps": 25.0, **changes}
    rates = {name: value * 1e3 for name, value in base.items() if name.endswith(("bps", "flops"))}
    times = {name: value * 1e-3 for name, value in base.items() if name.endswith("_s")}
    return machine(cpu_bps={"float32": 1e4}, **rates, **times)


def small_load(layers: int = 1, **changes: Any) -> MixtureLoad:
    """Experts of 100 bytes, 30 operations a token; all else is next to nothing."""
    base: dict[str, Any] = {"unit_layers": tuple(range(layers)), "units": UNITS, "top_k": 2, "unit": 100.0,
                            "host_unit": 100.0, "host_dtype": "float32", "unit_flops": 30.0, "attend": TINY,
                            "attend_flops": TINY, "always": (0.0,) * layers, "always_flops": (0.0,) * layers,
                            "router": TINY, "kv_token": 0.0, "head": TINY, "head_flops": TINY}  # fmt: skip
    return MixtureLoad(**{**base, **changes})


def routed(*steps: Any, prompts: Any = (), foretold: Any = None, rows: int | None = None) -> MixtureActivity:
    """One run: of every step, of every layer, the tokens at each expert."""
    counts = np.array(steps, np.int32)
    tokens = counts.sum(axis=2)[:, 0] // 2 if rows is None else np.full(len(counts), rows)
    run = MixtureRun(
        prompts=tuple(Prompt(tokens=int(np.sum(p) // len(p) // 2), counts=np.array(p, np.int32)) for p in prompts),
        steps=counts,
        rows=np.maximum(tokens, 1).astype(np.int32),
        context=0,
        foretold=None if foretold is None else np.array(foretold, np.int32),
    )
    usual = np.full(counts.shape[1:], 1 / UNITS, np.float32)
    return MixtureActivity(name="small", synthetic=True, top_k=2, frequency=usual, runs=(run,))


def placed(*buckets: Any) -> Placement:
    return Placement(tuple(np.array(bucket, np.int32) for bucket in buckets), UNITS)


def system(preset: str = "scan", **changes: Any) -> MixtureSystem:
    parts = {name: changes.pop(name) for name in ("assign", "cache", "prefetch") if name in changes}
    return MixtureSystem(policy=replace(PRESETS[preset], **parts), **changes)


class Rooflines(ExpertCosts):
    """The costs that the simulated machine has, for `makespan`."""

    def __init__(self, sides: Sides) -> None:
        self.__dict__["sides"] = sides
        values = {"t0_s": TINY, "t_trans_s": sides.copy_fixed_s + sides.copy_busy_s - TINY, "t_sync_s": sides.sync_s}
        super().__init__(gpu_s=1.0, gpu_token_s=1.0, cpu_s=1.0, cpu_token_s=1.0, **values)

    def gpu(self, tokens: Any) -> Any:
        return self.__dict__["sides"].device_s(tokens)

    def cpu(self, tokens: Any) -> Any:
        return self.__dict__["sides"].host_s(tokens)
