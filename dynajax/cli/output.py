"""What a command writes: the answer to stdout and nothing else there; progress and summaries to stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

LINE_EVERY_S = 5.0
TELLING_S = 10.0  # how long a stage lasts before its end is guessed
UNITS = {"download": " MiB"}
PLANNING = "compile"  # what is planned may still be refused, and a refusal is one line
KEPT_CONTROLS = "\n\t"
# C0, DEL and C1: a model must not move the cursor or set the title of a terminal.
CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in KEPT_CONTROLS)


class PipeClosed(BaseException):
    """Whoever read stdout has gone; the command ends without a word."""


class Progress(Protocol):
    """Told how far a stage is: `compile`, `load`, `place`, `prefill`."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...

    def close(self) -> None:
        """Says nothing from now on; may be called twice."""


class Answer:
    """The answer on stdout: as it comes, or in one piece at the end. Ends with a line break, always."""

    def __init__(self, *, stream: bool, silent: bool = False):
        self._stream, self._silent = stream, silent
        self._held: list[str] = []
        self._last = "\n"
        self._terminal = sys.stdout.isatty()

    def add(self, text: str) -> None:
        """The next piece, shown at once when streaming."""
        if not self._stream:
            self._held.append(text)
        elif text:
            self._write(text)

    def close(self) -> None:
        """Show what was held back and end the line; nothing at all if `silent`."""
        if not self._silent:
            self._write("".join(self._held))
        self._held = []
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            write_out(text.translate(CONTROLS) if self._terminal else text)


def write_out(text: str) -> None:
    """`text` to stdout, now. What its encoding cannot say becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosed from None


def write_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout; NaN and infinity are refused, they are no JSON."""
    write_out(json.dumps(value, allow_nan=False) + "\n")


def note(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def progress() -> Progress:
    """A bar on a terminal, plain lines elsewhere."""
    return Bars() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else Lines()


class Lines:
    """A line when a stage ends, and every few seconds while it lasts; planning says nothing."""

    def __init__(self, every_s: float = LINE_EVERY_S):
        self._every_s = every_s
        self._said_s: float | None = time.monotonic()
        self._began: dict[str, tuple[float, int]] = {}  # stage: when it was first told of, and how far it was

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == PLANNING or self._said_s is None:
            return
        begin = self._began.setdefault(stage, (now, done))
        if done >= total or now - self._said_s >= self._every_s:
            self._said_s = now
            left = remaining(now - begin[0], done - begin[1], total - done)
            note(f"{stage}: {done}/{total}{UNITS.get(stage, '')}{left}")

    def close(self) -> None:
        self._said_s = None


def remaining(spent_s: float, done: int, left: int) -> str:
    """ ", 90 s left" after `done` in `spent_s`; nothing at the end, or while it is too early to tell."""
    if left < 1 or done < 1 or spent_s < TELLING_S:
        return ""
    left_s = spent_s / done * left
    return f", {left_s:.0f} s left" if left_s < 120 else f", {left_s / 60:.0f} min left"


class Bars:
    """A bar per stage, wiped when closed. rich honours NO_COLOR by itself."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        left = TimeRemainingColumn()
        columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
        self._tasks: dict[str, Any] = {}
        self._bars.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        self._bars.stop()


def size(count: int | None) -> str:
    """Bytes for people: 1536 -> "1.5 KiB"; "n/a" for None."""
    if count is None:
        return "n/a"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def figure(value: float | None, form: str = ".1f", unit: str = "") -> str:
    """A number as `form` says, or "n/a" for what was not measured."""
    return "n/a" if value is None else f"{value:{form}}{unit}"


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names to the left, values to the right."""
    left, right = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in rows)
