"""One caller at a time, and a clear word instead of a deadlock for a thread that waits for itself."""

from __future__ import annotations

import threading

from dynajax.errors import UsageError


class Turn:
    """A lock that other threads wait for and its own thread is refused: an open stream holds it between tokens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self.mine:
            raise UsageError("a stream of this engine is open in this thread: read it to its end or close it first")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exc_info: object) -> None:
        self._owner = None
        self._lock.release()
