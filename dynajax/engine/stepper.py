"""Prefill and decode steps: embedding, layers, head. How a layer runs is the runner's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.engine.state import DeviceState
from dynajax.engine.weights import DenseWeights
from dynajax.programs import Programs, split_chunks
from dynajax.trace import DECODE, PREFILL

Rows = npt.NDArray[np.float32]  # [B, D] or [T, D]
Piece = tuple[int, int, int]  # of a prompt: start, padded size, tokens
FULL_EVERY = 8  # steps: to look at every array takes up to a tenth of a small model's step, and they stay what they are
OnPart = Callable[[int, int], None]
OnTokens = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32], int], None]  # positions, rows, phase


class Runner(Protocol):
    """Takes hidden states through all layers; `host_mode` chooses the implementation."""

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> object:
        """Prefill `state.xs` through every layer for one row. `on_part(done, total)` between its parts may raise."""

    def rows(
        self,
        state: DeviceState,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        active: npt.NDArray[np.bool_],
    ) -> jax.Array:
        """One token in each row, at its position, through the model -> logits [B, V]."""


class Stepper:
    """Carries sequences forward by a prompt or by a token, and counts the tokens decoded.

    A failed step may have donated buffers it did not give back: call `reset_state` before the next.
    """

    def __init__(self, programs: Programs, weights: DenseWeights, runner: Runner, on_full: Callable[[], object]):
        self._programs, self.weights, self._runner = programs, weights, runner
        self._on_full = on_full  # called where memory is at its fullest
        self._state = DeviceState(programs.shapes)
        self.steps = 0
        self.rows = 0
        self.on_tokens: OnTokens | None = None  # told what runs next

    def reset_state(self) -> None:
        """Fresh caches and workspace; the old ones go first, the budget holds one set."""
        self._state.free()
        self._state = DeviceState(self._programs.shapes)

    def reset_counters(self) -> None:
        """Start counting a new generation."""
        self.steps = self.rows = 0
        self._state.tally = jnp.zeros_like(self._state.tally)

    def prefill(self, row: int, ids: Sequence[int], on_part: OnPart) -> None:
        """Keys and values of a prompt's tokens (at least one), at positions 0.. of one row; `on_part`: see `Runner`."""
        if self.on_tokens is not None:
            self.on_tokens(np.arange(len(ids), dtype=np.int32), np.full(len(ids), row, np.int32), PREFILL)
        self._runner.prompt(self._state, row, self.embed(ids), on_part)
        self._state.xs.block_until_ready()

    def embed(self, ids: Sequence[int]) -> list[Piece]:
        """The workspace with the embeddings of ids, and the pieces in which they go through the layers."""
        pieces, start, shapes = [], 0, self._programs.shapes
        for size, count in split_chunks(len(ids), shapes.chunks, shapes.ctx, shapes.most_padding):
            pieces.append((start, size, count))
            start += count
        self._embed_prompt(ids, pieces)
        return pieces

    @property
    def state(self) -> DeviceState:
        """Caches and workspace, for who carries a prompt through the layers himself."""
        return self._state

    def step(
        self,
        ids: npt.NDArray[np.int32],  # [B]
        positions: npt.NDArray[np.int32],  # [B] where each id sits
        active: npt.NDArray[np.bool_],  # [B] rows that count; the others compute and are ignored
    ) -> npt.NDArray[np.float32]:
        """One token in each row -> logits [B, V]."""
        if self.on_tokens is not None:
            self.on_tokens(positions[active], np.flatnonzero(active).astype(np.int32), DECODE)
        logits = np.asarray(self._runner.rows(self._state, ids, positions, active))
        if self.steps % FULL_EVERY == 0:
            self._on_full()
        self.steps += 1
        self.rows += int(active.sum())
        return logits

    def live_slots(self) -> npt.NDArray[np.int64]:
        """Live slots of every layer [L], summed over the rows decoded since the counters were reset."""
        return np.asarray(self._state.tally).astype(np.int64)

    def _embed_prompt(self, ids: Sequence[int], pieces: list[Piece]) -> None:
        state, programs, weights = self._state, self._programs, self.weights
        padded = np.zeros(programs.shapes.ctx, np.int32)
        padded[: len(ids)] = ids
        if weights.tables:
            state.xs = programs.get("embed_prompt")(weights.tables, state.xs, padded)
            return
        for start, size, _ in pieces:
            rows = weights.lookup(padded[start : start + size], np.arange(start, start + size, dtype=np.int32))
            state.xs = programs.get("load_chunk", size)(state.xs, rows, np.int32(start))
