"""A model folder with the weights that an engine of few bits computes with, by rules of its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from dynajax.quant import pack
from hostcompute.packed import unpack

_TABLES = re.compile(r"(embed_tokens|word_embeddings|shared)\.weight$")
_ROUTERS = r"router|mlp\.gate\.weight|block_sparse_moe\.gate\.weight|shared_expert_gate"
_AS_THEY_ARE = re.compile(rf"{_ROUTERS}|kv_b_proj|relative_attention_bias|embed_positions")
_BY_COLUMNS = re.compile(r"(down_proj|\.w2|fc2|\.wo|dense_4h_to_h)\.weight$")  # a neuron is a column


def write_dequantised(source: Path, target: Path, bits: int) -> Path:
    """Write the model of `source` with every weight rounded as an engine of int8 or int4 rounds it; -> `target`."""
    target.mkdir(parents=True)
    tensors: dict[str, npt.NDArray] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            tensors |= {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    shutil.copy(source / "config.json", target)
    tied = "lm_head.weight" not in tensors
    made = {name: _rounded(name, value, bits, tied=tied) for name, value in tensors.items()}
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _rounded(name: str, value: npt.NDArray, bits: int, *, tied: bool) -> npt.NDArray[np.float32]:
    if _TABLES.search(name):
        return unpack(pack(value, 8)) if tied else value
    if value.ndim == 1 and name.endswith("fc1.bias"):  # of neurons: each a group of its own
        return unpack(pack(np.repeat(value[:, None], 32, axis=1), bits))[:, 0].copy()
    if value.ndim == 1 or _AS_THEY_ARE.search(name):
        return value
    turned = bool(_BY_COLUMNS.search(name))
    found = unpack(pack(value.swapaxes(-1, -2) if turned else value, bits))
    return np.ascontiguousarray(found.swapaxes(-1, -2)) if turned else found
