"""From counters and clocks to the figures of a Result."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal

from dynajax.engine.continuation import Continuation
from dynajax.engine.figures import units_of
from dynajax.engine.opening import Parts
from dynajax.engine.result import Result, Timings, ratio


class Phases:
    """Seconds of prefill and decoding, less what was spent compiling; the reader of a stream is not timed."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self.prefill_s = self.decode_s = 0.0

    @contextmanager
    def clock(self, name: Literal["prefill_s", "decode_s"]) -> Generator[None]:
        """Add the time inside the block to one of the two."""
        programs = self._parts.prepared.programs
        start, compiled = time.perf_counter(), programs.compile_s
        try:
            yield
        finally:
            spent = time.perf_counter() - start - (programs.compile_s - compiled)
            setattr(self, name, getattr(self, name) + spent)


def make_results(parts: Parts, rows: Sequence[Continuation], phases: Phases) -> list[Result]:
    """A result for each row; figures of time, units and memory are of the whole batch."""
    prefilled = sum(len(row.prefilled) for row in rows)
    return [_make_result(parts, row, phases, prefilled) for row in rows]


def _make_result(parts: Parts, row: Continuation, phases: Phases, prefilled: int) -> Result:
    prepared, counters = parts.prepared, parts.cold.counters
    hot_s = parts.runner.hot_s(parts.stepper.steps)
    return Result(
        model=prepared.model,
        model_path=str(prepared.folder),
        text=row.text,
        token_ids=tuple(row.token_ids),
        prompt_tokens=len(row.given),
        finish_reason=row.finish_reason or "cancelled",
        seed=row.seed,
        sparsity=prepared.strategy.sparsity,
        policy=parts.policy,
        predictor=parts.predictor,
        timings=Timings(
            load_s=parts.load_s,
            compile_s=prepared.programs.compile_s,
            prefill_s=phases.prefill_s,
            decode_s=phases.decode_s,
            prefill_tok_s=ratio(prefilled, phases.prefill_s) if prefilled else None,
            decode_tok_s=ratio(parts.stepper.rows, phases.decode_s) if parts.stepper.rows else None,
        ),
        units=units_of(parts),
        ffn={
            "hot_s": hot_s,
            "cold_s": counters.seconds,
            "cold_share": None if hot_s is None else ratio(counters.seconds, hot_s + counters.seconds),
        },
        memory=parts.memory_figures(),
        host={"bytes_read": counters.bytes_read, "gb_s": ratio(counters.bytes_read / 1e9, counters.seconds)},
    )
