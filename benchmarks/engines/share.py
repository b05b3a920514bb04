"""This engine as a child of `benchmarks.overheads`, with a share of its units on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynajax.benching.probe import facts
from dynajax.benching.session import open_session
from dynajax.benching.worker import Opened, serve
from dynajax.budget import unit_bytes
from dynajax.config import EngineConfig
from dynajax.engine.planning import foresee


def open_share(settings: dict[str, Any]) -> Opened:
    """settings: `model`, fields of EngineConfig, and `share` of the units: 0 none, 1 all, else by a budget for it."""
    model, share = settings.pop("model"), settings.pop("share")
    if share == 0:
        settings["policy"] = "none"
    elif share < 1:
        bare = foresee(model, EngineConfig(**settings, policy="none"))
        memory, unit = bare.memory, unit_bytes(bare.spec, bare.programs.shapes.dtype)
        settings["vram_budget"] = memory.smallest_budget_bytes + int(share * memory.units_total) * unit
        settings["host_mode"] = bare.host_mode  # what auto would find, after trying to hold all units
    opened = open_session({"model": model, **settings})
    return replace(opened, row=opened.row | {"on": facts()})


if __name__ == "__main__":
    serve(open_share)
