"""`build-corpus` and `train-tiny`: how the model that ships with the repository is made."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from dynajax.cli.options import OutputFlags
from dynajax.cli.output import table, write_json, write_out
from dynajax.errors import UsageError

HELDOUT = Path("tests/data/heldout")


def build_corpus(
    output: OutputFlags,
    out: Annotated[Path, typer.Option(help="Folder of the corpus; an older corpus there is replaced.")] = Path(
        "corpus"
    ),
    sample: Annotated[Path | None, typer.Option(help="Only copy a held-out sample of 200 kB into this folder.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Then train a tokenizer into this folder.")] = None,
    vocab: Annotated[int, typer.Option(min=257, max=65536, help="Tokens of the tokenizer.")] = 4096,
) -> None:
    """Fetch the public-domain training texts, check their hashes, and split them."""
    from dynajax.training import corpus

    if sample is not None:
        report = {name: {"sample_bytes": size} for name, size in corpus.write_sample(out, sample).items()}
    else:
        report = corpus.build(out)
        if tokenizer is not None:
            _train_tokenizer(report, out, tokenizer, vocab)
    if output.json:
        write_json(report)
        return
    for name, numbers in report.items():
        counts = [f"{key} {value}" for key, value in numbers.items() if isinstance(value, int)]
        write_out(table([(name, "  ".join(counts))]) + "\n")


def train_tiny(
    output: OutputFlags,
    arch: Annotated[str, typer.Option(help="relullama: dense, ReLU; moe: a mixture of experts.")] = "relullama",
    corpus: Annotated[Path, typer.Option(help="Folder written by build-corpus.")] = Path("corpus"),
    run: Annotated[Path | None, typer.Option(help="Folder of the checkpoints.", show_default="runs/NAME")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the tokenizer; the model is put there.")] = Path("runs/tiny"),
    minutes: Annotated[float, typer.Option(help="Training time in all, resumed parts included.")] = 90.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train tiny-relullama or tiny-moe and write an ordinary Hugging Face folder with a model card. Its held-out texts
    are those of tests/data/heldout."""
    logging.getLogger("absl").setLevel(logging.WARNING)
    from dynajax.training.tiny import ARCHITECTURES, Folders, train_tiny

    if arch not in ARCHITECTURES:
        raise UsageError(f"--arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    folders = Folders(corpus, HELDOUT, run or Path("runs") / ARCHITECTURES[arch][0], out)
    measured = train_tiny(folders, arch, minutes=minutes, seed=seed, resume=resume)
    if output.json:
        write_json(measured.to_json())
    else:
        write_out(table([(name, f"{loss:.3f} nats") for name, loss in measured.loss.items()]) + "\n")


def _train_tokenizer(report: dict[str, dict], corpus: Path, folder: Path, vocab: int) -> None:
    from dynajax.training.tokenizer import encode_corpus, train_tokenizer

    train_tokenizer(corpus, folder, vocab)
    for split, streams in encode_corpus(corpus, folder / "tokenizer.json").items():
        for name, ids in streams.items():
            report[name][f"{split}_tokens"] = len(ids)
