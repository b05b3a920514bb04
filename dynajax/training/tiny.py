"""tiny-relullama: its shape, its run and the folder it becomes."""

from __future__ import annotations

from pathlib import Path

from dynajax.config import Activation, ModelSpec
from dynajax.training.export import write_model
from dynajax.training.loop import TrainConfig, train
from dynajax.training.report import measure
from dynajax.training.tokenizer import encode_corpus

TINY_RELULLAMA = ModelSpec(
    layers=8,
    hidden=192,
    ffn=768,
    heads=3,
    kv_heads=3,
    head_dim=64,
    vocab=4096,
    activation=Activation(kind="relu"),
    tied=True,
    max_positions=512,
    dtype="bfloat16",
    bos_id=0,
    eos_ids=(0,),
)


def train_tiny(corpus: Path, run: Path, out: Path, *, minutes: float, seed: int, resume: bool) -> None:
    """Train, measure on the held-out texts, and write the model folder `out` whole or not at all."""
    tokens = encode_corpus(corpus, out / "tokenizer.json")
    cfg = TrainConfig(minutes=minutes, seed=seed)
    result = train(TINY_RELULLAMA, tokens["train"], cfg, run, resume=resume)
    write_model(out, TINY_RELULLAMA, result, measure(result.model, tokens["heldout"]), cfg)
