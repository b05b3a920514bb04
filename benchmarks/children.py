"""Engines in processes of their own, for `benchmarks.side_by_side`: what to start, and how to talk to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

import gguf

from benchmarks.to_gguf import TYPES
from dynajax.budget import dense_bytes, kv_bytes, unit_bytes
from dynajax.config import EngineConfig, ModelSpec
from dynajax.config.model import DTypeName
from dynajax.errors import UsageError

ROOT = Path(__file__).parents[1]
FORMS = "dynajax:SPARSITY:DTYPE[:POLICY], llama.cpp:F16|Q8_0|Q4_0 or transformers:DTYPE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One row of the comparison: how its process is started, and what is known of it before."""

    name: str
    engine: str  # dynajax, llama.cpp or transformers
    command: tuple[str, ...]
    settings: dict[str, Any]  # the first line it is told
    file_bytes: int  # of its weights, roughly what it holds in memory
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all contenders share."""

    model: str
    folder: Path
    spec: ModelSpec
    prompt_tokens: int
    new_tokens: int
    batch: int
    threads: int
    gguf_files: str  # a pattern with {} for the type
    llama_python: str
    predictor: str
    constants: tuple[str, ...]  # --set of the engine

    @property
    def ctx(self) -> int:
        """Tokens of a row in the end."""
        return self.prompt_tokens + self.new_tokens

    def cache_bytes(self, dtype: str) -> int:
        """Keys and values that a step reads, half way through the new tokens."""
        return kv_bytes(self.spec, dtype, self.prompt_tokens + self.new_tokens // 2, self.batch)

    @property
    def folder_bytes(self) -> int:
        """Of the weights as they are stored."""
        return sum(path.stat().st_size for path in self.folder.glob("model*.safetensors"))


def contender(name: str, setup: Setup) -> Contender:
    """What a name such as dynajax:exact:float16:none or llama.cpp:Q4_0 stands for. UsageError: nothing."""
    (engine, *words), spec = name.split(":"), setup.spec
    if engine == "dynajax" and 2 <= len(words) <= 3:
        return _ours(name, words, setup)
    if engine == "llama.cpp" and len(words) == 1 and words[0] in TYPES:
        return _llama(name, words[0], setup)
    if engine == "transformers" and len(words) == 1 and words[0] in get_args(DTypeName):
        settings = {"model": str(setup.folder), "dtype": words[0], "threads": setup.threads}
        weights = dense_bytes(spec, words[0]) + spec.layers * spec.units * unit_bytes(spec, words[0])
        command = (sys.executable, "-m", "benchmarks.engines.eager")
        return Contender(
            name=name, engine=engine, command=command, settings=settings, file_bytes=setup.folder_bytes,
            row={"sparsity": "dense", "dtype": words[0], "floor_bytes": weights + setup.cache_bytes(words[0])},
        )  # fmt: skip
    raise UsageError(f"--engines takes {FORMS}; got {name!r}")


def _ours(name: str, words: Sequence[str], setup: Setup) -> Contender:
    sparsity, dtype, policy = [*words, "auto"][:3]
    settings: dict[str, Any] = {
        "sparsity": sparsity, "dtype": dtype, "policy": policy, "ctx": setup.ctx, "batch": setup.batch,
        "threads": setup.threads, "offline": True,
    }  # fmt: skip
    if sparsity == "predicted":
        settings |= {"predictor": setup.predictor, "set": list(setup.constants)}
    EngineConfig(**settings)  # refused before anything is started
    command = (sys.executable, "-m", "benchmarks.engines.ours")
    return Contender(
        name=name, engine="dynajax", command=command, settings={"model": setup.model, **settings},
        file_bytes=setup.folder_bytes * (2 if dtype in ("auto", "float32") else 1),
    )  # fmt: skip


def _llama(name: str, kind: str, setup: Setup) -> Contender:
    file = Path(setup.gguf_files.format(kind))
    if not file.is_file():
        raise UsageError(f"no {file}: python -m benchmarks.to_gguf {setup.model} {file} --type {kind}")
    tensors = gguf.GGUFReader(file).tensors
    read = sum(int(tensor.n_bytes) for tensor in tensors if setup.spec.tied or tensor.name != "token_embd.weight")
    settings = {"model": str(file), "ctx": setup.ctx, "batch": setup.batch, "threads": setup.threads}
    return Contender(
        name=name, engine="llama.cpp", command=(setup.llama_python, "-m", "benchmarks.engines.llama"),
        settings=settings, file_bytes=file.stat().st_size,
        row={"sparsity": "dense", "dtype": kind, "floor_bytes": read + setup.cache_bytes("float16")},
    )  # fmt: skip


class Child:
    """A contender's process; stopped (SIGSTOP) whenever nobody waits for it, so that it disturbs no other."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self._process = subprocess.Popen(
            contender.command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.opened = self._ask(contender.settings)
        except BaseException:
            self.close()
            raise

    def round(self, prompts: list[list[int]], following: list[list[int]]) -> dict[str, Any]:
        """One round of `worker.run_round`."""
        self._process.send_signal(signal.SIGCONT)
        return self._ask({"prompts": prompts, "following": following})

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.contender.name} ended with code {self._process.wait()}: its messages are above")
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(answer)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
