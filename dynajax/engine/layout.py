"""A host mode with its programs, and where the budget goes."""

from __future__ import annotations

from dataclasses import dataclass

from dynajax.engine.hosts import Host
from dynajax.engine.prediction import NONE, Prediction
from dynajax.programs import Programs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A host mode with its programs, and what the budget holds besides the pool."""

    mode: str
    host: Host | None
    programs: Programs
    temporaries: int  # bytes, of the program that needs most
    fixed: dict[str, int]
    budget_bytes: int
    pool_bytes: int  # what is left
    unlimited: bool  # the budget is whatever is needed
    gpu: bool
    prediction: Prediction = NONE  # by which resident neurons are skipped
