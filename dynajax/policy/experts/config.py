"""Every constant of an expert policy, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dynajax.config import PolicyConfig, check_number
from dynajax.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Constants of the expert policies; `--set NAME=VALUE` sets one.

    DALI's own w_size and u_size are not known: of those that its port tests, 4 and 1 are the default here. decay and
    move_price were chosen on the synthetic routing of `benchmarks/expert_cache.py`, 1 to 16 rows: from 0.94 to 0.97 and
    0.1 to 0.3 little changes; above, swaps come too late for a single row. prefetch_price: so that the count predictor,
    which is nearly always wrong, costs nothing, and a good one keeps most of its gain.
    """

    decay: float = 0.96  # of an expert's share of the traffic per step, which so remembers 1 / (1 - decay) steps
    move_price: float = 0.2  # a swap must save so many times what moving an expert takes, while its score holds
    w_size: int = 4  # dali: steps of a window
    u_size: int = 1  # dali: swaps at its end
    ema_decay: float = 0.7  # ema: of the scores per step
    count_decay: float = 0.5  # of the workload that `count` predicts
    confidence: float = 0.5  # that a predicted expert is live, until it has been seen how often it is
    confidence_decay: float = 0.95  # of what was seen, per prediction
    prefetch_price: float = 0.1  # what a prefetch must be expected to save, in times of moving an expert

    def __post_init__(self) -> None:
        for name in ("decay", "ema_decay", "count_decay", "confidence_decay"):
            check_number(name, getattr(self, name), 0, 0.9999)
        for name in ("move_price", "prefetch_price"):
            check_number(name, getattr(self, name), 0, 1e6)
        for name in ("w_size", "u_size"):
            check_number(name, getattr(self, name), 1, 2**31, whole=True)
        check_number("confidence", self.confidence, 0, 1)


_SHARED = ("lead", "safety", "record_scores")  # constants that neurons and experts have in common


def expert_config(knobs: PolicyConfig) -> ExpertConfig:
    """The constants of expert policies among all. UsageError for one that was set and places neurons only."""
    known = {_name_of(field.name): field.name for field in fields(ExpertConfig)}
    default = PolicyConfig()
    for field in fields(PolicyConfig):
        if field.name not in (*known, *_SHARED) and getattr(knobs, field.name) != getattr(default, field.name):
            raise UsageError(f"--set {field.name} is of neurons; for experts there are {', '.join((*known, *_SHARED))}")
    return ExpertConfig(**{own: getattr(knobs, name) for name, own in known.items()})


def _name_of(field: str) -> str:
    """What `PolicyConfig` calls it, where neurons have a decay of their own."""
    return "expert_decay" if field == "decay" else field
