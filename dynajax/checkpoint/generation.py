"""generation_config.json: how the model's makers want it sampled. Optional; what is there must make sense."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.wording import located, quoted
from dynajax.errors import ModelError

GENERATION_NAME = "generation_config.json"
MOST_IDS = 256
_MOST_BYTES = 2**20
_LARGEST_ID = 2**22

Check = tuple[Callable[[Any], bool], str]


def _between(low: float, high: float) -> Check:
    return (lambda value: low <= value <= high, f"a number from {low:g} to {high:g}")


NUMBERS: dict[str, Check] = {
    "temperature": _between(0, 100),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "min_p": _between(0, 1),
    "repetition_penalty": (lambda value: 0 < value <= 100, "a number above 0, at most 100"),
}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The values that are set, of: eos_token_id (a list), bos_token_id, do_sample, top_k and `NUMBERS`.

    {} without the file. ModelError names every value that is out of range; other keys are not looked at.
    """
    path = folder / GENERATION_NAME
    if not os.path.lexists(path):
        return {}
    if problem := stray_link(path):
        raise ModelError(problem)
    record = read_json(path, _MOST_BYTES)
    found: dict[str, Any] = {}
    problems: list[str] = []

    def take(name: str, good: Callable[[Any], bool], wanted: str, change: Callable[[Any], Any] = lambda v: v) -> None:
        value = record.get(name)
        if value is None:
            return
        if good(value):
            found[name] = change(value)
        else:
            problems.append(f"{name} must be {wanted}, got {quoted(value)}")

    ids = f"a token id or at most {MOST_IDS} of them"
    take("eos_token_id", _is_ids, ids, lambda value: value if isinstance(value, list) else [value])
    take("bos_token_id", _is_id, "a token id")
    take("do_sample", lambda value: isinstance(value, bool), "true or false")
    take("top_k", lambda value: _is_integer(value) and 0 <= value <= _LARGEST_ID, f"an integer from 0 to {_LARGEST_ID}")
    for name, (fits, wanted) in NUMBERS.items():
        take(name, lambda value, fits=fits: _is_number(value) and fits(value), wanted, float)
    if problems:
        raise ModelError(f"{located(path)}: " + "; ".join(problems))
    return found


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_ID


def _is_ids(value: object) -> bool:
    return _is_id(value) or (isinstance(value, list) and len(value) <= MOST_IDS and all(_is_id(v) for v in value))
