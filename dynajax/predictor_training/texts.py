"""Samples of a text: where a predictor's tokens come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynajax.errors import UsageError
from dynajax.text import load_tokenizer

Ids = npt.NDArray[np.int32]
PIECE = 2**16  # characters encoded at a time


class Text(NamedTuple):
    """What a model is to read."""

    windows: list[Ids]  # token ids, each a text of its own
    source: str  # where they are from, in words


def encode_texts(texts: Iterable[str], folder: Path) -> list[Ids]:
    """Token ids of each text, by the tokenizer of the model in `folder`."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer: give --ids instead of --text")
    found = []
    for text in texts:
        pieces = [tokenizer.encode(text[at : at + PIECE], special=at == 0) for at in range(0, len(text), PIECE)]
        found.append(np.concatenate([np.zeros(0, np.int32), *(np.array(ids, np.int32) for ids in pieces)]))
    return found


def samples_of(streams: Sequence[Ids], tokens: int, length: int, seed: int) -> list[Ids]:
    """Windows of the streams in random order, in which an engine sees `tokens` tokens, or all if there are fewer.

    A window of n ids shows n - 1 tokens, n at most `length` + 1.
    """
    pieces = [stream[at : at + length + 1] for stream in streams for at in range(0, len(stream), length + 1)]
    windows = [piece for piece in pieces if len(piece) > 1]
    chosen, left = [], tokens
    for number in np.random.default_rng(seed).permutation(len(windows)):
        if left < 1:
            break
        window = windows[number][: left + 1]
        chosen.append(window.copy())
        left -= len(window) - 1
    return chosen


def seen_tokens(windows: Sequence[Ids]) -> int:
    """How many tokens an engine sees of them: the last of each is only predicted."""
    return sum(len(window) - 1 for window in windows)


def digest_of(windows: Sequence[Ids]) -> str:
    """Names exactly these windows in this order."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(len(window).to_bytes(8, "little") + window.astype("<i4").tobytes())
    return digest.hexdigest()
