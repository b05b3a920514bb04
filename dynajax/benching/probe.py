"""Kernel and link for one model, and which device jax has: a process of its own, which ends and gives everything back.

One JSON object on stdin (`folder`, `dtype`, `host_dtype`, `threads`, `staging`, `repeat`), one on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from dynajax.benching.kernel import LayerShape, kernel_figures
from dynajax.budget import unit_bytes
from dynajax.checkpoint import read_spec
from dynajax.config import ModelSpec
from dynajax.errors import DynajaxError
from dynajax.policy.placement import MOST_STAGED
from dynajax.profiling import device
from dynajax.profiling.pace import Pace
from hostcompute import HostPool, open_pool

PACE = Pace(seconds=0.5, least=5, most=200)
LARGE_BYTES, SMALL_BYTES = 64 << 20, 4 << 10  # of transfers


def facts() -> dict[str, Any]:
    """The device that jax computes on."""
    there = jax.local_devices()[0]
    stats = there.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return {"jax": jax.__version__, "platform": there.platform, "device": there.device_kind, "bytes_limit": limit}


def kernel(spec: ModelSpec, dtype: str, threads: int, repeat: int) -> dict[str, Any] | None:
    """The row kernel on layers of the model's shape; None for experts, and without the C++ library."""
    with open_pool(1) as pool:
        if spec.experts is not None or not isinstance(pool, HostPool):
            return None
    shape = LayerShape(neurons=spec.units, parts=spec.ffn_parts, width=spec.unit_width)
    return kernel_figures(shape, dtype, threads, repeat)


def link(spec: ModelSpec, dtype: str, staging: str) -> dict[str, Any] | None:
    """The way from the engine's staging memory to the device; None where that is host memory itself."""
    there = jax.local_devices()[0]
    if there.platform == "cpu":
        return None
    way = device.open_link(there, staging, min(LARGE_BYTES, MOST_STAGED * unit_bytes(spec, dtype)))
    found, kind = device.link(way, LARGE_BYTES, SMALL_BYTES, PACE), way.name
    plain_gb_s = device.pageable_bps(there, LARGE_BYTES, PACE) / 1e9
    return {"staging": kind, "gb_s": found.bps / 1e9, "t0_s": found.t0_s, "pageable_gb_s": plain_gb_s}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    asked = json.loads(sys.stdin.read())
    try:
        spec = read_spec(Path(asked["folder"]))
        named = (asked["host_dtype"], asked["dtype"], spec.dtype)
        dtype = next(name for name in named if name != "auto")
        told = facts()
        told["kernel"] = kernel(spec, dtype, asked["threads"], asked["repeat"])
        told["link"] = link(spec, dtype, asked["staging"])
    except DynajaxError as error:
        told = {"error": str(error), "kind": type(error).__name__}
    answers.write(json.dumps(told))
    answers.close()


if __name__ == "__main__":
    main()
