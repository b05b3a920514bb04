"""What a model is and what a user asked for: frozen records, no behaviour beyond checking themselves."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from dynajax.errors import UsageError

ActivationKind = Literal["relu", "fatrelu", "silu"]
Sparsity = Literal["auto", "dense", "exact"]
HostMode = Literal["threads", "callback"]
PolicyName = Literal["auto", "static", "none"]
DTypeName = Literal["float32", "float16", "bfloat16"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """UsageError that names the setting unless value is a number (no bool) in [low, high], an integer if `whole`."""
    kind = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if whole else "a number"
        bounds = f">= {low:g}" if high >= 2**31 else f"between {low:g} and {high:g}"
        raise UsageError(f"{name} must be {what} {bounds}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The FFN's non-linearity. fatrelu: x where x >= threshold, else 0 (not shifted; ProSparse)."""

    kind: ActivationKind = "relu"
    threshold: float = 0.0

    @property
    def has_zeros(self) -> bool:
        """True if the activation gives exact zeros that can be skipped without changing the answer."""
        return self.kind != "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only model, read from `config.json` and from nothing else.

    Letters as everywhere: L layers, D hidden, F FFN neurons, N heads, H head size, V vocabulary.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    activation: Activation = Activation()
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    max_positions: int = 2048
    dtype: DTypeName = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def ffn_parts(self) -> int:
        """P: rows per neuron; gate, up and down."""
        return 3

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ValueError(f"norm_eps and rope_theta must be > 0, got {self.norm_eps} and {self.rope_theta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for; `auto` and None are filled from model and machine when the engine opens.

    vram_budget: "auto", a size ("8GiB"), a share of free device memory ("0.85"), or bytes as an int.
    ctx: KV cache length in tokens. batch: rows decoded together. threads: host compute threads.
    stats: "auto", "none" or an activation statistics file, from which neurons are placed.
    deterministic and offline promise what always holds in this version: for the same `threads` two runs are equal
    bit for bit, and the network is never touched.
    """

    vram_budget: str | int | float = "auto"
    ctx: int | None = None
    batch: int = 1
    sparsity: str = "auto"
    policy: str = "auto"
    stats: str = "auto"
    dtype: str = "auto"
    host_dtype: str = "auto"
    host_mode: str = "threads"
    threads: int | None = None
    predictor: str = "auto"
    deterministic: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        choices = {
            "sparsity": get_args(Sparsity),
            "policy": get_args(PolicyName),
            "dtype": ("auto", *get_args(DTypeName)),
            "host_dtype": ("auto", *get_args(DTypeName)),
            "host_mode": get_args(HostMode),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.predictor not in ("auto", "none"):
            raise UsageError(
                f"--predictor must be auto or none, got {self.predictor!r}: predictors are not in this version"
            )
        for name, value in (("ctx", self.ctx), ("batch", self.batch), ("threads", self.threads)):
            if value is not None:
                check_number(f"--{name}", value, 1, 2**31, whole=True)


_SUFFIXES = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SUFFIXES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_budget(text: str | int | float) -> int | float | None:
    """Bytes (int) from "8GiB", a share of free memory (float) from "0.85", None from "auto".

    An int is bytes, a float a share. A bare number above 1 in text has no unit and is refused: nobody can
    tell 8 bytes from 8 GiB.
    """
    if not isinstance(text, str):
        if isinstance(text, bool) or (isinstance(text, float) and not 0 < text <= 1) or text <= 0:
            raise UsageError(f"vram_budget must be > 0 bytes or a share in (0, 1], got {text!r}")
        return text
    word = text.strip()
    if word.lower() == "auto":
        return None
    number = word.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    suffix = word[len(number) :].strip().upper()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < 2**60:
        raise UsageError(f"--vram-budget must be auto, a size such as 8GiB or a share such as 0.85, got {text!r}")
    if suffix in _SUFFIXES and value * _SUFFIXES[suffix] >= 1:
        return int(value * _SUFFIXES[suffix])
    if suffix or value > 1:
        raise UsageError(f"--vram-budget {text!r} has no unit this program knows: write 8GiB, 600MiB, 900KiB or 0.85")
    return value
