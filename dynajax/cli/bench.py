"""`bench`: how fast a model runs here, policies against each other."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli import device_env
from dynajax.cli.collecting import check_one_source, windows_from
from dynajax.cli.generate import watch
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import figure, progress, size, table, write_json, write_out
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from dynajax.benching.bench import Wanted
    from dynajax.benching.rounds import Task, Tokens
    from dynajax.config import EngineConfig, ModelSpec

LEAST_TOPIC_VOCAB = 528  # what topics:N needs


def bench(
    context: typer.Context,
    engine: EngineFlags,
    output: OutputFlags,
    prompt_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of a row's prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens decoded after it.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Counted rounds of each engine.")] = 5,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="What is read: UTF-8 text, or a folder of .txt files.")
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(metavar="FILE|random:N|topics:N", help="Token ids instead of a text; topics:N if not given."),
    ] = None,
) -> None:
    """Measure a model here: its host kernel, the link to the device, prompts and decoding apart, loading and memory.

    --policy and --sparsity take several, with commas: each pair is a process of its own, and all take turns, a round of
    --prompt-tokens and --new-tokens each, the same tokens for all, while the others are halted. The first round of each
    warms up and is not counted; compilation is told apart, and nothing compiled before is used. Give a --vram-budget
    that the model does not fit, else every policy has everything on the device. best and median are over all single
    steps; of the floor is how much of the best step it would take to read the weights and the cache once.
    On the CPU backend host memory is the device too: there is no link, and the speeds say nothing about a GPU.
    """
    from dataclasses import replace

    if text is not None or ids is not None:
        check_one_source(text, ids)
    policies, sparsities = several("--policy", engine.policy), several("--sparsity", engine.sparsity)
    config = replace(engine, policy=policies[0], sparsity=sparsities[0]).config()
    from dynajax.benching.bench import bench as measured
    from dynajax.benching.machine import machine
    from dynajax.benching.rounds import table as rows_table
    from dynajax.model_folder import model_folder

    here = machine()  # before this process changes its environment
    device_env.size_pool(config.vram_budget)
    context.obj.hold()
    with closing(progress()) as report:
        step = watch(report, context.obj)
        folder = model_folder(engine.model, offline=config.offline, progress=step)
        lengths = (prompt_tokens, new_tokens)
        wanted = wanted_of(engine.model, folder, config, lengths, (sparsities, policies), repeat)
        task, spec = wanted.task, wanted.spec
        found = measured(wanted, tokens_from(text, ids, folder, spec, task), step)
    told: dict[str, Any] = {**here, "tokens": str(text or ids or default_ids(spec, task)), **found}
    if output.json:
        write_json(told)
        return
    write_out(head_of(told) + "\n\n" + rows_table(told["rows"]) + "\n")


def wanted_of(
    model: str,
    folder: Path,
    config: EngineConfig,
    lengths: tuple[int, int],  # of prompts, of what follows
    pairs: tuple[list[str], list[str]],  # sparsities, policies
    rounds: int,
) -> Wanted:
    """What to measure, with threads and context filled in. UsageError: it cannot be."""
    from dataclasses import replace

    from dynajax.benching.bench import Wanted, check
    from dynajax.benching.rounds import Task
    from dynajax.checkpoint import read_spec
    from dynajax.cli.prompts import default_ctx
    from hostcompute import default_threads

    spec, threads = read_spec(folder), config.threads or default_threads()
    ctx = config.ctx or default_ctx(*lengths, spec.max_positions)
    task = Task(model=model, prompt_tokens=lengths[0], new_tokens=lengths[1], batch=config.batch, threads=threads)
    wanted = Wanted(
        task=task, folder=folder, spec=spec, config=replace(config, ctx=ctx, threads=threads), sparsities=pairs[0],
        policies=pairs[1], rounds=rounds,
    )  # fmt: skip
    check(wanted)
    return wanted


def several(flag: str, value: str) -> list[str]:
    """The names of "A,B", each once. UsageError: there is none."""
    names = list(dict.fromkeys(name.strip() for name in value.split(",")))
    if "" in names:
        raise UsageError(f"{flag} takes names with commas between them, got {value!r}")
    return names


def default_ids(spec: ModelSpec, task: Task) -> str:
    """As many ids as all rows need: of topics where the vocabulary has them."""
    kind = "topics" if spec.vocab >= LEAST_TOPIC_VOCAB else "random"
    return f"{kind}:{task.batch * task.ctx}"


def tokens_from(text: Path | None, ids: str | None, folder: Path, spec: ModelSpec, task: Task) -> Tokens:
    """Prompts [B, T] and what follows them [N, B], each row a window of its own. UsageError: there is too little."""
    most = task.batch * task.ctx
    if text is None and ids is None:
        from dynajax.cli.prompts import prompt_ids

        made = prompt_ids(default_ids(spec, task), spec, 0, most).tolist()
        windows = [made[at : at + task.ctx] for at in range(0, most, task.ctx)]
    else:
        windows = windows_from(text, ids, 4 * most, folder, spec, task.ctx)
    rows = [window for window in windows if len(window) == task.ctx][: task.batch]
    if len(rows) < task.batch:
        raise UsageError(
            f"{text or ids} has not {task.batch} x {task.ctx} tokens in a row: give more, or lower --new-tokens"
        )
    following = [[row[task.prompt_tokens + at] for row in rows] for at in range(task.new_tokens)]
    return [row[: task.prompt_tokens] for row in rows], following


def head_of(told: dict[str, Any]) -> str:
    """Machine, kernel and link, for people."""
    kernel, link = told["kernel"], told["link"]
    rows = [
        ("machine", f"{told['machine']}, {told['cores']} cores, {size(told['memory_bytes'])}"),
        ("device", f"{told['device']} ({told['platform']}), jax {told['jax']}"),
        ("commit, load", f"{told['commit']}, {told['load_average']:.2f}"),
        ("reading", figure(told["read_gb_s"], ".1f", " GB/s")),
    ]
    if kernel is not None:
        share = f"{kernel['share_of_read_bandwidth']:.0%} of reading in turn"
        rows.append((f"host rows, {kernel['dtype']}", f"{kernel['gb_s']:.1f} GB/s, {share}"))
        rows.append(("gather", f"{kernel['gather']['median_gb_s']:.1f} GB/s"))
    if link is not None:
        rows.append((f"link, {link['staging']}", f"{link['gb_s']:.1f} GB/s, {1e6 * link['t0_s']:.0f} us"))
    return table(rows)
