"""`bench`: one model under several policies and kinds of skipping, each an engine of its own, rounds in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dynajax import errors
from dynajax.benching.bandwidth import Bandwidth
from dynajax.benching.children import Contender, with_root
from dynajax.benching.rounds import Round, Task, Tokens, fit_together, measure, row_of
from dynajax.config import EngineConfig, ModelSpec
from dynajax.errors import UsageError

KERNEL_REPEAT = 40
WIDENED = 2  # a 16-bit file's weights, held as float32

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is compared: every sparsity with every policy."""

    task: Task
    folder: Path
    spec: ModelSpec
    config: EngineConfig  # whose sparsity and policy are those of the first
    sparsities: Sequence[str]
    policies: Sequence[str]
    rounds: int


def check(wanted: Wanted) -> None:
    """UsageError for what cannot be measured."""
    task, spec, ctx = wanted.task, wanted.spec, wanted.config.ctx
    if spec.encoder is not None:
        raise UsageError(f"{task.model} has an encoder: bench measures models that only decode")
    if ctx is None or not task.ctx <= ctx <= spec.max_positions:
        raise UsageError(
            f"prompt and new tokens are {task.ctx}, the context is {ctx} and the model's {spec.max_positions}: "
            "lower --prompt-tokens or --new-tokens, or raise --ctx"
        )


def contenders(wanted: Wanted) -> list[Contender]:
    """Named SPARSITY:POLICY, as they were asked for."""
    stored = sum(path.stat().st_size for path in wanted.folder.glob("*.safetensors"))
    command = (sys.executable, "-m", "dynajax.benching.session")
    found = []
    for sparsity in wanted.sparsities:
        for policy in wanted.policies:
            config = replace(wanted.config, sparsity=sparsity, policy=policy)  # refused before anything is started
            settings = {"model": wanted.task.model, **asdict(config)}
            found.append(
                Contender(
                    name=f"{sparsity}:{policy}", engine="dynajax", command=command, settings=settings,
                    file_bytes=WIDENED * stored, row={"budget": str(config.vram_budget)},
                )
            )  # fmt: skip
    return found


def probed(wanted: Wanted) -> dict[str, Any]:
    """Device, kernel and link, measured before any engine is there."""
    config = wanted.config
    asked = {
        "folder": str(wanted.folder), "dtype": config.dtype, "host_dtype": config.host_dtype,
        "threads": wanted.task.threads, "staging": config.staging, "repeat": KERNEL_REPEAT,
    }  # fmt: skip
    done = subprocess.run(
        (sys.executable, "-m", "dynajax.benching.probe"), env=with_root(), input=json.dumps(asked),
        stdout=subprocess.PIPE, text=True, check=False, process_group=0,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"measuring kernel and link ended with code {done.returncode}: its messages are above")
    told = json.loads(done.stdout)
    if "error" in told:
        raise getattr(errors, told["kind"])(told["error"])
    return told


def bench(wanted: Wanted, tokens: Tokens, progress: Progress) -> dict[str, Any]:
    """Device, kernel, link, read bandwidth and rows. `progress` is told of the stage `bench` and may raise."""
    ones = contenders(wanted)
    told = probed(wanted)
    progress("bench", 0, total := wanted.rounds * len(ones))
    together = told["platform"] == "cpu" and fit_together(ones)

    def on_round(turn: int, one: Contender, found: Round) -> None:
        progress("bench", turn * len(ones) + ones.index(one) + 1, total)

    band = Bandwidth(wanted.task.threads)
    try:
        found = measure(ones, tokens, wanted.rounds, band, on_round, together=together)
    finally:
        band.close()
    first = found[ones[0].name]
    rows = [row_of(one, found[one.name], first, wanted.task, band.best_gb_s) for one in ones]
    return {**told, "read_gb_s": band.best_gb_s, "together": together, "rows": rows}
