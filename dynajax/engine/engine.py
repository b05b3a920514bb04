"""The engine: opens a model inside a budget, generates, and says what it did."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np

from dynajax.budget import MemoryPlan
from dynajax.chat import chat_ids
from dynajax.config import EngineConfig
from dynajax.engine import seeing
from dynajax.engine.continuation import Continuation
from dynajax.engine.failures import translated_errors
from dynajax.engine.figures import layers_of
from dynajax.engine.masked import Source
from dynajax.engine.observing import Observe, Seen
from dynajax.engine.opening import Parts, open_parts
from dynajax.engine.report import Phases, make_results
from dynajax.engine.result import Event, Result
from dynajax.engine.scoring import Scored, score
from dynajax.engine.turn import Turn
from dynajax.errors import EngineError, UsageError
from dynajax.sampling import SamplingParams
from dynajax.timeline import Timeline
from dynajax.trace import Recorder

Progress = Callable[[str, int, int], None]  # stage, done, total
Prompt = str | Sequence[int]
Settings = TypeVar("Settings", EngineConfig, SamplingParams)


class Engine:
    """One model on one device. Calls from several threads take turns; use it as a context manager.

    A row of the batch is a sequence; sequences never influence each other. After an error inside a step the caches
    are made anew and the engine goes on; `close` ends it.
    """

    def __init__(self, parts: Parts):
        self._parts: Parts | None = parts
        self._turn = Turn()
        self._stopped = False  # plain, so that a signal handler may set it at any time
        self._last: list[Result] = []
        self._streams: weakref.WeakSet[Generator[Event]] = weakref.WeakSet()

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        folder: Path | None = None,
        progress: Progress | None = None,
        on_plan: Callable[[MemoryPlan], None] | None = None,
        **settings: Any,
    ) -> Self:
        """Open a model by alias or folder; settings are the fields of EngineConfig.

        `folder`: where the model is, if that was found out already. `on_plan` is called with the memory plan before
        anything is allocated, `progress` with (stage, done, total) of the stages compile, load, place and, later,
        prefill. Raises a DynajaxError (see dynajax.errors) before anything is allocated if the model is damaged, a
        setting is out of range or the budget is too small.
        """
        config = _record(EngineConfig, settings)
        with translated_errors():
            return cls(open_parts(model, config, progress or _silent, on_plan or (lambda plan: None), folder))

    @property
    def last_result(self) -> Result:
        """The result of the newest stream or generation, also of one that was stopped."""
        if not self._last:
            raise UsageError("nothing was generated yet: call generate or stream first")
        return self._last[0]

    def generate(self, prompt: Prompt | list[Prompt], **settings: Any) -> Result | list[Result]:
        """Continue a prompt (text or token ids), or several side by side (a list of prompts gives a list).

        Settings are the fields of SamplingParams. Row r of a batch is seeded with seed + r.
        """
        params = _record(SamplingParams, settings)
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int | np.integer)
        prompts = cast("list[Prompt]", prompt if several else [prompt])
        seed, results = _seed(params), []
        with self._turn:
            self._stopped = False
            parts = self._open_parts()
            rows = [self._continuation(p, params, seed + r) for r, p in enumerate(prompts)]  # all checked first
            for first in range(0, len(rows), parts.config.batch):
                for _ in self._run(parts, rows[first : first + parts.config.batch]):
                    pass
                results += self._last
            self._last = results
        return results if several else results[0]

    def stream(self, prompt: Prompt, **settings: Any) -> Generator[Event]:
        """The same, one Event a token. Closing the iterator early stops the generation; see `last_result`.

        The engine is taken from the first token asked for to the end of the iterator: another call in this thread is
        refused in between, other threads wait.
        """
        params = _record(SamplingParams, settings)
        self._stopped = False
        stream = self._stream(self._continuation(prompt, params, _seed(params)))
        self._streams.add(stream)
        return stream

    def _stream(self, row: Continuation) -> Generator[Event]:
        with self._turn:
            for _, event in self._run(self._open_parts(), [row]):
                yield event

    def score(self, text: Prompt, *, source: Source | None = None, check: bool = False) -> Scored:
        """Log-probabilities of a text's tokens (text or token ids, at most as long as the context).

        In predicted mode every position has its own mask, as it would have while decoding. source: another mask than
        the engine's. check: also count how many live neurons the masks found, at the price of computing all of them.
        """
        with self._turn:
            parts = self._open_parts()
            if parts.prepared.spec.encoder is not None:
                raise UsageError(f"{parts.prepared.model} has an encoder: it writes and does not score what it reads")
            ids, ctx = parts.encode(text), parts.prepared.ctx
            if len(ids) > ctx:
                raise UsageError(f"the text has {len(ids)} tokens, the context {ctx}: shorten it or raise --ctx")
            try:
                with translated_errors():
                    return score(parts, ids, source, check=check)
            except BaseException:
                parts.recover()
                raise

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation ({"role": ..., "content": ...} each) as a prompt, by the model's chat template."""
        parts = self._open_parts()
        if parts.tokenizer is None:
            raise UsageError(f"{parts.prepared.model} has no tokenizer: give token ids")
        return chat_ids(parts.prepared.folder, parts.tokenizer, messages)

    def observe(self, tell: Observe | None) -> None:
        """From now on call tell(layer, hidden [T, D], live [T, F]) for every layer that is computed; None ends it.

        hidden is what the layer's FFN reads, float32; live says which units have an activation that is not zero, on
        both sides. Both are copies; calls come in the order of layers, in the thread that generates. Slower: a step
        runs layer by layer, and every unit's gate twice.
        """
        self.watch(None if tell is None else lambda seen: tell(seen.layer, seen.hidden, seen.live))

    def watch(self, tell: Callable[[Seen], None] | None, *, streams: bool = False, values: bool = False) -> None:
        """`observe` with more to see: streams, what the FFN's norm reads; values, how large each unit's value is.

        values are there only for neurons whose activation has no zeros. With experts, live [T, E] says which ones each
        token goes to; streams and values are not seen.
        """
        with self._turn:
            parts = self._open_parts()
            if parts.recorder is not None:
                raise UsageError("this engine is recorded: end that before observing it, with record(None)")
            seeing.watch(parts, tell, streams=streams, values=values)

    def trace(self, timeline: Timeline | None) -> None:
        """From now on write into the timeline what runs when, on device, host and the way between; None ends it.

        Decoding goes on as it does otherwise; a prompt's chunks wait for each other.
        """
        with self._turn:
            seeing.trace(self._open_parts(), timeline)

    def record(self, recorder: Recorder | None) -> None:
        """From now on tell the recorder which neurons are live in every layer of every token; None ends it.

        Slower: prompts are observed as by `observe`. So is decoding where nothing is planned, and in predicted mode
        every neuron's gate is computed.
        """
        with self._turn:
            seeing.record(self._open_parts(), recorder)

    def stop(self) -> None:
        """End the running generation after its current token; safe from signal handlers and other threads."""
        self._stopped = True

    def stats(self) -> dict[str, Any]:
        """What the engine is and holds: names, how it runs, memory, pool slots by layer, programs compiled."""
        parts = self._open_parts()
        planned = parts.plans or parts.mixture
        return {
            "model": parts.prepared.model,
            "sparsity": parts.prepared.strategy.sparsity,
            "policy": parts.policy,
            "predictor": parts.predictor,
            "staging": None if planned is None else planned.staging,
            "host_mode": parts.prepared.host_mode,
            "memory": parts.memory_figures(),
            "host_bytes_read": parts.cold.counters.bytes_read,
            "unit_kind": "neuron" if parts.prepared.spec.experts is None else "expert",
            "units_per_layer": parts.prepared.spec.units,
            "pool_slots": list(parts.pool.slots),
            "programs": parts.prepared.programs.count,
            "program_kinds": [list(kind) for kind in parts.prepared.programs.kinds],
            "layers": layers_of(parts),
        }

    def close(self) -> None:
        """Check the books and free everything; a stream that this thread left open ends. Closing twice is allowed."""
        if self._turn.mine:
            for stream in list(self._streams):
                stream.close()
        with self._turn:
            parts, self._parts = self._parts, None
            if parts is not None:
                try:
                    seeing.unhook(parts)
                finally:
                    parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open_parts(self) -> Parts:
        if self._parts is None:
            raise EngineError("the engine is closed: open it again with Engine.from_pretrained")
        return self._parts

    def _run(self, parts: Parts, rows: Sequence[Continuation]) -> Generator[tuple[int, Event]]:
        """Carry up to `batch` sequences to their ends; yields (row, event). The caller has the turn.

        After an error inside a step there is no result, and the caches are made anew: a failed program may have taken
        buffers that it did not give back.
        """
        phases, self._last, closed = Phases(parts), [], None
        try:
            with translated_errors():
                try:
                    yield from self._generate(parts, rows, phases)
                except GeneratorExit as left:
                    closed = left
                self._finish(parts, rows, phases)
        except BaseException:
            parts.recover()
            raise
        if closed is not None:
            raise closed

    def _generate(self, parts: Parts, rows: Sequence[Continuation], phases: Phases) -> Generator[tuple[int, Event]]:
        parts.reset_counters()
        if parts.recorder is not None:
            parts.recorder.start()
        with phases.clock("prefill_s"), contextlib.suppress(_Stopped):
            for index, row in enumerate(rows):
                self._prefill(parts, row, index, len(rows))
        parts.reset_counters()
        while any(row.finish_reason is None for row in rows) and not self._stopped:
            with phases.clock("decode_s"):
                events = self._step(parts, rows)
            yield from events

    def _prefill(self, parts: Parts, row: Continuation, index: int, rows: int) -> None:
        """One row's prompt but for its last token; between its parts progress in percent and a look at the flag."""

        def on_part(done: int, total: int) -> None:
            parts.progress("prefill", (100 * (index * total + done)) // (rows * total), 100)
            if self._stopped:
                raise _Stopped

        if row.prefilled:
            parts.stepper.prefill(index, row.prefilled, on_part)
        else:
            on_part(1, 1)  # the only token is the first step's

    def _finish(self, parts: Parts, rows: Sequence[Continuation], phases: Phases) -> None:
        for row in rows:
            row.cancel()
        self._last = make_results(parts, rows, phases)

    def _step(self, parts: Parts, rows: Sequence[Continuation]) -> list[tuple[int, Event]]:
        """One token for every row that goes on."""
        batch = parts.config.batch
        ids, positions = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        active = np.zeros(batch, np.bool_)
        for index, row in enumerate(rows):
            if row.finish_reason is None:
                ids[index], positions[index], active[index] = row.next_id, row.position, True
        logits = parts.stepper.step(ids, positions, active)
        return [(int(index), rows[index].push(logits[index])) for index in np.flatnonzero(active)]

    def _continuation(self, prompt: Prompt, params: SamplingParams, seed: int) -> Continuation:
        parts = self._open_parts()
        ids = parts.encode(prompt)
        ctx = parts.prepared.ctx
        if len(ids) > ctx:
            raise UsageError(f"the prompt has {len(ids)} tokens, the context {ctx}: shorten it or raise --ctx")
        encoder = parts.prepared.spec.encoder
        settings: dict[str, Any] = {
            "eos_ids": parts.prepared.eos_ids,
            "tokenizer": parts.tokenizer,
            "known": parts.known,
            "advice": parts.prepared.advice,
        }
        if encoder is not None:  # what the decoder starts with is not among the new tokens, and both sides have `ctx`
            limit = min(params.max_new_tokens, ctx)
            return Continuation.behind(ids, encoder.start_id, params, seed, limit=limit, **settings)
        return Continuation(ids, params, seed, limit=min(params.max_new_tokens, ctx - len(ids)), **settings)


class _Stopped(Exception):
    """`stop` was called during a prefill."""


def _seed(params: SamplingParams) -> int:
    return secrets.randbelow(2**32) if params.seed is None else params.seed


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


def _record(kind: type[Settings], settings: dict[str, Any]) -> Settings:
    known = [field.name for field in fields(kind)]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise UsageError(f"unknown setting {unknown[0]!r}: known are {', '.join(known)}")
    stop = settings.get("stop")
    if isinstance(stop, str | list):
        settings = settings | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return kind(**settings)
