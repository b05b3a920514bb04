"""Fetch the public-domain training texts, check their hashes, and write train/, heldout/ and manifest.json.

    python scripts/build_corpus.py --out corpus

Needs `apt-get` (Debian bookworm, after `apt-get update`) and `npm`. `--tokenizer DIR` also trains the tokenizer
and caches the token ids; `--sample DIR` only copies a small held-out sample out of the corpus that is there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def main(
    out: Annotated[Path, typer.Option(help="Folder of the corpus; an older corpus there is replaced.")] = Path(
        "corpus"
    ),
    sample: Annotated[Path | None, typer.Option(help="Only copy a held-out sample of 200 kB into this folder.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Then train a tokenizer into this folder.")] = None,
    vocab: Annotated[int, typer.Option(min=257, max=65536, help="Tokens of the tokenizer.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write the training corpus of tiny-relullama."""
    try:
        report = run(out, sample, tokenizer, vocab)
    except OSError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(6) from None
    for name, numbers in report.items():
        print(f"{name:20}" + "  ".join(f"{key} {value}" for key, value in numbers.items() if isinstance(value, int)))
    if as_json:
        print(json.dumps(report))


def run(out: Path, sample: Path | None, tokenizer: Path | None, vocab: int) -> dict[str, dict]:
    """What was asked for, as {source: {what: number or text}}."""
    from dynajax.training import corpus

    if sample is not None:
        return {name: {"sample_bytes": size} for name, size in corpus.write_sample(out, sample).items()}
    report = corpus.build(out)
    if tokenizer is not None:
        from dynajax.training.tokenizer import encode_corpus, train_tokenizer

        train_tokenizer(out, tokenizer, vocab)
        for split, streams in encode_corpus(out, tokenizer / "tokenizer.json").items():
            for name, ids in streams.items():
                report[name][f"{split}_tokens"] = len(ids)
    return report


if __name__ == "__main__":
    typer.run(main)
