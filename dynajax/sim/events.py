"""Simulated time: processes, lanes that do one thing at a time, and resources that works share while they run.

A process is a generator. It yields a `Work` or a `Signal` to wait for it, or `(signal, seconds)` to wait no longer
than that; the value of the yield says whether it came. Works of one lane run in the order in which they were given. A
work first takes `fixed_s` alone, then `busy_s` if nobody slows it down: where works together ask for more of a resource
than there is, all who ask are slowed down alike (max-min fairness of their progress), and whatever they then leave of
other resources is shared by the others.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

Process = Generator[Any, bool, None]
_DONE_S = 1e-15  # what is left of a work that has ended


class Signal:
    """Something that happens once."""

    __slots__ = ("_waiting", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[tuple[_Task, int]] = []


class Work(Signal):
    """Something a lane does; `begin` and `end` are its times once it ran."""

    __slots__ = ("asks", "begin", "busy_s", "end", "fixed_s", "lane", "name", "speed")

    def __init__(self, lane: str, name: str, fixed_s: float, busy_s: float, asks: Mapping[str, float]) -> None:
        super().__init__()
        self.lane, self.name = lane, name
        self.fixed_s, self.busy_s = fixed_s, busy_s  # that are left
        self.asks = asks  # resource: how much of it a second at full speed
        self.speed = 0.0
        self.begin = self.end = math.nan

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class _Task:
    """A process, and what it waits for: answers of an older wait are for nobody."""

    __slots__ = ("process", "wait")

    def __init__(self, process: Process) -> None:
        self.process, self.wait = process, 0


class Simulation:
    """See the head of this file. `capacity`: of every resource, a second."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self.now = 0.0
        self.busy_s: dict[str, float] = {}  # by lane
        self._capacity = dict(capacity)
        self._lanes: dict[str, deque[Work]] = {}
        self._running: list[Work] = []  # the first of every lane that has one
        self._ready: deque[tuple[_Task, bool, int]] = deque()
        self._timers: list[tuple[float, int, _Task, int]] = []
        self._count = 0
        self._changed = False

    def give(
        self, lane: str, name: str, fixed_s: float, busy_s: float = 0.0, asks: Mapping[str, float] | None = None
    ) -> Work:
        """Put a work behind the others of its lane."""
        work = Work(lane, name, fixed_s, busy_s, asks or {})
        queue = self._lanes.setdefault(lane, deque())
        queue.append(work)
        if len(queue) == 1:
            self._begin(work)
        return work

    def start(self, process: Process) -> None:
        """Let a process go on until it first waits, once the simulation runs."""
        self._ready.append((_Task(process), True, 0))

    def tell(self, signal: Signal) -> None:
        """It happened: whoever waits goes on."""
        signal.happened = True
        for task, wait in signal._waiting:
            self._ready.append((task, True, wait))
        signal._waiting = []

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            while self._ready:
                task, came, wait = self._ready.popleft()
                if task.wait == wait:  # else it was told before, and waits for something else by now
                    self._go_on(task, came)
            if not self._running and not self._timers:
                return
            self._advance()

    def _go_on(self, task: _Task, came: bool) -> None:
        """To the next thing that has not happened yet."""
        while True:
            begins = task.wait == 0
            task.wait += 1
            try:
                wanted = next(task.process) if begins else task.process.send(came)
            except StopIteration:
                return
            signal, limit_s = wanted if isinstance(wanted, tuple) else (wanted, math.inf)
            came = signal.happened
            if came or limit_s <= 0:
                continue
            signal._waiting.append((task, task.wait))
            if limit_s < math.inf:
                self._count += 1
                heapq.heappush(self._timers, (self.now + limit_s, self._count, task, task.wait))
            return

    def _begin(self, work: Work) -> None:
        work.begin = self.now
        self._running.append(work)
        self._changed = True

    def _finish(self, work: Work) -> None:
        work.end = self.now
        self.busy_s[work.lane] = self.busy_s.get(work.lane, 0.0) + work.seconds
        self._running.remove(work)
        self._changed = True
        queue = self._lanes[work.lane]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        self.tell(work)

    def _advance(self) -> None:
        """To the next moment at which something ends."""
        if self._changed:
            self._share()
            self._changed = False
        step = self._timers[0][0] - self.now if self._timers else math.inf
        for work in self._running:
            step = min(step, work.fixed_s if work.fixed_s > 0 else work.busy_s / work.speed)
        self.now += step
        ended = []
        for work in self._running:
            if work.fixed_s > 0:
                work.fixed_s -= step
                if work.fixed_s <= _DONE_S:
                    work.fixed_s = 0.0
                    self._changed = True  # from now on it asks for resources
                    if work.busy_s <= 0:
                        ended.append(work)
            else:
                work.busy_s -= step * work.speed
                if work.busy_s <= _DONE_S:
                    ended.append(work)
        for work in ended:
            self._finish(work)
        while self._timers and self._timers[0][0] <= self.now:
            _, _, task, wait = heapq.heappop(self._timers)
            self._ready.append((task, False, wait))

    def _share(self) -> None:
        """How fast every busy work goes on: 1 is full speed."""
        open_works = [work for work in self._running if work.fixed_s <= 0]
        for work in open_works:
            work.speed = 1.0
        open_works = [work for work in open_works if work.asks]
        left = dict(self._capacity)
        while open_works:
            level, tight = 1.0, None
            for name, free in left.items():
                asked = sum(work.asks.get(name, 0.0) for work in open_works)
                if asked > 0 and free / asked < level:
                    level, tight = free / asked, name
            if tight is None:
                return
            slowed = [work for work in open_works if work.asks.get(tight, 0.0) > 0]
            for work in slowed:
                work.speed = max(level, 1e-9)
                for name, amount in work.asks.items():
                    left[name] = max(0.0, left[name] - amount * level)
            open_works = [work for work in open_works if work not in slowed]
            del left[tight]
