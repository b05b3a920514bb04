"""What ran when, on the device, on the host and on the way between them, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Protocol

from dynajax.checkpoint.drafts import draft_file

log = logging.getLogger(__name__)

LANES = ("device", "host", "copy")  # from top to bottom
MOST_SPANS = 2_000_000  # some 200 bytes each
CLOSE_S = 5.0  # how long a device that may hang is waited for


class Timeline:
    """Spans of time in lanes. `add` may be called from any thread."""

    def __init__(self, most: int = MOST_SPANS):
        self._spans: list[tuple[str, str, float, float]] = []
        self._most, self._full = most, False

    def add(self, lane: str, name: str, begin: float, end: float) -> None:
        """Something that lasted from begin to end, by time.perf_counter()."""
        if len(self._spans) < self._most:
            self._spans.append((lane, name, begin, end))
        elif not self._full:
            self._full = True
            log.warning("the timeline is full after %d spans: what comes now is not in it", self._most)

    def spans(self) -> list[tuple[str, str, float, float]]:
        """(lane, name, begin, end) of all, by begin."""
        return sorted(self._spans, key=lambda span: span[2])

    def write(self, path: Path) -> None:
        """As Chrome trace JSON: one process, a named thread a lane, microseconds from the first begin on. Whole or not
        at all; StorageError if it cannot be written."""
        spans = self.spans()
        start = spans[0][2] if spans else 0.0
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys((*LANES, *(span[0] for span in spans))), start=1)}
        events: list[dict] = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "dynajax"}}]
        for lane, number in lanes.items():
            for kind, value in (("name", lane), ("sort_index", number)):
                events.append({"ph": "M", "pid": 1, "tid": number, "name": f"thread_{kind}", "args": {kind: value}})
        for lane, name, begin, end in spans:
            at, lasted = round(1e6 * (begin - start), 3), round(1e6 * (end - begin), 3)
            events.append({"ph": "X", "pid": 1, "tid": lanes[lane], "name": name, "ts": at, "dur": lasted})
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
        with draft_file(path, len(text)) as file:
            file.write(text)


class Awaited(Protocol):
    """What a program on the device gives: a jax array."""

    def block_until_ready(self) -> object: ...


class Lanes:
    """Where an engine tells what it does. Programs are dispatched long before they run, so a thread of its own waits
    for their outputs, in order of dispatch: each has run since its dispatch, or since the one before ended.

    An output that was donated to a later program cannot be waited for: its program is shown as one with the next.
    One thread calls `device` and `settle`.
    """

    def __init__(self, timeline: Timeline):
        self.add = timeline.add  # lane, name, begin, end; for any thread
        self._queue: queue.SimpleQueue[tuple[str, float, Awaited] | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._given = self._done = 0
        self._thread = threading.Thread(target=self._run, name="dynajax-timeline", daemon=True)
        self._thread.start()

    def host(self, name: str, begin: float) -> None:
        """Something on the host, from begin until now."""
        self.add("host", name, begin, time.perf_counter())

    def device(self, name: str, begin: float, output: Awaited) -> None:
        """A program that was dispatched at begin; its output is held until it is ready."""
        self._given += 1
        self._queue.put((name, begin, output))

    def settle(self) -> None:
        """Wait for every program told of: what nobody else holds is given up before memory is measured."""
        with self._news:
            self._news.wait_for(lambda: self._done >= self._given, CLOSE_S)

    def close(self) -> None:
        """The same, and the thread ends. Does not raise."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        last, names, first = 0.0, [], 0.0
        while (told := self._queue.get()) is not None:
            name, begin, output = told
            first = first if names else begin
            names.append(name)
            try:
                output.block_until_ready()
                end = time.perf_counter()
                self.add("device", ", ".join(names), max(first, last), end)
                last, names = end, []
            except Exception:  # donated, or the program failed: who reads its output is told so
                pass
            del told, output
            with self._news:
                self._done += 1
                self._news.notify_all()
