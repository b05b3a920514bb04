"""Ctrl-C and SIGTERM: the first asks the engine to stop after the current token, the second ends the program."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised where a signal ends the command; no Exception, so that nothing swallows it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class Interrupts:
    """Handles both signals while open. Before `ask` is called, and at a second signal, `Interrupted` is raised."""

    def __init__(self) -> None:
        self._caught: int | None = None
        self._stop: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def ask(self, stop: Callable[[], None]) -> None:
        """From now on the first signal calls `stop`; whoever asked looks at `check` afterwards."""
        self._stop = stop

    def check(self) -> None:
        """Raise what was held back."""
        if self._caught is not None:
            raise Interrupted(self._caught)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first, self._caught = self._caught is None, signum
        if not first or self._stop is None:
            raise Interrupted(signum)
        self._stop()
