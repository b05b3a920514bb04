"""What was published of the systems, to compare with: figures of the paper DynamicInfer (ICLR 2026).

Decoding speeds are tokens a second at a prompt of 64 and 128 new tokens, batch 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROMPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A model on a machine: decoding speed by system."""

    machine: str
    hardware: str  # file of the machine as the paper states it
    model: str
    dtype: str
    tok_s: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.machine}/{self.model}"


def _row(machine: str, model: str, dtype: str, *speeds: float) -> PublishedRow:
    names = ("transformers", "llama.cpp", "powerinfer", "dynamicinfer")
    tok_s = dict(zip(names, speeds, strict=True))
    hardware = {"pc-low": "pc-low-12gb"}.get(machine, machine)  # the card that is sold has 11 GB
    return PublishedRow(machine=machine, hardware=hardware, model=model, dtype=dtype, tok_s=tok_s)


ROWS = (
    _row("pc-high", "relullama-13b", "float16", 4.0, 9.7, 15.5, 19.1),
    _row("pc-high", "prosparse-13b", "float16", 3.0, 9.3, 15.6, 18.3),
    _row("pc-high", "relullama-70b", "int4", 0.28, 2.23, 5.14, 7.88),
    _row("pc-low", "relullama-7b", "float16", 2.0, 8.1, 18.9, 24.4),
    _row("pc-low", "prosparse-7b", "float16", 2.0, 8.2, 21.9, 26.5),
    _row("pc-low", "relullama-13b", "float16", 0.39, 2.90, 7.49, 8.47),
)
# Speed-up over PowerInfer as parts are added: micro, then macro, then thresholds.
ABLATION: Mapping[str, tuple[float, float, float]] = {
    "pc-high/relullama-13b": (0.113, 0.136, 0.231),
    "pc-high/relullama-70b": (0.276, 0.340, 0.571),
}
# Means over the ReluLLaMA models on PC-High: live neurons computed on the GPU, and the CPU's share of FFN time.
GPU_SHARE: Mapping[str, float] = {"powerinfer": 0.51, "dynamicinfer": 0.68}
CPU_SHARE: Mapping[str, float] = {"powerinfer": 0.72, "dynamicinfer": 0.57}
# Speed-up of DynamicInfer over a range of lengths, lowest and highest, over PowerInfer and over llama.cpp.
LENGTHS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "pc-high/relullama-13b": {"powerinfer": (0.18, 0.26), "llama.cpp": (0.60, 0.97)},
    "pc-high/relullama-70b": {"powerinfer": (0.53, 0.59), "llama.cpp": (1.48, 2.53)},
    "pc-low/relullama-7b": {"powerinfer": (0.20, 0.35)},
    "pc-low/relullama-13b": {"powerinfer": (0.11, 0.13)},
}
# GB: the GPU's peak, and host memory.
DEVICE_GB: Mapping[str, Mapping[str, float]] = {"pc-high/relullama-70b": {"powerinfer": 23.6, "dynamicinfer": 23.5}}
HOST_GB: Mapping[str, Mapping[str, float]] = {"pc-low/relullama-13b": {"powerinfer": 21.3, "dynamicinfer": 36.6}}
