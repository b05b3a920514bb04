"""The measuring half of a child process: one JSON object a line in, one out. Needs nothing but NumPy.

The first line are settings; the answer says how long loading took. Each further line is a round: the prompts [B, T]
and the tokens that follow [N, B], given and not chosen, so that all engines compute the same positions with the same
tokens. The answer has the seconds of the prompts and of every step, CPU seconds, and what the engine would have chosen.
An engine that refuses to open (DynajaxError) answers with `error` and its `kind`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynajax.errors import DynajaxError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
Logits = npt.NDArray[np.floating]  # [B, V]


class Session(Protocol):
    """An engine with a model, whose next round starts at position 0 again."""

    def prefill(self, prompts: list[list[int]]) -> Logits:
        """Every row's prompt, all of one length; the logits behind their last tokens."""

    def begin_steps(self) -> None:
        """Behind a prefill: the steps come next, and what is counted is theirs. Not timed."""

    def step(self, ids: list[int]) -> Logits:
        """One token more in every row."""

    def facts(self) -> dict[str, Any]:
        """What the round just ended showed."""


class PlainSession(ABC):
    """Of an engine that computes everything, with nothing to compile."""

    def prefill(self, prompts: list[list[int]]) -> Logits:
        """See Session."""
        self._forget()
        return self._run(prompts)

    def begin_steps(self) -> None:  # noqa: B027
        """Nothing is counted."""

    def step(self, ids: list[int]) -> Logits:
        """See Session."""
        return self._run([[token] for token in ids])

    def facts(self) -> dict[str, Any]:
        """See Session."""
        return {"compile_s": 0.0, "hot_share": None, "floor_bytes": None}

    @abstractmethod
    def _forget(self) -> None:
        """Empty the cache."""

    @abstractmethod
    def _run(self, rows: list[list[int]]) -> Logits:
        """rows [B, T] at the next T positions -> the logits behind the last of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session, how long it took to open, and how it is described in a row of the results."""

    session: Any  # a Session, or what the `run` of `serve` takes
    load_s: float
    row: dict[str, Any] = field(default_factory=dict)


def peak_rss_bytes() -> int:
    """Of this process since its start."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def run_round(session: Session, prompts: list[list[int]], following: list[list[int]]) -> dict[str, Any]:
    """One measured round; see the module."""
    times_s, chosen = [], []
    begin, cpu = time.perf_counter(), time.process_time()
    chosen.append(session.prefill(prompts).argmax(-1).tolist())
    prefill_s, prefill_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    session.begin_steps()
    cpu = time.process_time()
    for ids in following:
        begin = time.perf_counter()
        chosen.append(session.step(ids).argmax(-1).tolist())
        times_s.append(time.perf_counter() - begin)
    return {
        "prefill_s": prefill_s,
        "prefill_cpu_s": prefill_cpu_s,
        "step_s": times_s,
        "step_cpu_s": time.process_time() - cpu,
        "chosen": chosen,
        "peak_rss_bytes": peak_rss_bytes(),
        **session.facts(),
    }


def serve(open_session: Callable[[dict[str, Any]], Opened], run: Callable[..., dict[str, Any]] = run_round) -> None:
    """Open the engine that the first line asks for and run rounds until stdin ends; `run` takes what `run_round` does.

    Whatever a library prints goes to stderr: stdout is for answers.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # who is halted when its parent dies would stay for ever
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(told: dict[str, Any]) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    try:
        opened = open_session(json.loads(sys.stdin.readline()))
    except DynajaxError as error:
        answer({"error": str(error), "kind": type(error).__name__})
        return
    answer({"load_s": opened.load_s, "peak_rss_bytes": peak_rss_bytes(), **opened.row})
    for line in sys.stdin:
        task = json.loads(line)
        answer(run(opened.session, task["prompts"], task["following"]))
