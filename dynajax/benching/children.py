"""Engines in processes of their own: what to start, and how to talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dynajax import errors

ROOT = Path(__file__).parents[2]


def with_root() -> dict[str, str]:
    """This environment, in which any Python finds the modules of this one, whatever folder it runs in."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One row of a comparison: how its process is started, and what is known of it before."""

    name: str
    engine: str  # dynajax, llama.cpp, transformers, accelerate or powerinfer
    command: tuple[str, ...]
    settings: dict[str, Any]  # the first line it is told
    file_bytes: int  # of its weights, roughly what it holds in memory
    row: dict[str, Any] = field(default_factory=dict)


class Child:
    """A contender's process; stopped (SIGSTOP) whenever nobody waits for it, so that it disturbs no other.

    DynajaxError: the engine refuses to open. RuntimeError: it ended. Not `wait`: it opens meanwhile; `opened` is there
    after `ready`, which raises these.
    """

    opened: dict[str, Any]

    def __init__(self, contender: Contender, *, wait: bool = True):
        self.contender = contender
        self._process = subprocess.Popen(
            contender.command,
            env=with_root(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )  # a group of its own: Ctrl-C is for the parent, which ends its children
        try:
            self._tell(contender.settings)
            if wait:
                self.ready()
        except BaseException:
            self.close()
            raise

    def ready(self) -> None:
        """Wait until it is open."""
        self.opened = self._answer()

    def round(self, prompts: list[list[int]], following: list[list[int]]) -> dict[str, Any]:
        """One round of `worker.run_round`."""
        self._process.send_signal(signal.SIGCONT)
        self._tell({"prompts": prompts, "following": following})
        return self._answer()

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.contender.name} ended with code {self._process.wait()}: its messages are above")
        told = json.loads(answer)
        if "error" in told:
            raise getattr(errors, told["kind"])(f"{self.contender.name}: {told['error']}")
        self._process.send_signal(signal.SIGSTOP)
        return told

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
