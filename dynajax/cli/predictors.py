"""`train-predictors`: guesses of which neurons or experts a token needs, learned while the model reads."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli import device_env
from dynajax.cli.collecting import check_one_source
from dynajax.cli.generate import watch
from dynajax.cli.options import EngineFlags, OutputFlags
from dynajax.cli.output import note, progress, size, write_json, write_out
from dynajax.config import check_number, check_share, parse_budget
from dynajax.errors import UsageError

if TYPE_CHECKING:
    from dynajax.checkpoint import Checkpoint
    from dynajax.predictor_training.experts import TrainedRouting
    from dynajax.predictor_training.texts import Text
    from dynajax.predictor_training.train import Recipe, Trained

KINDS = ("auto", "gate", "mlp")
DENSITY = 0.5
RECIPE = ("lead", "kind", "density", "passes", "seed", "checkpoint_tokens")  # flags that are fields of Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFlags:
    """Exactly one of the first two."""

    text: Annotated[Path | None, typer.Option(metavar="FILE|DIR", help="UTF-8 text, or a folder of .txt files.")] = None
    ids: Annotated[str | None, typer.Option(metavar="FILE|random:N|topics:N", help="Token ids instead of a text.")] = (
        None
    )
    tokens: Annotated[int, typer.Option(metavar="N", help="Read so many, in samples from all over the text.")] = 700_000

    def __post_init__(self) -> None:
        check_one_source(self.text, self.ids)
        check_number("--tokens", self.tokens, 100, 2**31, whole=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFlags:
    """What is trained, and how."""

    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The predictor folder to write; else the model's in the cache.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run for this --out.")] = False
    lead: Annotated[int, typer.Option(metavar="K", help="Predict up to K layers ahead; neurons of the same, too.")] = 1
    density: Annotated[
        float, typer.Option(metavar="D", help="Share of the neurons to predict where no activation is zero (SiLU).")
    ] = DENSITY
    kind: Annotated[
        str, typer.Option(metavar="|".join(KINDS), help="Of neurons: low-bit gates, MLPs, or the better.")
    ] = "auto"
    passes: Annotated[int, typer.Option(metavar="N", help="How often each token is used.")] = 4
    seed: Annotated[int, typer.Option(metavar="N", help="Of the samples and of the training.")] = 0
    buffer: Annotated[str, typer.Option(metavar="SIZE", help="Host memory for tokens, in which they are mixed.")] = (
        "1GiB"
    )
    checkpoint_tokens: Annotated[int, typer.Option(metavar="N", help="Keep the state every N tokens.")] = 50_000

    def __post_init__(self) -> None:
        check_number("--lead", self.lead, 0, 1000, whole=True)
        check_share("--density", self.density)
        if self.kind not in KINDS:
            raise UsageError(f"--kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, low in (("passes", 1), ("seed", 0), ("checkpoint_tokens", 1)):
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), low, 2**31, whole=True)
        self.buffer_bytes()

    def buffer_bytes(self) -> int:
        """UsageError if it is not a size."""
        count = parse_budget(self.buffer) if self.buffer.strip()[-1:].isalpha() else None
        if not isinstance(count, int):
            raise UsageError(f"--buffer must be a size such as 1GiB, got {self.buffer!r}")
        return count

    def refuse_for_experts(self) -> None:
        """UsageError: what only predictors of neurons have."""
        given = {"--kind": self.kind != "auto", "--density": self.density != DENSITY}
        for name in (name for name, is_given in given.items() if is_given):
            raise UsageError(f"{name} is for neurons, and this model has experts: leave it out")

    def recipe(self) -> Recipe:
        """The same for the library, which loads jax."""
        from dynajax.predictor_training.train import Recipe

        values: dict[str, Any] = {name: value for name, value in asdict(self).items() if name in RECIPE}
        return Recipe(**values, buffer_bytes=self.buffer_bytes())


def train_predictors(
    context: typer.Context, text: TextFlags, flags: RecipeFlags, engine: EngineFlags, output: OutputFlags
) -> None:
    """Train predictors of a model's live neurons, or of where a mixture's tokens go, while it reads a text.

    It tells how good they are. An interrupted run goes on with --resume and ends with the same predictors, bit for bit.
    """
    config = engine.config()
    device_env.configure(config.vram_budget)
    context.obj.hold()
    logging.getLogger("absl").setLevel(logging.ERROR)
    from dynajax.checkpoint import Checkpoint
    from dynajax.checkpoint.places import predictors_folder
    from dynajax.model_folder import model_folder
    from dynajax.predictor_training import expert_report, report
    from dynajax.predictor_training.experts import TrainedRouting, train_experts
    from dynajax.predictor_training.runs import refuse_taken
    from dynajax.predictor_training.train import train

    recipe = flags.recipe()
    with closing(progress()) as shown:
        step = watch(shown, context.obj)
        folder = model_folder(engine.model, offline=config.offline, progress=step)
        checkpoint = Checkpoint.open(folder)
        if experts := checkpoint.spec.experts is not None:
            flags.refuse_for_experts()
        out = flags.out or predictors_folder(checkpoint.fingerprint())
        refuse_taken(out)
        read, run = text_of(text, checkpoint, config.ctx, recipe.seed), train_experts if experts else train
        found = run(engine.model, checkpoint, config, recipe, read, out, resume=flags.resume, progress=step)
    if flags.resume and not found.resumed_at:
        note("there was nothing to go on with: the run began anew")
    if isinstance(found, TrainedRouting):
        kind, rows = "experts", expert_report.rows_of(found.manifest)
        table, draw = expert_report.table_of, expert_report.picture
    else:
        kind, rows, table, draw = recipe.kind, report.rows_of(found.manifest), report.table_of, report.picture
    record = told(found, recipe, kind, rows) | {"model": engine.model, "out": str(out), "disk_bytes": disk_bytes(out)}
    if not report.write_report(out, record, draw):
        note("no report.png, matplotlib is not installed: pip install dynajax[plot]")
    if output.json:
        write_json(record)
        return
    write_out(table(rows) + "\n")
    note(f"{record['tokens']} tokens in {found.seconds:.0f} s, written to {out} ({size(disk_bytes(out))})")


def text_of(text: TextFlags, checkpoint: Checkpoint, ctx: int | None, seed: int) -> Text:
    """Samples of the text, at most as long as the context; says so if there are fewer tokens than were asked for."""
    from dynajax import collecting
    from dynajax.cli import prompts
    from dynajax.predictor_training import texts
    from dynajax.predictor_training.train import sample_tokens

    if text.text is not None:
        streams = texts.encode_texts(collecting.read_texts(text.text), checkpoint.folder)
    else:
        streams = [prompts.prompt_ids(text.ids or "", checkpoint.spec, seed, most=prompts.FILE_BYTES)]
    longest = min(sample_tokens() + 1, ctx or checkpoint.spec.max_positions)
    if longest < 2:
        raise UsageError(f"--ctx must be at least 2 to train, got {ctx}")
    windows = texts.samples_of(streams, text.tokens, longest - 1, seed)
    found = texts.seen_tokens(windows)
    if found < text.tokens:
        note(f"the text has {found} of the {text.tokens} tokens asked for: it is read once")
    return texts.Text(windows, f"{found} tokens of {text.text or text.ids}")


def told(found: Trained | TrainedRouting, recipe: Recipe, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run for --json and report.json, but for names and places."""
    leads = sorted({row["lead"] for row in rows})
    return {
        "tokens": found.manifest.tokens,
        "resumed_at": found.resumed_at,
        "seconds": round(found.seconds, 1),
        "kind": kind,
        "lead": recipe.lead,
        "wanted_density": found.density,
        "bytes": {str(lead): sum(r["bytes"] for r in rows if r["lead"] == lead) for lead in leads},
        "rows": rows,
    }


def disk_bytes(folder: Path) -> int:
    """Of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
