"""PowerInfer's finished binary as a child of `benchmarks.side_by_side`: a run of it is a round.

It takes text, not token ids, and generates what it likes: the prompt is the single word below as often as there are
tokens to read, and as many tokens are generated as the others are given. How many it read and generated is taken from
what it prints, and so are the seconds, which are means: a round has one figure for all of its steps. A round in which
it generated fewer tokens than were asked for is refused. CPU time is of the whole run, loading too, and not told.
"""

from __future__ import annotations

import re
import resource
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from dynajax.benching.worker import Opened, serve
from dynajax.errors import UsageError

WORD = " the"  # one token in the vocabularies of llama models
TIMES = re.compile(r"(load|prompt eval|eval) time\s*=\s*([\d.]+) ms(?:\s*/\s*(\d+) (?:tokens|runs))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """The binary, and what every run of it is told."""

    path: str
    arguments: tuple[str, ...]


def timings(text: str) -> dict[str, tuple[float, int]]:
    """(seconds, tokens) of `load`, `prompt eval` and `eval` from what llama.cpp's family prints at the end."""
    return {name: (float(ms) / 1e3, int(count or 0)) for name, ms, count in TIMES.findall(text)}


def run_once(binary: Binary, prompt_tokens: int, new_tokens: int) -> dict[str, tuple[float, int]]:
    """The timings of a run. UsageError: it failed, or did something else than it was asked for."""
    words = (binary.path, *binary.arguments, "-p", (WORD * prompt_tokens).strip(), "-n", str(new_tokens))
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    found = timings(done.stderr + done.stdout)
    if done.returncode != 0 or not {"prompt eval", "eval"} <= found.keys():
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UsageError(f"{binary.path} ended with code {done.returncode} and without its timings; it said: {last}")
    if found["eval"][1] < new_tokens - 1:  # the first token comes from the prompt
        raise UsageError(f"{binary.path} generated {found['eval'][1] + 1} of {new_tokens} tokens: give fewer")
    return found


def run_round(binary: Binary, prompts: list[list[int]], following: list[list[int]]) -> dict[str, Any]:
    """As `worker.run_round`; the prompt's seconds are scaled to the tokens that the others read."""
    prompt_tokens = len(prompts[0])
    found = run_once(binary, prompt_tokens, len(following))
    (prefill_s, read), (decode_s, generated) = found["prompt eval"], found["eval"]
    return {
        "prefill_s": prefill_s / read * prompt_tokens,
        "prefill_cpu_s": None,
        "step_s": [decode_s / generated],
        "step_cpu_s": None,
        "chosen": None,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "compile_s": 0.0,
        "hot_share": None,
        "floor_bytes": None,
    }


def open_session(settings: dict[str, Any]) -> Opened:
    """settings: binary, model, ctx, threads, budget_bytes (None: its default)."""
    words = ["-m", settings["model"], "-c", str(settings["ctx"] + 1), "-t", str(settings["threads"])]
    words += ["--ignore-eos", "--temp", "0"]
    if settings["budget_bytes"] is not None:
        words += ["--vram-budget", f"{settings['budget_bytes'] / 2**30:.3f}"]
    binary = Binary(path=settings["binary"], arguments=tuple(words))
    begin = time.perf_counter()
    found = run_once(binary, 2, 2)
    return Opened(session=binary, load_s=found.get("load", (time.perf_counter() - begin, 0))[0])


if __name__ == "__main__":
    serve(open_session, run_round)
