"""Tokenizer of a model folder, and text that can be shown while it is still being made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import DecodeStream

from dynajax.checkpoint.gguf_header import is_gguf, read_header
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.sentencepiece_file import read_pieces
from dynajax.checkpoint.wording import located, quoted
from dynajax.errors import ModelError
from dynajax.vocabulary import from_gguf, from_pieces

JSON_NAME, PIECES_NAME = "tokenizer.json", "tokenizer.model"
CONFIG_NAME, ADDED_NAME = "tokenizer_config.json", "added_tokens.json"
CONFIG_BYTES = 2**22  # the largest tokenizer_config.json read
LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast")


class Tokenizer:
    """A thin face of the `tokenizers` library: text to ids and back."""

    def __init__(self, inner: HfTokenizer, *, front: str = ""):
        """front: put before a text that does not begin with a special token."""
        self._inner, self._front = inner, front
        self._ids = frozenset(inner.get_vocab(with_added_tokens=True).values())
        added = inner.get_added_tokens_decoder().values() if front else ()
        self._marks = tuple(token.content for token in added if token.special)

    @property
    def size(self) -> int:
        """The largest id a token has, plus one."""
        return max(self._ids, default=-1) + 1

    def has_id(self, token: int) -> bool:
        """Whether a token has this id; models pad their vocabulary with rows that none has."""
        return token in self._ids

    def known_ids(self, vocab: int) -> npt.NDArray[np.bool_]:
        """`has_id` for every id below `vocab` [V]."""
        known = np.zeros(vocab, np.bool_)
        known[[token for token in self._ids if token < vocab]] = True
        return known

    def token_text(self, token: int) -> str | None:
        """The token as the vocabulary spells it, "</s>" for one; None if there is none."""
        return self._inner.id_to_token(token) if self.has_id(token) else None

    def to_json(self) -> str:
        """What tokenizer.json holds. What `front` puts before a text is not in it."""
        assert not self._front
        return self._inner.to_str(pretty=False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text, in which special tokens may be written out.

        special: with those that the tokenizer itself puts around a text; without for text that has them, as a
        rendered chat does.
        """
        if self._front and text and not text.startswith(self._marks):
            text = self._front + text
        return self._inner.encode(text, add_special_tokens=special).ids

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


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a model folder or in a GGUF file, or None if it has none (ids in, ids out).

    A folder's tokenizer.json goes before its tokenizer.model.
    """
    if is_gguf(path):
        metadata = read_header(path).metadata
        return Tokenizer(from_gguf(metadata)) if "tokenizer.ggml.model" in metadata else None
    if (path / JSON_NAME).exists():
        return _from_json(path / JSON_NAME)
    if (path / PIECES_NAME).exists():
        return _from_sentencepiece(path)
    return None


def _from_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer(HfTokenizer.from_file(str(path)))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer this version reads: {error}") from error


def _from_sentencepiece(folder: Path) -> Tokenizer:
    """A folder's tokenizer.model, under the settings of tokenizer_config.json and llama's own where it is silent.

    With `legacy`, as old programs had it, a space is put after special tokens too and not only before the text.
    """
    config = read_json(folder / CONFIG_NAME, CONFIG_BYTES) if (folder / CONFIG_NAME).exists() else {}
    name = config.get("tokenizer_class", LLAMA_CLASSES[0])
    if name not in LLAMA_CLASSES:
        raise ModelError(
            f"{located(folder)}: {PIECES_NAME} of the class {quoted(name)} is not supported, only of "
            f"{', '.join(LLAMA_CLASSES)}: save the tokenizer as {JSON_NAME} with transformers"
        )
    pieces = read_pieces(folder / PIECES_NAME)
    prefixed = pieces.dummy_prefix and _flag(config, "add_prefix_space", default=True)
    everywhere = prefixed and (pieces.remove_extra_spaces or _flag(config, "legacy", default=False))
    try:
        inner = from_pieces(
            pieces,
            prefix=everywhere,
            bos=_flag(config, "add_bos_token", default=True),
            eos=_flag(config, "add_eos_token", default=False),
            added=_added(folder, config, pieces.texts),
        )
    except ModelError as error:
        raise ModelError(f"{located(folder / PIECES_NAME)}: {error}") from error
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{located(folder / PIECES_NAME)} is not a tokenizer this version reads: {error}") from error
    return Tokenizer(inner, front=" " if prefixed and not everywhere else "")


def _flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return default if value is None else value
    raise ModelError(f"{CONFIG_NAME}: {name} must be true or false, got {quoted(value)}")


def _added(folder: Path, config: Mapping[str, Any], texts: Sequence[str]) -> list[AddedToken]:
    """Tokens that the folder adds to the pieces or marks among them, by id; ids must go on without a gap."""
    listed: dict[int, AddedToken] = {}
    if (folder / ADDED_NAME).exists():
        for text, index in read_json(folder / ADDED_NAME, CONFIG_BYTES).items():
            if isinstance(index, int) and not isinstance(index, bool):
                listed[index] = AddedToken(text, normalized=False, special=False)
    table = config.get("added_tokens_decoder")
    for key, entry in (table if isinstance(table, dict) else {}).items():
        if not key.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelError(f"{CONFIG_NAME}: added_tokens_decoder holds {quoted({key: entry})}")
        flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "special")}
        listed[int(key)] = AddedToken(entry["content"], normalized=False, **flags)
    spelled = {index: token for index, token in listed.items() if index < len(texts)}
    wrong = [token.content for index, token in spelled.items() if texts[index] != token.content]
    beyond = sorted(index for index in listed if index >= len(texts))
    if wrong or beyond != list(range(len(texts), len(texts) + len(beyond))):
        where = f"{CONFIG_NAME} and {ADDED_NAME}"
        raise ModelError(f"{where} do not fit the {len(texts)} pieces: {quoted(wrong or beyond)}")
    return [*spelled.values(), *(listed[index] for index in beyond)]
