"""What the names of `benchmarks.side_by_side` stand for: which process to start, and what to tell it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import gguf

from benchmarks.to_gguf import TYPES
from dynajax.benching.children import Contender
from dynajax.benching.rounds import Task
from dynajax.budget import dense_bytes, kv_bytes, unit_bytes
from dynajax.config import EngineConfig, ModelSpec, parse_budget
from dynajax.config.model import DTypeName
from dynajax.errors import UsageError

FORMS = (
    "dynajax:SPARSITY:DTYPE[:POLICY], llama.cpp:F16|Q8_0|Q4_0, transformers:DTYPE, accelerate:DTYPE or powerinfer:NAME"
)
POWERINFER_NOTE = "fed text that its tokenizer makes tokens of, answers not compared; times as it prints them, means"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Task):
    """What all contenders share."""

    folder: Path
    spec: ModelSpec
    budget: str  # of device memory, for who can keep to one
    gguf_files: str  # a pattern with {} for the type
    llama_python: str
    torch_python: str
    powerinfer: str  # a finished binary
    scratch: Path  # a folder for what is kept on disk meanwhile
    predictor: str
    constants: tuple[str, ...]  # --set of the engine

    def cache_bytes(self, dtype: str) -> int:
        """Keys and values that a step reads, half way through the new tokens."""
        return kv_bytes(self.spec, dtype, self.prompt_tokens + self.new_tokens // 2, self.batch)

    def weight_bytes(self, dtype: str) -> int:
        """All weights that a token meets where nothing is skipped."""
        return dense_bytes(self.spec, dtype) + self.spec.layers * self.spec.units * unit_bytes(self.spec, dtype)

    @property
    def folder_bytes(self) -> int:
        """Of the weights as they are stored."""
        return sum(path.stat().st_size for path in self.folder.glob("model*.safetensors"))

    @property
    def budget_bytes(self) -> int | None:
        """The budget, if it is a size."""
        found = parse_budget(self.budget)
        return found if isinstance(found, int) else None


def contender(name: str, setup: Setup) -> Contender:
    """What a name such as dynajax:exact:float16:none or llama.cpp:Q4_0 stands for. UsageError: nothing."""
    engine, *words = name.split(":")
    if engine == "dynajax" and 2 <= len(words) <= 3:
        return _ours(name, words, setup)
    kinds: dict[str, tuple[Sequence[str], Callable[[str, str, Setup], Contender]]] = {
        "llama.cpp": (TYPES, _llama),
        "transformers": (get_args(DTypeName), _torch),
        "accelerate": (get_args(DTypeName), _torch),
        "powerinfer": (words, _powerinfer),
    }
    allowed, make = kinds.get(engine, ((), _torch))
    if len(words) == 1 and words[0] in allowed:
        return make(name, words[0], setup)
    raise UsageError(f"--engines takes {FORMS}; got {name!r}")


def _ours(name: str, words: Sequence[str], setup: Setup) -> Contender:
    sparsity, dtype, policy = [*words, "auto"][:3]
    settings: dict[str, Any] = {
        "sparsity": sparsity, "dtype": dtype, "policy": policy, "ctx": setup.ctx, "batch": setup.batch,
        "threads": setup.threads, "offline": True, "vram_budget": setup.budget,
    }  # fmt: skip
    if sparsity == "predicted":
        settings |= {"predictor": setup.predictor, "set": list(setup.constants)}
    EngineConfig(**settings)  # refused before anything is started
    return Contender(
        name=name, engine="dynajax", command=(sys.executable, "-m", "dynajax.benching.session"),
        settings={"model": setup.model, **settings}, row={"budget": setup.budget},
        file_bytes=setup.folder_bytes * (2 if dtype in ("auto", "float32") else 1),
    )  # fmt: skip


def _llama(name: str, kind: str, setup: Setup) -> Contender:
    file = _gguf_file(kind, setup)
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


def _torch(name: str, dtype: str, setup: Setup) -> Contender:
    """transformers as it is, or with accelerate to keep to the budget."""
    engine = name.split(":")[0]
    settings: dict[str, Any] = {"model": str(setup.folder), "dtype": dtype, "threads": setup.threads}
    if engine == "accelerate":
        if setup.budget_bytes is None:
            raise UsageError("accelerate moves weights to keep to a budget: give a size, --vram-budget 1GiB")
        settings |= {"budget_bytes": setup.budget_bytes, "offload_folder": str(setup.scratch / dtype)}
    row = {
        "sparsity": "dense", "dtype": dtype, "floor_bytes": setup.weight_bytes(dtype) + setup.cache_bytes(dtype),
        "budget": setup.budget if engine == "accelerate" else None,
    }  # fmt: skip
    return Contender(
        name=name, engine=engine, command=(setup.torch_python, "-m", "benchmarks.engines.eager"), settings=settings,
        file_bytes=max(setup.folder_bytes, setup.weight_bytes(dtype)), row=row,
    )  # fmt: skip


def _powerinfer(name: str, kind: str, setup: Setup) -> Contender:
    file = _gguf_file(kind, setup)
    if not setup.powerinfer:
        raise UsageError("powerinfer needs --powerinfer PATH, its finished binary (build/bin/main)")
    for path in (Path(setup.powerinfer), file):
        if not path.is_file():
            raise UsageError(f"no {path}: --powerinfer is its binary, --gguf with {kind!r} in place of {{}} its model")
    if setup.batch != 1:
        raise UsageError(f"powerinfer runs one sequence, got --batch {setup.batch}: leave it out of --engines")
    settings: dict[str, Any] = {
        "binary": setup.powerinfer, "model": str(file), "ctx": setup.ctx, "threads": setup.threads,
        "budget_bytes": setup.budget_bytes,
    }  # fmt: skip
    return Contender(
        name=name, engine="powerinfer", command=(sys.executable, "-m", "benchmarks.engines.powerinfer"),
        settings=settings, file_bytes=file.stat().st_size,
        row={"sparsity": "predicted", "dtype": kind, "budget": setup.budget, "note": POWERINFER_NOTE},
    )  # fmt: skip


def _gguf_file(kind: str, setup: Setup) -> Path:
    return Path(setup.gguf_files.format(kind))
