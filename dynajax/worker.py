"""A thread that carries out tasks in the order in which they were given, urgent ones first."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import jax

from dynajax.errors import DynajaxError, EngineError

HANG_S = 60.0  # without an answer for so long the thread counts as hung

Task = Callable[[], None]


class Worker:
    """Everything that fails in the thread is raised in the next call of whoever gives it tasks."""

    def __init__(self, name: str, on_end: Task):
        """on_end: run by the thread as its last, whatever happened; what it raises is dropped."""
        self._what, self._on_end = name, on_end
        self._news = threading.Condition()
        self._urgent: deque[Task] = deque()
        self._tasks: deque[Task] = deque()
        self._given = self._done = 0  # tasks
        self._ends = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"dynajax-{name}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the thread gave up, or was closed."""
        return self._error is not None

    def settle(self, left: int = 0) -> None:
        """Wait until at most `left` tasks are open. EngineError if nothing moves for long."""
        while self._given - self._done > left:
            before = self._done
            with self._news:
                self._news.wait_for(lambda: self._given - self._done <= left or self._error is not None, HANG_S)
            self._check()
            if self._done == before:
                raise self._hung()
        self._check()

    def close(self, wait_s: float = HANG_S) -> None:
        """End the thread; what still waits is dropped. Does not raise: the thread may have failed, or hang."""
        with self._news:
            self._error = EngineError(
                f"the {self._what} is closed"
            )  # an earlier one's frames refer to all that is here
            self._ends = True
            self._news.notify_all()
        self._thread.join(wait_s)

    def _give(self, task: Task, *, urgent: bool = False) -> None:
        self._check()
        with self._news:
            self._given += 1
            (self._urgent if urgent else self._tasks).append(task)
            self._news.notify_all()

    def _wait_for(self, happened: Callable[[], bool], limit_s: float) -> bool:
        """Whether it happened within so many seconds; raises what the thread failed of."""
        if not happened():
            with self._news:
                self._news.wait_for(lambda: happened() or self._error is not None, limit_s)
        self._check()
        return happened()

    def _hung(self) -> EngineError:
        return EngineError(f"the {self._what} did not answer within {HANG_S:g} s")

    def _check(self) -> None:
        if self._error is not None:
            if isinstance(self._error, DynajaxError | jax.errors.JaxRuntimeError):
                raise self._error
            words = str(self._error).strip().splitlines() or [type(self._error).__name__]
            raise EngineError(f"the {self._what} failed: {words[0]}") from self._error

    # --- the worker's own thread ---

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException as error:
                with self._news:
                    self._error = self._error or error
                    self._urgent.clear()
                    self._tasks.clear()
                    self._news.notify_all()
            else:
                with self._news:
                    self._done += 1
                    self._news.notify_all()
        with contextlib.suppress(Exception):  # an update that failed, and what it failed of was told
            self._on_end()

    def _next(self) -> Task | None:
        with self._news:
            self._news.wait_for(lambda: self._ends or self._urgent or self._tasks)
            if self._ends:
                return None
            return (self._urgent or self._tasks).popleft()
