"""How long a figure is measured, and what is made of the measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

WARM_UP = 2  # calls that do not count
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A figure's calls: for so many seconds, but at least `least` and at most `most` of them."""

    seconds: float
    least: int
    most: int

    def samples(self, call: Callable[[], Found]) -> list[Found]:
        """What the calls return, without those that warm up."""
        for _ in range(WARM_UP):
            call()
        found: list[Found] = []
        end = time.perf_counter() + self.seconds
        while len(found) < self.least or (len(found) < self.most and time.perf_counter() < end):
            found.append(call())
        return found

    def median_s(self, call: Callable[[], object]) -> float:
        """Seconds of a call, the median."""
        return float(np.median(self.samples(lambda: spent_s(call))))


def spent_s(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """y = intercept + slope * x."""

    slope: float
    intercept: float

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """The line through two points (x, y) of different x. Example: (1, 5) and (3, 9) -> slope 2, intercept 3."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(slope=slope, intercept=first[1] - slope * first[0])
