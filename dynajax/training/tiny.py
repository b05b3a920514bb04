"""tiny-relullama: its shape, its run and the folder it becomes."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from tokenizers import Tokenizer

from dynajax.checkpoint import STATS_NAME, Checkpoint, write_stats
from dynajax.config import Activation, ExpertSpec, ModelSpec, RouterSpec
from dynajax.errors import StorageError
from dynajax.models.decoder import Decoder
from dynajax.training.export import swap_in, write_card, write_weights
from dynajax.training.loop import TrainConfig, TrainResult, train
from dynajax.training.report import Measurements, frequencies, measure
from dynajax.training.tokenizer import encode_corpus, encode_text

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
TINY_MOE = ModelSpec(
    layers=6,
    hidden=192,
    ffn=96,
    heads=3,
    kv_heads=3,
    head_dim=64,
    vocab=4096,
    activation=Activation(kind="silu"),
    qk_norm=True,
    tied=True,
    max_positions=512,
    dtype="bfloat16",
    bos_id=0,
    eos_ids=(0,),
    experts=ExpertSpec(router=RouterSpec(experts=16, top_k=4, renormalise=True), width=96, layers=tuple(range(6))),
)
ARCHITECTURES = {"relullama": ("tiny-relullama", TINY_RELULLAMA), "moe": ("tiny-moe", TINY_MOE)}
STATS_TOKENS = 200_000


class Folders(NamedTuple):
    """Where a run reads and writes."""

    corpus: Path
    sample: Path  # held-out texts
    run: Path  # checkpoints
    out: Path  # holds the tokenizer; replaced by the finished model folder, or left as it was


def train_tiny(folders: Folders, arch: str, *, minutes: float, seed: int, resume: bool) -> Measurements:
    """Train one of `ARCHITECTURES`, then measure what was written on the held-out sample: bfloat16, not the float32 of
    the run."""
    corpus, sample, run, out = folders
    if not (out / "tokenizer.json").exists():
        raise StorageError(f"no tokenizer.json in {out}: run scripts/build_corpus.py --tokenizer {out} first")
    tokens = encode_corpus(corpus, out / "tokenizer.json")
    cfg = TrainConfig(minutes=minutes, seed=seed)
    name, spec = ARCHITECTURES[arch]
    result = train(spec, tokens["train"], cfg, run, resume=resume)
    draft = out.with_name(out.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    write_weights(draft, result.model, out)
    checkpoint, model = Checkpoint.open(draft), as_written(result.model)
    frequency, counted = frequencies(model, stats_sample(tokens["train"], STATS_TOKENS))
    write_stats(draft / STATS_NAME, fingerprint=checkpoint.fingerprint(), frequency=frequency, tokens=counted)
    manifest = json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))
    facts = _facts(result, cfg, checkpoint.parameters) | {"stats_tokens": counted, "corpus": manifest}
    measured = measure(model, heldout_sample(sample, draft / "tokenizer.json"))
    write_card(draft, name, facts, measured)
    swap_in(draft, out)
    return measured


def as_written(model: Decoder) -> Decoder:
    """The model with its weights rounded to bfloat16 and back, which is what its folder holds."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), state))


def heldout_sample(folder: Path, tokenizer_file: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """The committed held-out texts as token ids, by source."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    paths = sorted(folder.glob("*.txt"))
    return {path.stem: encode_text(path.read_text(encoding="utf-8"), tokenizer) for path in paths}


def stats_sample(streams: dict[str, npt.NDArray[np.uint16]], tokens: int) -> npt.NDArray[np.uint16]:
    """The first tokens of every source, in proportion to its length."""
    total = sum(len(stream) for stream in streams.values())
    return np.concatenate([s[: len(s) * tokens // total] for _, s in sorted(streams.items())])


def _facts(result: TrainResult, cfg: TrainConfig, parameters: int) -> dict[str, object]:
    return {
        "parameters": parameters,
        "minutes": round(result.elapsed_s / 60, 1),
        "seed": cfg.seed,
        "steps": result.steps,
        "tokens": result.tokens,
        "machine": f"2 shared cores of an {_cpu_name()}, Python {platform.python_version()}",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
