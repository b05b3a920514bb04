"""Names and values from untrusted files, made safe for a one-line message."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SHOWN = 10  # names listed before "and N more"
_LONGEST = 80


def quoted(value: object) -> str:
    """repr without line breaks or control characters, cut to a readable length."""
    try:
        text = repr(value[: 2 * _LONGEST] if isinstance(value, str) else value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    if not text.isprintable():  # the repr of an array has lines
        text = repr(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def plain(name: str) -> str:
    """A file or tensor name as it is, if that is harmless to print; else `quoted`."""
    return name if name.isprintable() and 0 < len(name) <= 2 * _LONGEST else quoted(name)


def located(path: Path) -> str:
    """A path, whole: its end is what the reader needs."""
    return repr(str(path))


def listing(names: Iterable[str]) -> str:
    """ "a, b, c and 7 more": the first ten, sorted."""
    ordered = sorted(names)
    text = ", ".join(plain(name) for name in ordered[:SHOWN])
    return text if len(ordered) <= SHOWN else f"{text} and {len(ordered) - SHOWN} more"
