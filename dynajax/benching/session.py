"""The engine as a child process that runs rounds."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from dynajax.benching.worker import Logits, Opened, serve
from dynajax.budget import dense_bytes, kv_bytes, unit_bytes
from dynajax.config import EngineConfig
from dynajax.engine.figures import units_of
from dynajax.engine.opening import Parts, open_parts


class OwnSession:
    """Drives the stepper, as the engine does; sampling is the caller's argmax."""

    def __init__(self, parts: Parts):
        self._parts, self._position, self._begin = parts, 0, 0
        self._active = np.ones(parts.config.batch, np.bool_)
        self._held = self._memory()

    def prefill(self, prompts: list[list[int]]) -> Logits:
        """All but the last tokens as prompts, and a first step with those."""
        parts, last = self._parts, len(prompts[0]) - 1
        for row, ids in enumerate(prompts):
            parts.stepper.prefill(row, ids[:-1], lambda done, total: None)
        self._position = last
        return self.step([ids[-1] for ids in prompts]).copy()  # the device's own array would count as held

    def begin_steps(self) -> None:
        """See Session."""
        self._parts.reset_counters()
        self._begin = self._position
        self._held = self._memory()

    def step(self, ids: list[int]) -> Logits:
        """One token more in every row."""
        positions = np.full(len(ids), self._position, np.int32)
        self._position += 1
        return self._parts.stepper.step(np.array(ids, np.int32), positions, self._active)

    def facts(self) -> dict[str, Any]:
        """Compilation so far, where live units were, the bytes that a step cannot do without, and those of the device
        that decoding took more than it found: in use now, or at the peak."""
        grown = max(now - before for now, before in zip(self._memory(), self._held, strict=True))
        units = units_of(self._parts)
        return {
            "compile_s": self._parts.prepared.programs.compile_s,
            "hot_share": units.hot_share,
            "floor_bytes": self._floor_bytes(units.density),
            "density": units.density,
            "migrated_bytes": units.migrated_bytes,
            "policy": self._parts.policy,
            "memory": self._parts.memory_figures(),
            "grown_bytes": max(0, grown),
        }

    def _memory(self) -> tuple[int, int]:
        """Bytes of the device in use, and the peak so far."""
        meter = self._parts.meter
        return meter.in_use(), meter.peak_bytes(self._parts.prepared.programs.max_temp_bytes)

    def _floor_bytes(self, density: float | None) -> float | None:
        """Dense part, keys and values, and of the units what their kind of skipping must read.

        dense: all. exact: every first part, the others of live units. predicted: the units that were let through, and
        the predictors. Experts: those that a token goes to. None where that is not known: with several rows, which
        share what they read, and on a device with a memory of its own, for which no bandwidth is measured.
        """
        parts = self._parts
        prepared, batch = parts.prepared, parts.config.batch
        spec, shapes, sparsity = prepared.spec, prepared.programs.shapes, prepared.strategy.sparsity
        resident, total = sum(parts.pool.slots), len(spec.unit_layers) * spec.units
        whole = resident * unit_bytes(spec, shapes.dtype) + (total - resident) * unit_bytes(spec, prepared.host_dtype)
        cached = kv_bytes(spec, shapes.kv_name, (self._begin + self._position) // 2, batch)
        fixed = dense_bytes(spec, shapes.dtype) + cached
        if jax.default_backend() != "cpu":
            return None
        if sparsity == "dense" and spec.experts is None:
            return fixed + whole
        if density is None or batch > 1:
            return None
        if spec.experts is not None:
            return fixed + whole * density
        if sparsity == "exact":
            return fixed + whole * (1 + (spec.ffn_parts - 1) * density) / spec.ffn_parts
        return fixed + whole * density + prepared.prediction.read_bytes(spec)


def open_session(settings: dict[str, Any]) -> Opened:
    """settings: `model`, and the fields of EngineConfig."""
    begin = time.perf_counter()
    model = settings.pop("model")
    parts = open_parts(model, EngineConfig(**settings), lambda stage, done, total: None, lambda plan: None)
    compile_s, prepared = parts.prepared.programs.compile_s, parts.prepared
    row = {
        "policy": parts.policy,
        "sparsity": prepared.strategy.sparsity,
        "dtype": prepared.programs.shapes.dtype,
        "host_dtype": None if prepared.host_mode == "resident" else prepared.host_dtype,
        "budget_bytes": prepared.memory.budget_bytes,
        "host_mode": prepared.host_mode,
    }
    return Opened(session=OwnSession(parts), load_s=time.perf_counter() - begin - compile_s, row=row)


if __name__ == "__main__":
    serve(open_session)
