"""Vocabularies of other formats -> a tokenizer of the `tokenizers` library: SentencePiece models and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dynajax.checkpoint.sentencepiece_file import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, Pieces
from dynajax.checkpoint.wording import plain, quoted
from dynajax.errors import ModelError

SPACE = "▁"  # how SentencePiece writes a space
LONGEST_PIECE = 1024  # characters of a piece that is looked at for merges
MODEL_KEY, PRE_KEY = "tokenizer.ggml.model", "tokenizer.ggml.pre"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitter:
    """How a byte-level vocabulary cuts text into words before merging: patterns, one after the other."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_bos: bool = False
    nfc: bool = False


_LLAMA3_SPLITTER = Splitter((_LLAMA3,), whole_words=True, adds_bos=True)
_SINGLE_DIGITS = Splitter((r"\p{N}", _GPT2))
SPLITTERS: dict[str, Splitter] = {
    "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Splitter((_GPT2,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_SPLITTER,
    "llama3": _LLAMA3_SPLITTER,
    "llama-v3": _LLAMA3_SPLITTER,
    "qwen2": Splitter((_LLAMA3.replace("{1,3}", ""),), nfc=True),
}


def from_pieces(pieces: Pieces, *, prefix: bool, bos: bool, eos: bool, added: Sequence[AddedToken] = ()) -> Tokenizer:
    """A SentencePiece vocabulary; its control pieces are special tokens, as other programs have it too.

    prefix: put a space before the text and after every special token. bos, eos: put those tokens around a text.
    added: tokens beyond the vocabulary, in the order of their ids.
    """
    tokenizer = Tokenizer(_bpe(pieces) if pieces.kind == "bpe" else _unigram(pieces))
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.remove_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    shown = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(shown + ([decoders.Strip(" ", 1, 0)] if pieces.dummy_prefix else []))
    add_tokens(tokenizer, _marked(pieces.texts, pieces.types))
    add_tokens(tokenizer, added)
    around = (pieces.bos_id if bos else None, pieces.eos_id if eos else None)
    _frame(tokenizer, *(None if i is None else pieces.texts[i] for i in around))
    return tokenizer


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer inside a GGUF file. ModelError names a kind that is not supported."""
    kind = metadata.get(MODEL_KEY)
    builders: dict[Any, Callable[[Mapping[str, Any]], Tokenizer]] = {"llama": _gguf_pieces, "gpt2": _gguf_bytes}
    if not isinstance(kind, str) or kind not in builders:
        raise ModelError(f"{MODEL_KEY} {quoted(kind)} is not supported: this version reads {', '.join(builders)}")
    try:
        return builders[kind](metadata)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the tokenizer in the GGUF file is damaged: {plain(str(error))}") from error


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add in this order: those that the vocabulary has keep their ids, others get the next free ones."""
    for special, group in groupby(tokens, key=lambda token: token.special):
        if special:
            tokenizer.add_special_tokens(list(group))
        else:
            tokenizer.add_tokens(list(group))


def _bpe(pieces: Pieces) -> models.BPE:
    vocab = _vocab(pieces.texts)
    unknown = pieces.texts[pieces.unknown_id]
    fallback = BYTE in pieces.types
    return models.BPE(vocab, _merges(pieces, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=fallback)


def _unigram(pieces: Pieces) -> models.Unigram:
    _vocab(pieces.texts)
    scored = list(zip(pieces.texts, pieces.scores, strict=True))
    return models.Unigram(scored, unk_id=pieces.unknown_id, byte_fallback=BYTE in pieces.types)


def _vocab(texts: Sequence[str]) -> dict[str, int]:
    """Token -> id."""
    vocab = {text: index for index, text in enumerate(texts)}
    if len(vocab) != len(texts):
        raise ModelError(f"the vocabulary has {len(texts) - len(vocab)} tokens twice")
    return vocab


def _merges(pieces: Pieces, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others. SentencePiece joins what gives the best score, so that order."""
    found = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True):
        if kind != NORMAL:
            continue
        if len(text) > LONGEST_PIECE:
            raise ModelError(f"a piece of the vocabulary has {len(text)} characters, {LONGEST_PIECE} are allowed")
        for cut in range(1, len(text)):
            left, right = vocab.get(text[:cut]), vocab.get(text[cut:])
            if left is not None and right is not None and pieces.types[left] == pieces.types[right] == NORMAL:
                found.append((-score, left, right))
    return [(pieces.texts[left], pieces.texts[right]) for _, left, right in sorted(found)]


def _marked(texts: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Control tokens, which are special, and user-defined ones, which are text that is never cut."""
    return [
        AddedToken(text, normalized=False, special=kind == CONTROL)
        for text, kind in zip(texts, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _frame(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put the given special tokens around every text."""
    around = [token for token in (bos, eos) if token is not None]
    if around:
        single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _gguf_pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    texts, types = _gguf_tokens(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(texts):
        raise ModelError("tokenizer.ggml.scores must have a number for every token")
    prefix = _flag(metadata, "add_space_prefix", default=True)
    pieces = Pieces(
        texts=texts,
        scores=scores[: len(texts)].tolist(),
        types=types,
        kind="bpe",
        dummy_prefix=prefix,
        unknown_id=_id(metadata, "unknown", len(texts)) or 0,
        bos_id=_id(metadata, "bos", len(texts)),
        eos_id=_id(metadata, "eos", len(texts)),
    )
    bos, eos = (_flag(metadata, f"add_{name}_token", default=name == "bos") for name in ("bos", "eos"))
    return from_pieces(pieces, prefix=prefix, bos=bos, eos=eos)


def _gguf_bytes(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get(PRE_KEY, "default")
    if pre not in SPLITTERS:
        raise ModelError(f"{PRE_KEY} {quoted(pre)} is not supported: this version reads {', '.join(SPLITTERS)}")
    splitter = SPLITTERS[pre]
    texts, types = _gguf_tokens(metadata)
    lines = metadata.get("tokenizer.ggml.merges")
    merges = [tuple(line.split(" ")) for line in lines] if isinstance(lines, list) else None
    if merges is None or any(len(pair) != 2 for pair in merges):
        raise ModelError("tokenizer.ggml.merges must be a list of pairs")
    pairs = [(left, right) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(_vocab(texts), pairs, ignore_merges=splitter.whole_words))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitter.patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, _marked(texts, types))
    ids = [
        _id(metadata, name, len(texts))
        if _flag(metadata, f"add_{name}_token", default=name == "bos" and splitter.adds_bos)
        else None
        for name in ("bos", "eos")
    ]
    _frame(tokenizer, *(None if i is None else texts[i] for i in ids))
    return tokenizer


def _gguf_tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types, without the unused ones at the end that only fill the embedding."""
    texts, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(texts, list) or not texts:
        raise ModelError("tokenizer.ggml.tokens must be a list of tokens")
    kinds = [NORMAL] * len(texts) if types is None else types.tolist() if isinstance(types, np.ndarray) else []
    if len(kinds) != len(texts):
        raise ModelError(f"tokenizer.ggml.token_type must have {len(texts)} entries, got {len(kinds)}")
    count = len(texts)
    while count > 1 and kinds[count - 1] == UNUSED:
        count -= 1
    return texts[:count], kinds[:count]


def _flag(metadata: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, bool) else default


def _id(metadata: Mapping[str, Any], role: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count:
        return value
    return None
