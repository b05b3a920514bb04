"""One sequence of a generation: its sampler, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dynajax.engine.result import Event, FinishReason
from dynajax.sampling import Sampler, SamplingParams
from dynajax.text import StopFilter, Tokenizer


class Continuation:
    """Grows by a token at a time and turns each into an Event."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        limit: int,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        known: npt.NDArray[np.bool_] | None = None,  # [V] ids that the tokenizer has
        advice: Mapping[str, Any] | None = None,  # generation_config.json
    ):
        self.prompt = tuple(prompt)
        self.source: tuple[int, ...] | None = None  # what an encoder reads; the prompt is what the decoder starts with
        self.seed = seed
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = "length" if limit == 0 else None
        self._limit = limit
        self._eos = frozenset(() if params.ignore_eos else eos_ids)
        self._sampler = Sampler(params.rules(advice), seed, np.asarray(prompt, np.int32), known)
        self._stream = tokenizer.stream(prompt) if tokenizer else None
        self._stops = StopFilter(params.stop)
        self._texts: list[str] = []

    @classmethod
    def behind(cls, source: Sequence[int], start_id: int, params: SamplingParams, seed: int, **rest: Any) -> Self:
        """Of what an encoder reads; rest: as `Continuation`."""
        made = cls((start_id,), params, seed, **rest)
        made.source = tuple(source)
        return made

    @property
    def text(self) -> str | None:
        """All text so far that is certain and may be shown; None without a tokenizer."""
        return None if self._stream is None else "".join(self._texts)

    @property
    def prefilled(self) -> tuple[int, ...]:
        """The tokens that go through the model before the first step: all that was given but the last, which is the
        step's own; everything, where an encoder reads it."""
        return self.prompt[:-1] if self.source is None else self.source

    @property
    def given(self) -> tuple[int, ...]:
        """The tokens that the user gave."""
        return self.prompt if self.source is None else self.source

    @property
    def next_id(self) -> int:
        """The token the next step is fed."""
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def position(self) -> int:
        """Where `next_id` sits."""
        return len(self.prompt) + len(self.token_ids) - 1

    def push(self, logits: npt.NDArray[np.float32]) -> Event:
        """Choose the next token from logits [V] and take note of it."""
        token = self._sampler(logits)
        self.token_ids.append(token)
        ended, stopped, text = token in self._eos, False, ""
        if self._stream and not ended:
            text, stopped = self._stops.push(self._stream.push(token))
        if ended or stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._limit:
            self.finish_reason = "length"
        if self.finish_reason and not stopped:
            text += self._flush()
        self._texts.append(text)
        return Event(text, token, len(self.token_ids) - 1, self.finish_reason)

    def cancel(self) -> None:
        """End here, keeping what there is."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self._texts.append(self._flush())

    def _flush(self) -> str:
        rest, stopped = self._stops.push(self._stream.flush()) if self._stream else ("", False)
        return rest if stopped else rest + self._stops.flush()
