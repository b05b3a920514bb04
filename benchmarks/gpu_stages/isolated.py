"""A function run in a process of its own, with a time limit; what it found before it was cut short is kept.

python -m benchmarks.gpu_stages.isolated benchmarks.gpu_stages.donation:run '{}' report.jsonl
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAIL = 600  # characters of stderr in an error
PARENT_DEATH_SIGNAL = 1  # of prctl, Linux


class Report:
    """What a function found out, on disk as soon as it is known: one JSON object a line."""

    def __init__(self, path: Path, limit_s: float = math.inf):
        self._path, self._end = path, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Until the process is cut."""
        return self._end - time.monotonic()

    def add(self, **figures: Any) -> None:
        """Figures by name; a name that was there is replaced."""
        self._write({"figures": figures})

    def fail(self, problem: str) -> None:
        """Something is not as it should be; the function may go on."""
        self._write({"problem": problem})

    def _write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run. `error` is None exactly if `ok`."""

    ok: bool
    seconds: float
    figures: dict[str, Any]
    error: str | None


def run_isolated(
    target: str,  # "package.module:function", called as function(report, **arguments)
    arguments: Mapping[str, Any],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,  # beside those of this process
    group: bool = False,  # end the run's own children with it
) -> Outcome:
    """Run and wait. Never raises for what the function does, be it an exception, a crash or a hang."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report, stderr = Path(folder) / "report.jsonl", Path(folder) / "stderr"
        command = [
            sys.executable,
            "-m",
            __name__,
            target,
            json.dumps(arguments),
            str(report),
            str(os.getpid()),
            str(limit_s),
        ]
        with stderr.open("wb") as errors:
            child = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **(env or {})}, process_group=0 if group else None,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )  # fmt: skip
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(limit_s)
            finally:
                expired = child.poll() is None
                _end(child, group=group)
        seconds = time.perf_counter() - start
        figures, problems = _read(report)
        if expired:
            problems.append(f"cut at its limit of {limit_s:g} s")
        elif child.returncode and not problems:
            problems.append(f"exit status {child.returncode}: {_tail(stderr)}")
    return Outcome(
        ok=not problems, seconds=round(seconds, 2), figures=figures, error="; ".join(problems) if problems else None
    )


def _end(child: subprocess.Popen, *, group: bool) -> None:
    """Kill what still runs and reap it."""
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    elif child.poll() is None:
        child.kill()
    child.wait()


def _read(report: Path) -> tuple[dict[str, Any], list[str]]:
    """Figures and problems; a last line that was cut is left out."""
    figures: dict[str, Any] = {}
    problems: list[str] = []
    for line in report.read_text(encoding="utf-8").splitlines(keepends=True) if report.exists() else []:
        if line.endswith("\n"):
            entry = json.loads(line)
            figures |= entry.get("figures", {})
            problems += [entry["problem"]] if "problem" in entry else []
    return figures, problems


def _tail(stderr: Path) -> str:
    text = stderr.read_text(encoding="utf-8", errors="replace").strip()
    return text[-TAIL:] or "nothing on stderr"


def end_with(parent: int) -> None:
    """From now on this process is killed when the one that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("whoever started this is gone")


def main() -> None:
    target, arguments, path, *started = sys.argv[1:]
    if started:  # by `run_isolated`
        end_with(int(started[0]))
    report = Report(Path(path), *map(float, started[1:]))
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)(report, **json.loads(arguments))
    except Exception as error:
        report.fail(f"{type(error).__name__}: {error}"[:TAIL])
        raise


if __name__ == "__main__":
    main()
