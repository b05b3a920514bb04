"""The assignment policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from dynajax.policy.experts import rivals
from dynajax.policy.experts.records import Assignment, ExpertCosts, Work
from dynajax.policy.experts.scan import scan


class Assign(Protocol):
    """Who computes a layer's live experts. A function of its arguments alone; fetches at most `work.room`."""

    def __call__(self, work: Work, costs: ExpertCosts) -> Assignment: ...


ASSIGN: Mapping[str, Assign] = MappingProxyType(
    {
        "scan": scan,
        "dali": rivals.dali,
        "resident": rivals.resident,
        "fetch-all": rivals.fetch_all,
        "per-expert": rivals.per_expert,
        "two-ended": rivals.two_ended,
        "two-ended-shipped": rivals.two_ended_as_shipped,
        "bandwidth-split": rivals.bandwidth_split,
    }
)
