"""This engine as a child of `benchmarks.overheads`, with a share of its units on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynajax.benching.probe import facts
from dynajax.benching.session import open_session
from dynajax.benching.worker import Opened, serve
from dynajax.config import EngineConfig
from dynajax.engine import plan_for


def open_share(settings: dict[str, Any]) -> Opened:
    """settings: `model`, fields of EngineConfig, and `share` of the units: 0 none, 1 all, else by a budget for it."""
    model, share = settings.pop("model"), settings.pop("share")
    if share == 0:
        settings["policy"] = "none"
    elif share < 1:
        plan = plan_for(model, EngineConfig(**settings))
        settings["vram_budget"] = plan.smallest_budget_bytes + int(share * plan.pool)
    opened = open_session({"model": model, **settings})
    return replace(opened, row=opened.row | {"on": facts()})


if __name__ == "__main__":
    serve(open_share)
