"""One accountant for every byte on the device: what each thing costs, and what is left for the pool. No jax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dynajax.config import DTYPE_BYTES, ModelSpec, head_dtype, is_packed, stored_bytes, unpacked_dtype
from dynajax.errors import FitError

GIB = 2**30
MARGIN_SHARE, MARGIN_BYTES = 0.03, 64 * 2**20


def dense_bytes(spec: ModelSpec, dtype: str) -> int:
    """Everything on the device that is neither a unit nor cache: attention, norms, routers, what every token of a
    mixture of experts computes, and the head's table.

    An untied embedding table stays on the host, and learned positions with it; a tied one is the head and counts once.
    """
    always = range(spec.layers)
    count = spec.layers * spec.block_parameters + spec.norm_parameters + spec.cross_parameters
    count += sum(map(spec.always_parameters, always)) + (spec.position_parameters if spec.tied else 0)
    matrices = spec.layers * spec.block_matrices + spec.cross_matrices + sum(map(spec.always_matrices, always))
    rest = unpacked_dtype(dtype)
    wider = DTYPE_BYTES[spec.routing_dtype("router", rest)] - DTYPE_BYTES[rest]
    table = stored_bytes(spec.hidden * spec.vocab, head_dtype(dtype, tied=spec.tied))
    routers = len(spec.unit_layers) * spec.router_parameters * wider
    return table + stored_bytes(matrices, dtype) + stored_bytes(count - matrices, rest) + routers


def kv_bytes(spec: ModelSpec, dtype: str, ctx: int, batch: int) -> int:
    """Keys and values of all layers that decode, behind an encoder also of what that saw; with latents these, once."""
    width = spec.cache_heads * (spec.key_width + spec.value_width) * (1 if spec.encoder is None else 2)
    return len(spec.stepped) * batch * ctx * width * DTYPE_BYTES[dtype]


def unit_bytes(spec: ModelSpec, dtype: str) -> int:
    """One neuron, a row of each part, or one expert with all of its neurons."""
    return stored_bytes(spec.ffn_parts * spec.unit_rows * spec.unit_width, dtype)


def workspace_bytes(spec: ModelSpec, ctx: int, batch: int, chunk: int) -> int:
    """Activations outside any program: the prompt's residual stream, one chunk's FFN input, a step's rows."""
    rows = batch * (spec.hidden + 2 * spec.unit_width + spec.vocab)
    inputs = chunk if spec.experts is None else ctx  # an expert reads every chunk before the next one is brought in
    return 4 * (spec.hidden * ctx + spec.unit_width * inputs + rows + spec.layers)


def host_bytes(spec: ModelSpec, host_dtype: str, *, resident: bool = False) -> dict[str, int]:
    """What stays in host memory for good: every unit, unless all are on the device, and the tables of an untied
    embedding."""
    arena = 0 if resident else len(spec.unit_layers) * spec.units * unit_bytes(spec, host_dtype)
    tables = 0 if spec.tied else spec.vocab * spec.hidden + spec.position_parameters
    return {"units": arena, "embed": stored_bytes(tables, table_dtype(spec, host_dtype))}


def table_dtype(spec: ModelSpec, host_dtype: str) -> str:
    """The type of tables on the host: beside packed units that of the checkpoint."""
    return spec.dtype if is_packed(host_dtype) else host_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where every byte goes; `budget_bytes` bounds `plan_bytes` + `margin`."""

    model: str
    budget_bytes: int
    dense: int
    kv: int
    pool: int
    scratch: int
    margin: int
    smallest_budget_bytes: int  # no unit on the device
    host: dict[str, int]
    units_total: int
    units_resident: int
    predictors: int = 0
    staging: int = 0

    @property
    def plan_bytes(self) -> int:
        """What is expected to be in use at the peak; the margin is for what nobody can foresee."""
        return sum(size for name, size in self.device.items() if name != "margin")

    @property
    def device(self) -> dict[str, int]:
        names = ("dense", "kv", "predictors", "pool", "staging", "scratch", "margin")
        return {name: getattr(self, name) for name in names}

    def rows(self) -> list[tuple[str, int]]:
        """Name and bytes of every device item, in the order in which they are granted."""
        return list(self.device.items())

    def to_json(self) -> dict[str, Any]:
        """The object of `plan.py --json`."""
        share = self.units_resident / self.units_total
        return {
            "model": self.model,
            "budget_bytes": self.budget_bytes,
            "plan_bytes": self.plan_bytes,
            "device": self.device,
            "host": self.host,
            "units": {"total": self.units_total, "resident": self.units_resident, "share": share},
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "expected": None,
        }


def margin_bytes(budget_bytes: int, *, gpu: bool) -> int:
    """Kept free of a budget for what nobody can foresee: allocator fragments and library workspaces on a GPU."""
    return min(int(budget_bytes * MARGIN_SHARE) + MARGIN_BYTES, budget_bytes // 4) if gpu else 0


def smallest_budget(fixed_bytes: int, *, gpu: bool) -> int:
    """The smallest budget that leaves `fixed_bytes` beside its margin."""
    if not gpu:
        return fixed_bytes
    large = math.ceil((fixed_bytes + MARGIN_BYTES) / (1 - MARGIN_SHARE))
    return min(large, math.ceil(fixed_bytes * 4 / 3))


def pool_budget(budget_bytes: int, fixed_bytes: int, *, gpu: bool) -> int:
    """Bytes left for the pool once everything that must be on the device is; FitError names the smallest budget."""
    left = budget_bytes - margin_bytes(budget_bytes, gpu=gpu) - fixed_bytes
    if left < 0:
        needed = smallest_budget(fixed_bytes, gpu=gpu)
        raise FitError(
            f"the part that must be on the device needs {needed} bytes ({needed / GIB:.3f} GiB), the budget is "
            f"{budget_bytes}: use --vram-budget {needed}B or more, or lower --ctx or --batch"
        )
    return left
