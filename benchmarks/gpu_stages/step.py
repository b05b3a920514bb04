"""Stage `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_stages.device import facts, is_cpu, median_s
from benchmarks.gpu_stages.isolated import Report
from dynajax.config import ModelSpec
from dynajax.policy.placement import block_units
from dynajax.programs import Programs, Shapes

Arrays = tuple[jax.Array, ...]
Program = jax.stages.Compiled
Token = Callable[[Program, list[Arrays]], jax.Array]

CTX = 1024
EIGHTHS = (2, 4, 8)  # of the neurons, on the device


def model_shape() -> ModelSpec:
    """Layers of a 7B model on a GPU, more than its caches hold; a small one on the CPU backend."""
    if is_cpu():
        return ModelSpec(layers=2, hidden=256, ffn=688, heads=4, kv_heads=4, head_dim=64, vocab=32)
    return ModelSpec(layers=4, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32)


def run(report: Report) -> None:
    """How long does a layer of a 7B model take with the engine's two programs, and what does the host's half add?

    `resident_us` against `attend_us` + `hot_us` is the cost of dispatching; if it dominates, a resident model should
    run as one program. `threads_us` - `resident_us` is what reading h and handing back y_cold costs per layer before
    any neuron is computed on the host: the floor of threads mode. Rates far below the device's memory bandwidth say
    that a program does not read its weights once: a kernel of our own, or another layout.
    """
    report.add(**facts())
    cases: list[dict[str, Any]] = []
    for dtype in ("float32",) if is_cpu() else ("float16", "bfloat16"):
        layers = Layers(model_shape(), dtype)
        for eighths in EIGHTHS:
            case = {"dtype": dtype, **layers.measure(eighths)}
            cases.append(case)
            report.add(layers=cases)
            if not case["finite"]:
                report.fail(f"{dtype}, {eighths}/8 of the neurons: the stream is not finite")


class Layers:
    """Random layers with caches. The methods ending in `_token` take one token through all of them."""

    def __init__(self, spec: ModelSpec, dtype: str):
        self.spec, self.programs = spec, Programs(Shapes(spec=spec, dtype=dtype, ctx=CTX, batch=1))
        self.attend = self.programs.get("attend_rows", CTX)
        (leaves, cache, *_), _ = self.attend.args_info
        self.leaves = [randoms(leaves, layer) for layer in range(spec.layers)]
        self.ks = [jnp.zeros(cache.shape, cache.dtype) for _ in range(spec.layers)]
        self.vs = [jnp.zeros(cache.shape, cache.dtype) for _ in range(spec.layers)]
        self.tally = jnp.zeros((spec.layers,), jnp.int32)
        self.zeros = np.zeros((1, spec.hidden), np.float32)
        self.start = jax.device_put(np.random.default_rng(0).standard_normal((1, spec.hidden), np.float32))
        self.position, self.active = np.full(1, CTX - 1, np.int32), np.ones(1, np.bool_)

    def measure(self, eighths: int) -> dict[str, Any]:
        """Times per layer with that share of the neurons in every pool."""
        spec = self.spec
        slots = min(spec.ffn, eighths * block_units(spec.ffn))
        hot = self.programs.get("hot_rows", slots)
        (_, _, parts, *_), _ = hot.args_info
        pools = [randoms(parts, layer) for layer in range(spec.layers)]
        steps: dict[str, Token] = {
            "attend": self.attend_token,
            "hot": self.hot_token,
            "resident": self.resident_token,
            "threads": self.threads_token,
        }
        count = 5 if is_cpu() else 30
        layer_s = {
            name: median_s(lambda step=step: step(hot, pools).block_until_ready(), count) / spec.layers
            for name, step in steps.items()
        }
        attend_bytes = sum(leaf.nbytes for leaf in self.leaves[0]) + 2 * self.ks[0].nbytes
        return {
            "slots": slots,
            **{f"{name}_us": round(seconds * 1e6, 1) for name, seconds in layer_s.items()},
            "attend_gb_s": round(attend_bytes / layer_s["attend"] / 1e9, 1),
            "hot_gb_s": round(sum(part.nbytes for part in pools[0]) / layer_s["hot"] / 1e9, 1),
            "finite": bool(np.isfinite(np.asarray(self.resident_token(hot, pools))).all()),
        }

    def attend_token(self, hot: Program, pools: list[Arrays]) -> jax.Array:
        """The first program of every layer, nothing else."""
        x = self.start
        for layer in range(self.spec.layers):
            x, _ = self._attend(layer, x, self.zeros)
        return x

    def hot_token(self, hot: Program, pools: list[Arrays]) -> jax.Array:
        """The second program of every layer, nothing else."""
        x = self.start
        for layer in range(self.spec.layers):
            x = self._hot(hot, pools, layer, x, self.start)
        return x

    def resident_token(self, hot: Program, pools: list[Arrays]) -> jax.Array:
        """Both programs; the host looks at nothing in between."""
        x = self.start
        for layer in range(self.spec.layers):
            x, h = self._attend(layer, x, self.zeros)
            x = self._hot(hot, pools, layer, x, h)
        return x

    def threads_token(self, hot: Program, pools: list[Arrays]) -> jax.Array:
        """Both programs, and in every layer h goes to the host and an array comes back, as in threads mode."""
        x, y_cold = self.start, self.zeros
        for layer in range(self.spec.layers):
            x, h = self._attend(layer, x, y_cold)
            h.copy_to_host_async()
            x = self._hot(hot, pools, layer, x, h)
            y_cold = np.asarray(h) * np.float32(0)
        return x

    def _attend(self, layer: int, x: jax.Array, y_cold: np.ndarray) -> tuple[jax.Array, jax.Array]:
        k, v = self.ks[layer], self.vs[layer]
        x, h, self.ks[layer], self.vs[layer] = self.attend(self.leaves[layer], k, v, x, y_cold, self.position)
        return x, h

    def _hot(self, hot: Program, pools: list[Arrays], layer: int, x: jax.Array, h: jax.Array) -> jax.Array:
        x, self.tally = hot(x, h, pools[layer], self.tally, np.int32(layer), self.active)
        return x


def randoms(arguments: Any, seed: int) -> Arrays:
    """An array for each of a program's arguments; uint16 gets the bits of bfloat16."""
    made = []
    for index, argument in enumerate(arguments):
        key = jax.random.key(1000 * seed + index)
        kind = jnp.bfloat16 if argument.dtype == jnp.uint16 else argument.dtype
        values = (jax.random.normal(key, argument.shape, jnp.float32) * 0.02).astype(kind)
        made.append(values if kind == argument.dtype else jax.lax.bitcast_convert_type(values, jnp.uint16))
    return tuple(made)
