"""Tiny mixtures of every family, written once a run, what they must compute, and engines that hold a share of them."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from dynajax import Engine
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.testing import make_moe
from dynajax.testing.mixtures import MIXTURES
from dynajax.testing.oracle import family_logits

CTX = 144
TOKENS = np.random.default_rng(7).integers(0, 90, 131)
SEED = 3
FAMILIES = tuple(MIXTURES)


class Zoo:
    """Folders and expected logits, made when they are asked for."""

    def __init__(self, root: Path):
        self._root = root
        self._logits: dict[tuple, np.ndarray] = {}

    def folder(self, family: str, seed: int = SEED, **changes) -> Path:
        path = self._root / "-".join([family, str(seed), *(f"{k}={v}" for k, v in changes.items())])
        if not path.exists():
            make_moe(path, family, seed=seed, **changes)
        return path

    def logits(self, family: str, seed: int = SEED, **changes) -> np.ndarray:
        """[T, V] of TOKENS, in float64."""
        key = (family, seed, *changes.items())
        if key not in self._logits:
            self._logits[key] = family_logits(self.folder(family, seed, **changes), TOKENS)
        return self._logits[key]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@contextlib.contextmanager
def opened(folder: Path, share: float, **settings):
    """The open engine's parts, with that share of the experts on the device; 1: resident."""
    settings = {"ctx": CTX, **settings}
    if share < 1:
        plan = plan_for(str(folder), EngineConfig(**{"vram_budget": "64GiB", "policy": "none", **settings}))
        unit = folder_unit_bytes(folder)
        settings["vram_budget"] = plan.smallest_budget_bytes + int(share * plan.units_total) * unit
    with Engine.from_pretrained(str(folder), **settings) as engine:
        parts = engine._parts
        memory = parts.prepared.memory
        assert memory.units_resident <= share * memory.units_total + 1e-9
        layers = len(parts.prepared.spec.unit_layers)
        places = layers if settings.get("policy") == "layer-split" else memory.units_total  # what is placed as one
        assert share * places < 1 or memory.units_resident > 0
        yield parts


def folder_unit_bytes(folder: Path) -> int:
    """Device bytes of one expert in float32."""
    from dynajax.budget import unit_bytes
    from dynajax.checkpoint import read_spec

    return unit_bytes(read_spec(folder), "float32")


def logits_at(parts, position: int, row: int = 0) -> np.ndarray:
    """A prompt up to a position, and a step there."""
    rows = parts.config.batch
    ids, at = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    ids[row], at[row] = TOKENS[position], position
    if position:
        parts.stepper.prefill(row, TOKENS[:position].tolist(), lambda done, total: None)
    parts.reset_counters()
    return parts.stepper.step(ids, at, np.arange(rows) == row)[row]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
