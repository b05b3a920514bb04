"""SparseLLM/ReluLLaMA-13B in small: its files, spelled as published, and its predictors; and commands on a hub."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from safetensors.numpy import save_file

from dynajax.checkpoint.aliases import HUB, PREDICTOR_REPOS
from dynajax.testing.families import FAMILIES
from tests.convert.torch_files import save

ROOT = Path(__file__).parents[2]
HELDOUT = ROOT / "tests" / "data" / "heldout"
ALIAS = "relullama-13b"
REPO, PREDICTOR_REPO = HUB[ALIAS], PREDICTOR_REPOS[ALIAS]
SHARDS = 6
LAYERS, HIDDEN, FFN, VOCAB = 12, 64, 192, 700  # twelve layers: text puts 10 before 2


def published_config(**sizes: Any) -> dict[str, Any]:
    """config.json of ReLULLaMA with other sizes. It has no rope_theta."""
    config = FAMILIES["llama"].config(**sizes)
    assert "rope_theta" not in config and config["hidden_act"] == "relu" and config["rms_norm_eps"] == 1e-5
    return config | {"pad_token_id": 0, "transformers_version": "4.31.0"}


def write_model(folder: Path, *, pickles: bool, hidden: int = HIDDEN, ffn: int = FFN) -> Path:
    """Random weights in six shards with an index, a SentencePiece tokenizer, and what else lies in the repository."""
    folder.mkdir(parents=True)
    config = published_config(
        num_hidden_layers=LAYERS, hidden_size=hidden, intermediate_size=ffn, vocab_size=VOCAB,
        max_position_embeddings=2048,
    )  # fmt: skip
    tensors: dict[str, np.ndarray] = dict(FAMILIES["llama"].tensors(config, seed=3))
    if pickles:  # as older versions of transformers saved them
        frequencies = 1 / 10_000 ** (np.arange(0, hidden // 4, 2, dtype=np.float32) / (hidden // 4))
        tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(LAYERS)}
    stem, end, index = (
        ("pytorch_model", "bin", "pytorch_model.bin.index.json")
        if pickles
        else ("model", "safetensors", "model.safetensors.index.json")
    )
    homes, total, done = {}, sum(tensor.nbytes for tensor in tensors.values()), 0
    for name, tensor in tensors.items():
        homes[name] = f"{stem}-{done * SHARDS // total + 1:05}-of-{SHARDS:05}.{end}"
        done += tensor.nbytes
    assert len(set(homes.values())) == SHARDS
    for file in sorted(set(homes.values())):
        part = {name: tensors[name] for name, home in homes.items() if home == file}
        if pickles:
            save(folder / file, part)
        else:
            save_file(part, folder / file, metadata={"format": "pt"})
    _write_json(folder / index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))})
    _write_json(folder / "config.json", config)
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    _write_json(folder / "generation_config.json", generation)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(folder / "special_tokens_map.json", marks)
    settings = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "tokenizer_class": "LlamaTokenizer"}
    _write_json(folder / "tokenizer_config.json", settings | {"model_max_length": 10**30, "sp_model_kwargs": {}})
    (folder / "README.md").write_text("# ReluLLaMA\n")
    (folder / ".gitattributes").write_text("*.bin filter=lfs\n")
    return folder


def sentencepiece_model() -> bytes:
    """Of llama's kind: byte-pair merges with bytes to fall back on."""
    lines = [line for path in sorted(HELDOUT.glob("*.txt")) for line in path.read_text("utf-8").splitlines() if line]
    raw = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:1500]), model_writer=raw, vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    return raw.getvalue()


def predictor_of(layer: int) -> tuple[np.ndarray, np.ndarray]:
    """fc1 [R, D] and fc2 [F, R] of a layer; no two layers have the same rank."""
    rng, rank = np.random.default_rng(layer), 3 + layer
    return rng.standard_normal((rank, HIDDEN), np.float32), rng.standard_normal((FFN, rank), np.float32)


def write_predictors(folder: Path) -> Path:
    """model_0.pt ... model_11.pt, as PowerInfer publishes them."""
    folder.mkdir(parents=True)
    for layer in range(LAYERS):
        save(folder / f"model_{layer}.pt", dict(zip(("fc1.weight", "fc2.weight"), predictor_of(layer), strict=True)))
    (folder / "README.md").write_text("# Predictors\n")
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The only line of stdout."""
        assert (self.code, self.out.count("\n")) == (0, 1), self.err
        return json.loads(self.out)

    @property
    def refusal(self) -> str:
        """The line of an error: the last on stderr, the only one that is no progress; stdout is empty."""
        *before, line = self.err.splitlines() or [""]
        assert self.out == "" and "Traceback" not in self.err, self.err
        assert line.startswith("error: ") and not any("rror" in other for other in before), self.err
        return line


@dataclass(frozen=True)
class Machine:
    """Somebody's computer: an empty home, caches in it, and a hub that its network leads to."""

    home: Path
    env: Mapping[str, str]

    @classmethod
    def at(cls, home: Path, endpoint: str) -> "Machine":
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DYNAJAX_", "XDG_"))}
        places = {"HOME": str(home), "HF_HOME": str(home / "hf"), "DYNAJAX_CACHE": str(home / "dynajax")}
        home.mkdir(parents=True, exist_ok=True)
        return cls(home, {**kept, **places, "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)})

    @property
    def hub_cache(self) -> Path:
        return self.home / "hf" / "hub"

    @property
    def converted(self) -> Path:
        """Where converted models are put."""
        return self.home / "dynajax" / "converted"

    def partial(self, repo: str = REPO) -> list[Path]:
        """Files of a repository of which only a part has come."""
        return sorted((self.hub_cache / f"models--{repo.replace('/', '--')}" / "blobs").glob("*.incomplete"))

    def start(self, script: str, *argv: object, before: str = "", **env: str) -> "subprocess.Popen[str]":
        """python scripts/SCRIPT.py ARGV in the home folder; `before` is code that the same process runs first."""
        path = str(ROOT / "scripts" / f"{script}.py")
        code = f"import resource, runpy, signal, sys\n{before}\nsys.argv.pop(0)\n"
        code += f"runpy.run_path({path!r}, run_name='__main__')"
        command = [sys.executable, *(["-c", code, path] if before else [path]), *map(str, argv)]
        return subprocess.Popen(
            command, cwd=self.home, env={**self.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, script: str, *argv: object, before: str = "", **env: str) -> Ended:
        with self.start(script, *argv, before=before, **env) as process:
            out, err = process.communicate(timeout=200)
        return Ended(process.returncode, out, err)
