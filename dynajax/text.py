"""Tokenizer of a model folder, and text that can be shown while it is still being made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from dynajax.errors import ModelError


class Tokenizer:
    """A thin face of the `tokenizers` library: text to ids and back."""

    def __init__(self, inner: HfTokenizer):
        self._inner = inner

    @property
    def size(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids with the special tokens that the tokenizer itself adds."""
        return self._inner.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; an unfinished character becomes U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        return TextStream(self._inner, prompt)


class TextStream:
    """Text of a growing sequence, one id at a time; a character is shown when its last byte is there."""

    def __init__(self, inner: HfTokenizer, prompt: Sequence[int]):
        self._inner = inner
        whole = self._whole_characters(prompt)
        self._stream = DecodeStream(list(prompt[:whole]), skip_special_tokens=True)
        self._pending: list[int] = []
        for token in prompt[whole:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that became certain with this token, possibly none."""
        text = self._stream.step(self._inner, token)
        self._pending = [*self._pending, token] if text is None else []
        return text or ""

    def _whole_characters(self, prompt: Sequence[int]) -> int:
        """Length of the longest start of the prompt that does not end inside a character (of at most 4 bytes)."""
        ends = range(len(prompt), max(0, len(prompt) - 4), -1)
        texts = ((end, self._inner.decode(list(prompt[:end]), skip_special_tokens=True)) for end in ends)
        return next((end for end, text in texts if not text.endswith("\ufffd")), 0)

    def flush(self) -> str:
        """What is left at the end: an unfinished character as U+FFFD."""
        rest = self._inner.decode(self._pending, skip_special_tokens=True) if self._pending else ""
        self._pending = []
        return rest


class StopFilter:
    """Holds text back while it could still become a stop string; a stop string itself is never shown."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """-> (text to show now, whether a stop string was completed)."""
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once nothing can follow."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder, or None if it has none (ids in, ids out)."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer(HfTokenizer.from_file(str(path)))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer this version reads: {error}") from error
