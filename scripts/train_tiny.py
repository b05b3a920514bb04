"""Train the small model that ships with the repository, from the corpus of scripts/build_corpus.py.

    python scripts/train_tiny.py --minutes 90 --out dynajax/assets/tiny-relullama

Stops by the clock, always annealed; `--resume` goes on from the newest checkpoint of `--run`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def main(
    corpus: Annotated[Path, typer.Option(help="Folder written by build_corpus.py.")] = Path("corpus"),
    run: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/tiny-relullama"),
    sample: Annotated[Path, typer.Option(help="Held-out texts for the model card.")] = Path("tests/data/heldout"),
    out: Annotated[Path, typer.Option(help="Folder of the tokenizer; the model is put there.")] = Path("runs/tiny"),
    minutes: Annotated[float, typer.Option(help="Training time in all, resumed parts included.")] = 90.0,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Train tiny-relullama and write an ordinary Hugging Face folder with a model card."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)
    from dynajax.training.tiny import train_tiny

    train_tiny(corpus, sample, run, out, minutes=minutes, seed=seed, resume=resume)


if __name__ == "__main__":
    typer.run(main)
