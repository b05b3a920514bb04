"""The models and the prompt of the engine's tests."""

from dataclasses import replace

from dynajax.config import ModelSpec
from dynajax.testing import TINY_FATRELU, TINY_GQA, TINY_SILU

WIDER = {"hidden": 64, "ffn": 96, "layers": 3, "vocab": 128, "head_dim": 16}
SPECS: dict[str, ModelSpec] = {
    "relu": replace(TINY_GQA, **WIDER),
    "relu-tied": replace(TINY_GQA, tied=True, **WIDER),
    "fatrelu": replace(TINY_FATRELU, **WIDER),
    "silu": replace(TINY_SILU, **WIDER),
}
PROMPT = tuple(range(3, 40))
