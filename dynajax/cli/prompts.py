"""Where a prompt comes from: the command line, stdin, a file of ids, or ids made up for a measurement."""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import numpy.typing as npt

from dynajax.config import ModelSpec
from dynajax.errors import StorageError, UsageError

FILE_BYTES = 2**26
TOPICS = 16
FIRST_TOPIC_ID = 512
STAY_ON_TOPIC = 0.85


def prompt_text(text: str) -> str:
    """The prompt itself, or all of stdin for "-"."""
    if text == "-":
        raw = sys.stdin.buffer.read()
    else:
        raw = text.encode("utf-8", "surrogateescape")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt must be UTF-8, byte {error.start} is not") from error


def prompt_ids(source: str, spec: ModelSpec, seed: int, most: int | None = None) -> npt.NDArray[np.int32]:
    """Token ids [T] of "random:N", "topics:N" or a file; every id is in the model's vocabulary. N is at most `most`,
    by default the model's context.

    topics:N keeps to a topic: an id has the same remainder modulo 16 as the one before with probability 0.85.
    Ids below 512 do not occur.
    """
    made = re.fullmatch(r"(random|topics):(.*)", source)
    if made is None:
        return _checked(_read_ids(source), spec, source)
    kind, count = made.groups()
    bound = f"the model's context {spec.max_positions}" if most is None else f"{most}"
    if not re.fullmatch(r"[0-9]{1,9}", count) or not 1 <= int(count) <= (most or spec.max_positions):
        raise UsageError(f"N in {kind}:N must be between 1 and {bound}, got {count!r}")
    rng = np.random.default_rng(seed)
    if kind == "random":
        return rng.integers(0, spec.vocab, int(count), dtype=np.int32)
    return _topic_ids(int(count), spec.vocab, rng)


def default_ctx(prompt_tokens: int, max_new_tokens: int, max_positions: int) -> int:
    """Prompt and answer, rounded up to 256, at most what the model was made for."""
    return min(-(-(prompt_tokens + max_new_tokens) // 256) * 256, max_positions)


def _topic_ids(count: int, vocab: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    per_topic = (vocab - FIRST_TOPIC_ID) // TOPICS
    if per_topic < 1:
        raise UsageError(f"topics:N needs a vocabulary of {FIRST_TOPIC_ID + TOPICS} or more, the model has {vocab}")
    step = np.where(rng.random(count) < STAY_ON_TOPIC, 0, rng.integers(1, TOPICS, count))
    step[0] = rng.integers(TOPICS)
    topic = np.cumsum(step) % TOPICS
    return (FIRST_TOPIC_ID + TOPICS * rng.integers(per_topic, size=count) + topic).astype(np.int32)


def _read_ids(path: str) -> npt.NDArray[np.int64]:
    try:
        with open(path, "rb") as file:
            raw = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise StorageError(f"cannot read --prompt-ids {path}: {error.strerror}") from error
    if len(raw) > FILE_BYTES:
        raise UsageError(f"--prompt-ids {path} must be at most {FILE_BYTES} bytes")
    try:
        if raw.startswith(b"\x93NUMPY"):
            ids = np.load(io.BytesIO(raw), allow_pickle=False)
        else:
            ids = np.array([int(word) for word in raw.decode("ascii").replace(",", " ").split()], np.int64)
    except (ValueError, OverflowError, EOFError, MemoryError) as error:
        raise UsageError(f"--prompt-ids {path} must be a .npy file or integers in text") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"--prompt-ids {path} must hold one row of integers, got {ids.dtype} of shape {ids.shape}")
    return ids


def _checked(ids: npt.NDArray[np.int64], spec: ModelSpec, path: str) -> npt.NDArray[np.int32]:
    if not len(ids):
        raise UsageError(f"--prompt-ids {path} holds no ids")
    if ids.min() < 0 or ids.max() >= spec.vocab:
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise UsageError(f"ids in --prompt-ids {path} must be between 0 and {spec.vocab - 1}, got {worst}")
    return ids.astype(np.int32)
