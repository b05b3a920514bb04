"""Range checks of what a user set: UsageError that names the setting."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from dynajax.errors import UsageError


def check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """UsageError that names the setting unless value is a number (no bool) in [low, high], an integer if `whole`."""
    kind = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if whole else "a number"
        bounds = f">= {low:g}" if high >= 2**31 else f"between {low:g} and {high:g}"
        raise UsageError(f"{name} must be {what} {bounds}, got {value!r}")


def check_share(name: str, value: Any) -> None:
    """UsageError that names the setting unless value is a number in (0, 1]."""
    check_number(name, value, 0, 1)
    if value == 0:
        raise UsageError(f"{name} must be above 0, got {value!r}")
