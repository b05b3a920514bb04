"""Typed reads from an untrusted config: whatever is wrong with it is collected, none of it raised."""

from __future__ import annotations

from typing import Any

from dynajax.checkpoint.wording import quoted

MOST_IDS = 256  # end-of-text tokens


class Fields:
    """Typed reads from a config; what is wrong is collected, and a harmless stand-in returned."""

    def __init__(self, config: dict):
        self.config = config
        self.problems: list[str] = []

    def complain(self, text: str) -> None:
        self.problems.append(text)

    def get(self, name: str) -> Any:
        return self.config.get(name)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; absent or null means `default`."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.complain(f"{name} must be true or false, got {quoted(value)}")
        return value if isinstance(value, bool) else default

    def integer(self, name: str, most: int, default: int | None = None) -> int:
        """An int (never a bool, a float or a string) from 1 to `most`; None means `default`, if there is one."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        self.complain(f"{name} must be an integer from 1 to {most}, got {found(value)}")
        return most

    def number(self, name: str, value: object, *, positive: bool) -> float:
        """A finite number > 0 (or >= 0)."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (0 < value < 1e30 or (value == 0 and not positive)):  # NaN and infinity fail too
            return float(value)
        self.complain(f"{name} must be a number {'>' if positive else '>='} 0, got {found(value)}")
        return 1.0

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        ids = tuple(i for i in listed if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab)
        if len(ids) == len(listed) <= MOST_IDS:
            return ids
        self.complain(f"{name} must be at most {MOST_IDS} token ids below vocab_size {vocab}, got {found(value)}")
        return ()


def found(value: object) -> str:
    """What stands in a message for a value."""
    return "nothing" if value is None else quoted(value)
