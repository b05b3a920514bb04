"""The plain float64 forward of `dynajax.reference`, of a folder that a test has written."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  # teaches NumPy, and so safetensors, what bfloat16 is
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from dynajax.reference import forward


def family_logits(folder: Path, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """tokens [T] -> logits [T, V] of the model in `folder` (config.json and *.safetensors)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, npt.NDArray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return forward(config, tensors, tokens)
