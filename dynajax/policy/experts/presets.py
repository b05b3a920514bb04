"""Expert policies by name: which parts make one up. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dynajax.errors import UsageError
from dynajax.plan import Placement
from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.caches import CACHES
from dynajax.policy.placement import place_equal

PrefetchKind = Literal["corrected", "residual", "residual-mean", "gate", "count", "none"]
PlacementKind = Literal["equal", "layers", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPolicy:
    """The four parts of an expert policy, by name; UsageError for one that does not exist.

    prefetch names whose prediction `ExpertPlanner.prefetch` is given: only `count` is known to this package.
    """

    assign: str = "scan"
    cache: str = "decayed"
    prefetch: str = "none"
    placement: str = "equal"

    def __post_init__(self) -> None:
        choices = {
            "assign": tuple(ASSIGN),
            "cache": tuple(CACHES),
            "prefetch": get_args(PrefetchKind),
            "placement": get_args(PlacementKind),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")


# Fiddler and the two-ended schedule stream an expert through a buffer; here a fetched one takes a slot and stays.
PRESETS: Mapping[str, ExpertPolicy] = MappingProxyType(
    {
        "auto": ExpertPolicy(prefetch="corrected"),
        "scan": ExpertPolicy(),
        "dali": ExpertPolicy(assign="dali", cache="dali", prefetch="residual"),
        "hybrimoe": ExpertPolicy(assign="two-ended", cache="ema", prefetch="count"),
        "hybrimoe-shipped": ExpertPolicy(assign="two-ended-shipped", cache="ema", prefetch="count"),
        "bandwidth-split": ExpertPolicy(assign="bandwidth-split", cache="lru"),
        "fiddler": ExpertPolicy(assign="per-expert", cache="lfu"),
        "lru": ExpertPolicy(assign="fetch-all", cache="lru"),
        "lfu": ExpertPolicy(assign="fetch-all", cache="lfu"),
        "static": ExpertPolicy(assign="resident", cache="static"),
        "layer-split": ExpertPolicy(assign="resident", cache="static", placement="layers"),
        "none": ExpertPolicy(assign="resident", cache="static", placement="none"),
    }
)


def expert_policy(name: str, **parts: str | None) -> ExpertPolicy:
    """The preset, with the parts given put in place of its own (None: its own). UsageError for unknown names."""
    if name not in PRESETS:
        raise UsageError(f"--policy must be one of {', '.join(PRESETS)}, got {name!r}")
    return replace(PRESETS[name], **{part: value for part, value in parts.items() if value is not None})


def place_experts(
    kind: str,
    frequency: npt.NDArray[np.float32],  # [L, E] share of tokens that choose the expert
    unit_bytes: int,
    pool_bytes: int,  # for all layers together
) -> Placement:
    """Where experts start. equal: as many slots in every layer, the most frequent experts; layers: all experts of the
    last layers that fit, as llama.cpp's --n-cpu-moe keeps those of the first layers on the CPU; none: nothing."""
    layers, experts = frequency.shape
    if kind == "equal":
        return place_equal(frequency, unit_bytes, pool_bytes)
    whole = pool_bytes // (unit_bytes * experts) if kind == "layers" else 0
    sizes = [experts if layers - layer <= whole else 0 for layer in range(layers)]
    return Placement(tuple(np.arange(size, dtype=np.int32) for size in sizes), experts)
