"""Ctrl-C and SIGTERM: the first asks the engine to stop after the current token, the second ends the program."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SHOW_CURSOR = b"\x1b[?25h\n"  # a progress bar hides it
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised where a signal ends the command; no Exception, so that nothing swallows it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class Interrupts:
    """Handles both signals while open.

    Before `hold` a signal raises `Interrupted` where it arrives. From then on jax may be at work, through which no
    exception may pass: the first signal is noted for `check` and asks the engine to stop, the second ends the process.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._held = False
        self._stop: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def hold(self) -> None:
        """From now on a signal waits for `check`."""
        self._held = True

    def ask(self, stop: Callable[[], None]) -> None:
        """From now on the first signal calls `stop` too; raises what was held back before."""
        self._held, self._stop = True, stop
        self.check()

    def check(self) -> None:
        """Raise what was held back."""
        if self._caught is not None:
            raise Interrupted(self._caught)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._held:
            raise Interrupted(signum)
        if self._caught is not None:
            os.write(2, SHOW_CURSOR if os.isatty(2) else b"\n")
            os._exit(128 + signum)
        self._caught = signum
        if self._stop is not None:
            self._stop()
