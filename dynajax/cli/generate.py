"""`generate`: one prompt, one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli import device_env
from dynajax.cli.interrupts import Interrupts
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import Answer, Progress, figure, note, progress, size, table, write_json, write_out
from dynajax.cli.plan import budget_rows
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from dynajax import Engine
    from dynajax.budget import MemoryPlan
    from dynajax.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """Exactly one of the two; `chat` makes the prompt a message."""

    prompt: Annotated[str | None, typer.Option(metavar="TEXT|-", help="The prompt; - reads stdin.")] = None
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="FILE|random:N|topics:N", help="Token ids instead: .npy or text, or made up.")
    ] = None

    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message: put it into the model's chat template.")
    ] = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_ids is None):
            raise UsageError("give one of --prompt TEXT, --prompt - (reads stdin) and --prompt-ids FILE")
        if self.chat and self.prompt is None:
            raise UsageError("--chat goes with --prompt, not with --prompt-ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen; what is None is off, or as the model's makers advise once a temperature is set."""

    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate at most.")] = 128
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the most likely token.")] = 0.0
    top_k: Annotated[
        int | None, typer.Option(metavar="N", help="Sample from the N most likely tokens; 0: from all.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Sample from the smallest set of this probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(metavar="X", help="Drop tokens less likely than X times the most likely one.")
    ] = None
    repetition_penalty: Annotated[float | None, typer.Option(metavar="X", help="Above 1: repeat less.")] = None
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None
    seed: Annotated[int | None, typer.Option(metavar="N", help="Makes sampling repeatable; drawn if not given.")] = None

    def params(self) -> SamplingParams:
        """Checked; UsageError names what is out of range."""
        from dynajax.sampling import SamplingParams

        values: dict[str, Any] = asdict(self) | {"stop": tuple(self.stop or ())}
        return SamplingParams(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowFlags(OutputFlags):
    """OutputFlags for a text that can be shown as it comes, and for files that tell how it was made."""

    no_stream: Annotated[bool, typer.Option("--no-stream", help="Show the text in one piece at the end.")] = False
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write what ran when, as a Chrome trace for ui.perfetto.dev."),
    ] = None
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Write which neurons were live, or where tokens went among the experts, and what was on the device; "
            "slower, in predicted mode above all. With --set record_scores=true also what was predicted.",
        ),
    ] = None

    def __post_init__(self) -> None:
        for path in (self.timeline, self.record):
            if path is not None:
                from dynajax.checkpoint.drafts import refuse_unwritable

                refuse_unwritable(path)


def generate(
    context: typer.Context, prompt: PromptFlags, sampling: SamplingFlags, engine: EngineFlags, show: ShowFlags
) -> None:
    """Generate text after a prompt."""
    params, config = sampling.params(), engine.config()
    device_env.configure(config.vram_budget)
    interrupts: Interrupts = context.obj
    from dynajax.model_folder import model_folder

    with closing(progress()) as report:
        folder = model_folder(engine.model, offline=config.offline, progress=report)
    given, ctx_tokens = read_prompt(engine.model, folder, prompt, params, config.ctx)
    interrupts.hold()
    from dynajax import Engine

    settings: dict[str, Any] = asdict(replace(config, ctx=ctx_tokens))
    if not show.json:
        settings["on_plan"] = show_plan
    with (
        closing(progress()) as report,
        Engine.from_pretrained(engine.model, folder=folder, progress=watch(report, interrupts), **settings) as llm,
    ):
        interrupts.ask(llm.stop)
        write_seen = seeing(llm, show)
        with closing(Answer(stream=not show.no_stream and not show.json, silent=show.json)) as answer:
            events = llm.stream(given, **asdict(params))  # forgets an earlier stop
            interrupts.check()
            for event in events:
                report.close()
                answer.add(event.text)
        result, layers = llm.last_result.to_json(), llm.stats()["layers"]
        write_seen()
    if show.json:
        write_json(result)
    else:
        if result["text"] is None:
            write_out(" ".join(map(str, result["token_ids"])) + "\n")
        note(summary(result, params.max_new_tokens))
        if layers and result["units"]["kind"] == "expert":
            note(experts_line(layers, result["units"]))
    interrupts.check()


def seeing(llm: Engine, show: ShowFlags) -> Callable[[], None]:
    """Start what --timeline and --record ask for; the result ends it and writes the files."""
    from dynajax.timeline import Timeline
    from dynajax.trace import Recorder

    timeline = None if show.timeline is None else Timeline()
    recorder = None if show.record is None else Recorder()
    llm.trace(timeline)
    llm.record(recorder)

    def write() -> None:
        llm.trace(None)
        llm.record(None)
        for path, seen in ((show.timeline, timeline), (show.record, recorder)):
            if path is not None and seen is not None:
                seen.write(path)
                note(f"written to {path}")

    return write


def read_prompt(
    model: str, folder: Path, prompt: PromptFlags, params: SamplingParams, ctx: int | None
) -> tuple[str | list[int], int]:
    """The prompt as the engine takes it, and the context: `ctx`, or what prompt and answer need.

    Reads config and tokenizer only, so that a prompt that does not fit costs no loading.
    """
    from dynajax.checkpoint import read_spec
    from dynajax.cli import prompts

    spec = read_spec(folder)
    if prompt.prompt_ids is not None:
        given = ids = prompts.prompt_ids(prompt.prompt_ids, spec, params.seed or 0).tolist()
    else:
        from dynajax.text import load_tokenizer

        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise UsageError(f"{model} has no tokenizer: give --prompt-ids instead of --prompt")
        given = prompts.prompt_text(prompt.prompt or "")
        if prompt.chat:
            from dynajax.chat import chat_ids

            given = ids = chat_ids(folder, tokenizer, [{"role": "user", "content": given}])
        else:
            ids = tokenizer.encode(given)
    limit = ctx or spec.max_positions
    if len(ids) > limit:
        remedy = "shorten it or raise --ctx" if limit < spec.max_positions else "shorten it, the model takes no more"
        raise UsageError(f"the prompt has {len(ids)} tokens, more than the context of {limit}: {remedy}")
    begin = 1  # the engine may put a begin-of-text token in front
    return given, ctx or prompts.default_ctx(len(ids) + begin, params.max_new_tokens, spec.max_positions)


def watch(report: Progress, interrupts: Interrupts) -> Callable[[str, int, int], None]:
    """`report`, ending the command at the next step of opening a model after a signal; a prompt ends by `stop`."""

    def step(stage: str, done: int, total: int) -> None:
        report(stage, done, total)
        if stage != "prefill":
            interrupts.check()

    return step


def show_plan(memory: MemoryPlan) -> None:
    """The budget table on stderr, before anything is loaded."""
    note(table(budget_rows(memory)))


def summary(result: dict[str, Any], asked: int) -> str:
    """The figures of a generation in a few lines, from its JSON object; `asked`: how many tokens were wanted."""
    timings, memory, finish = result["timings"], result["memory"], result["finish_reason"]
    if finish == "length" and len(result["token_ids"]) < asked:
        finish = "the context is full"
    hot_share, cold_share = result["units"]["hot_share"], result["ffn"]["cold_share"]
    lines = (
        f"{len(result['token_ids'])} tokens ({finish}) after a prompt of {result['prompt_tokens']}; "
        f"policy {result['policy']}, sparsity {result['sparsity']}, seed {result['seed']}",
        f"prefill {figure(timings['prefill_tok_s'])} tok/s, decode {figure(timings['decode_tok_s'])} tok/s; "
        f"loading {timings['load_s']:.1f} s, compiling {timings['compile_s']:.1f} s",
        f"hot share {figure(hot_share, '.1%')}, cold share of FFN time {figure(cold_share, '.1%')}",
        f"device memory: peak {size(memory['peak_bytes'])} of a budget of {size(memory['budget_bytes'])}",
    )
    return "\n".join(lines)


def experts_line(layers: Sequence[Mapping[str, Any]], units: Mapping[str, Any]) -> str:
    """What experts did while decoding, from `Engine.stats()["layers"]` and the units of the result: which were found on
    the device, what was brought there, and for which share of a layer's time for experts each side computed some."""

    def mean(name: str, weight: str | None = None) -> float | None:
        told = [(row[name], 1.0 if weight is None else row[weight]) for row in layers if row[name] is not None]
        total = sum(share for _, share in told)
        return sum(value * share for value, share in told) / total if total else None

    hits, idle = mean("hit_share", "live_per_step"), [mean("host_idle_share"), mean("device_idle_share")]
    host, device = (figure(None if share is None else 1 - share, ".0%") for share in idle)
    loads = sum(row["loads_per_step"] or 0.0 for row in layers)
    ahead = sum(row["prefetched"] for row in layers)
    used = sum((row["prefetch_used_share"] or 0.0) * row["prefetched"] for row in layers)
    parts = [
        f"experts: {figure(hits, '.1%')} found on the device (by tokens {figure(units['hot_share'], '.1%')})",
        f"{loads:.2f} brought there a step, {size(units['migrated_bytes'])} in all",
        *([f"{used / ahead:.0%} of {ahead} prefetches used"] if ahead else []),
        f"busy: host {host}, device {device}",
    ]
    return "; ".join(parts)
