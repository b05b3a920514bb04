"""Models to run the engine with, and budgets that hold a chosen share of their neurons. Loads no weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import dynajax
from dynajax import testing
from dynajax.budget import smallest_budget
from dynajax.config import EngineConfig
from dynajax.engine import plan_for

ALIAS = "tiny-relullama"
ASSETS = Path(dynajax.__file__).parent / "assets" / ALIAS
STAND_IN = replace(testing.TINY, layers=4, hidden=128, ffn=512, heads=4, kv_heads=2, head_dim=32, vocab=512)
CTX = 256
SHARES = {"smallest": 0.0, "two_fifths": 0.4, "everything": 1.0}  # of the neurons, on the device


@contextmanager
def tiny_model() -> Generator[str]:
    """The shipped model if its weights are there, else a random one that lives as long as the context."""
    if (ASSETS / "model.safetensors").is_file():
        yield ALIAS
        return
    with TemporaryDirectory() as folder:
        yield str(testing.make_checkpoint(Path(folder), STAND_IN))


def budgets(model: str, dtype: str) -> dict[str, int]:
    """Bytes that hold each of SHARES of the neurons on this device, margin included, if nothing is predicted."""
    config = EngineConfig(dtype=dtype, ctx=CTX, stats="none", predictor="none")
    plan = plan_for(model, replace(config, policy="static"))
    fixed = plan_for(model, replace(config, policy="none")).plan_bytes
    everything = plan.pool * plan.units_total // plan.units_resident
    return {
        name: smallest_budget(fixed + ceil(share * everything), gpu=plan.margin > 0) for name, share in SHARES.items()
    }
