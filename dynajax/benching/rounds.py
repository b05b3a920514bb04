"""Rounds of several engines in turn, and what is made of them.

A round is a prompt and tokens that follow, both given, so that every engine computes the same positions; every engine
has one in turn, the others are halted meanwhile. The first round of each warms up and compiles and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynajax.benching.bandwidth import Bandwidth
from dynajax.benching.children import Child, Contender
from dynajax.benching.machine import free_bytes

Round = dict[str, Any]
Tokens = tuple[list[list[int]], list[list[int]]]  # prompts [B, T], what follows them [N, B]
HOLDS = 1.4  # memory of an engine per byte of its weights
FREE_SHARE = 0.8  # of the free memory that engines may take together
ROW_KEYS = (
    "engine", "model", "policy", "sparsity", "dtype", "host_dtype", "threads", "batch", "prompt_tokens", "new_tokens",
    "budget_bytes", "prefill_tok_s", "decode_tok_s", "spread", "share_of_floor", "cpu_share", "hot_share",
    "peak_rss_bytes", "compile_s", "load_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all engines of a comparison have to do."""

    model: str
    prompt_tokens: int
    new_tokens: int
    batch: int
    threads: int

    @property
    def ctx(self) -> int:
        """Tokens of a row in the end."""
        return self.prompt_tokens + self.new_tokens


def fit_together(contenders: Sequence[Contender]) -> bool:
    """Whether all engines may be in host memory at once."""
    return sum(HOLDS * one.file_bytes for one in contenders) <= FREE_SHARE * free_bytes()


def counted(child: Child, tokens: Tokens, before: Round | None) -> Round:
    """A round in which nothing may be compiled, `before` the one that warmed up."""
    found = child.round(*tokens)
    if before is not None and found["compile_s"] != before["compile_s"]:
        raise RuntimeError(f"{child.contender.name} compiled in a counted round: the warm-up does not cover it")
    return found | {"load_s": child.opened["load_s"], "opened": child.opened}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What comes once a round: an engine with its tokens, and what is there beside it while it runs."""

    name: str
    contender: Contender
    tokens: Tokens
    beside: Callable[[], AbstractContextManager[object]] = nullcontext


def take_turns(
    turns: Sequence[Turn],
    rounds: int,
    band: Bandwidth,
    on_round: Callable[[int, Turn, Round], None],
    *,
    together: bool,
    at_once: bool = False,
) -> dict[str, list[Round]]:
    """Counted rounds by the turns' names; turns of one contender share its process. `on_round` is told of each and may
    raise.

    Not together: only one is in memory at a time, loaded again and warmed up for every round. At once: all open side
    by side, which is quicker than one after the other; how long each took says nothing then.
    """
    found: dict[str, list[Round]] = {one.name: [] for one in turns}
    with ExitStack() as open_children:
        children: dict[str, tuple[Child, Round]] = {}
        if at_once:
            assert together, "what opens at once is in memory together"
            children = opened_at_once(turns, open_children)
        for number in range(rounds):
            for one in turns:
                band.look()
                name = one.contender.name
                with ExitStack() as mine:
                    if name not in children:
                        child = (open_children if together else mine).enter_context(Child(one.contender))
                        children[name] = child, counted(child, one.tokens, None)
                    child, warm = children[name]
                    with one.beside():
                        found[one.name].append(counted(child, one.tokens, warm))
                if not together:
                    del children[name]
                on_round(number, one, found[one.name][-1])
    return found


def opened_at_once(turns: Sequence[Turn], stack: ExitStack) -> dict[str, tuple[Child, Round]]:
    """The turns' engines by name, warmed up; their processes open side by side and end with the stack."""
    first = {one.contender.name: one for one in reversed(turns)}
    started = {name: stack.enter_context(Child(one.contender, wait=False)) for name, one in first.items()}
    for child in started.values():
        child.ready()
    return {name: (child, counted(child, first[name].tokens, None)) for name, child in started.items()}


def measure(
    contenders: Sequence[Contender],
    tokens: Tokens,
    rounds: int,
    band: Bandwidth,
    on_round: Callable[[int, Contender, Round], None],
    *,
    together: bool,
) -> dict[str, list[Round]]:
    """Counted rounds by name, all engines in turn with the same tokens; see `take_turns`."""
    turns = [Turn(name=one.name, contender=one, tokens=tokens) for one in contenders]

    def tell(number: int, one: Turn, found: Round) -> None:
        on_round(number, one.contender, found)

    return take_turns(turns, rounds, band, tell, together=together)


def row_of(one: Contender, rounds: Sequence[Round], first: Sequence[Round], task: Task, gb_s: float | None) -> Round:
    """The figures of an engine: those of `ROW_KEYS`, then name, best figures, agreement with `first` and more.

    best and median are over all single steps of all rounds. share_of_floor is best against best: the bytes that a step
    must read at the best read bandwidth `gb_s`, over the best step.
    """
    steps = np.concatenate([found["step_s"] for found in rounds])
    prefills = np.array([found["prefill_s"] for found in rounds])
    last, known = rounds[-1], one.row | rounds[-1]["opened"]
    prompt, batch = task.prompt_tokens, task.batch
    floor_bytes = last["floor_bytes"] if last["floor_bytes"] is not None else one.row.get("floor_bytes")
    best, median = float(steps.min()), float(np.median(steps))
    floor_s = None if floor_bytes is None or gb_s is None else floor_bytes / gb_s / 1e9
    cpu_s = [found["step_cpu_s"] for found in rounds if found["step_cpu_s"] is not None]
    figures = {
        "engine": one.engine, "model": task.model, "threads": task.threads, "batch": batch, "prompt_tokens": prompt,
        "new_tokens": task.new_tokens,
        "prefill_tok_s": batch * prompt / float(np.median(prefills)), "decode_tok_s": batch / median,
        "spread": {
            "best_step_s": best, "p90_step_s": float(np.quantile(steps, 0.9)), "best_prefill_s": float(prefills.min()),
            "p90_prefill_s": float(np.quantile(prefills, 0.9)), "rounds": len(rounds),
        },
        "share_of_floor": None if floor_s is None else floor_s / best,
        "cpu_share": sum(cpu_s) / (float(steps.sum()) * task.threads) if cpu_s else None,
        "hot_share": last["hot_share"],
        "peak_rss_bytes": max(found["peak_rss_bytes"] for found in rounds), "compile_s": last["compile_s"],
        "load_s": min(found["load_s"] for found in rounds),
    }  # fmt: skip
    if "policy" in last:  # the one that ran in the end: dynamic placement may be given up
        figures["policy"] = last["policy"]
    row = {key: figures.get(key, known.get(key)) for key in ROW_KEYS}
    return row | {"name": one.name, "best_tok_s": batch / best, "best_prefill_tok_s": batch * prompt / prefills.min(),
                  "cpu_s_per_step": min(cpu_s) / task.new_tokens if cpu_s else None,
                  "floor_bytes": floor_bytes, "agreement": _agreement(last["chosen"], first[-1]["chosen"]),
                  "version": known.get("version"), "host_mode": known.get("host_mode"),
                  "budget": known.get("budget"), "note": known.get("note"), "density": last.get("density"),
                  "migrated_bytes": last.get("migrated_bytes"), "memory": last.get("memory"),
                  "grown_bytes": max((found.get("grown_bytes", 0) for found in rounds), default=0)}  # fmt: skip


def _agreement(chosen: list[list[int]] | None, first: list[list[int]] | None) -> float | None:
    """The share of positions with the same most likely token; None where an engine does not tell it."""
    if chosen is None or first is None:
        return None
    return float((np.array(chosen) == np.array(first)).mean())


def table(rows: Sequence[Round]) -> str:
    """The rows as Markdown."""
    heads = ("engine", "decode best, median tok/s", "prefill best tok/s", "of the floor", "CPU",
             "CPU ms a step", "peak GiB", "load, compile s", "agrees")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cpu_ms = "" if row["cpu_s_per_step"] is None else f"{1e3 * row['cpu_s_per_step']:.1f}"
        lines.append(
            f"| {row['name']} | {row['best_tok_s']:.2f}, {row['decode_tok_s']:.2f} | {row['best_prefill_tok_s']:.1f} | "
            f"{_share(row['share_of_floor'])} | {_share(row['cpu_share'])} | {cpu_ms} | "
            f"{row['peak_rss_bytes'] / 2**30:.2f} | {row['load_s']:.1f}, {row['compile_s']:.1f} | "
            f"{_share(row['agreement'])} |"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
