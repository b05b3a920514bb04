"""What a user asked of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dynajax.config.checks import check_number
from dynajax.config.dtypes import WeightDType
from dynajax.config.policy import PolicyConfig, policy_from_settings, policy_from_values
from dynajax.errors import UsageError

Sparsity = Literal["auto", "dense", "exact", "predicted"]
HostMode = Literal["auto", "threads", "callback", "ffi"]
NeuronPolicy = Literal["dynamic", "macro+micro", "macro", "micro", "static", "lru", "none"]
ExpertPolicyName = Literal[
    "scan",
    "dali",
    "hybrimoe",
    "hybrimoe-shipped",
    "bandwidth-split",
    "fiddler",
    "lru",
    "lfu",
    "static",
    "layer-split",
    "none",
]
PolicyName = Literal["auto", NeuronPolicy, ExpertPolicyName]
AssignName = Literal[
    "auto", "scan", "dali", "resident", "fetch-all", "per-expert", "two-ended", "two-ended-shipped", "bandwidth-split"
]
CacheName = Literal["auto", "decayed", "dali", "lru", "lfu", "ema", "static"]
PrefetchName = Literal["auto", "corrected", "residual", "residual-mean", "gate", "count", "none"]
HostDense = Literal["own", "onednn", "blas"]
StagingName = Literal["auto", "pinned_host", "registered", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for; `auto` and None are filled from model and machine when the engine opens.

    vram_budget: "auto", a size ("8GiB"), a share of free device memory ("0.85"), or bytes as an int.
    ctx: KV cache length in tokens. batch: rows decoded together. threads: host compute threads.
    stats: "auto", "none" or an activation statistics file, from which neurons are placed.
    host_dense: what multiplies the experts on the host: this project's kernels, or a library's.
    predictor: "auto", "mlp", "gate", "none" or the folder of trained ones. staging: how units are sent to the device.
    set: constants of the policy, as a mapping or as NAME=VALUE (see PolicyConfig).
    deterministic: plans go by fixed costs and are always waited for, so that for the same `threads` two runs are equal
    bit for bit; without plans that always holds.
    offline: never touch the network; models come from folders and the cache.
    """

    vram_budget: str | int | float = "auto"
    ctx: int | None = None
    batch: int = 1
    sparsity: str = "auto"
    policy: str = "auto"
    assign: str = "auto"
    cache: str = "auto"
    prefetch: str = "auto"
    stats: str = "auto"
    dtype: str = "auto"
    host_dtype: str = "auto"
    host_mode: str = "auto"
    host_dense: str = "own"
    threads: int | None = None
    predictor: str = "auto"
    staging: str = "auto"
    set: Mapping[str, Any] | Sequence[str] = ()
    deterministic: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        choices = {
            "sparsity": get_args(Sparsity),
            "policy": tuple(dict.fromkeys(get_args(PolicyName))),
            "assign": get_args(AssignName),
            "cache": get_args(CacheName),
            "prefetch": get_args(PrefetchName),
            "dtype": ("auto", *get_args(WeightDType)),
            "host_dtype": ("auto", *get_args(WeightDType)),
            "host_mode": get_args(HostMode),
            "host_dense": get_args(HostDense),
            "staging": get_args(StagingName),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not self.predictor or not isinstance(self.predictor, str):
            raise UsageError(f"--predictor must be auto, mlp, gate, none or a folder, got {self.predictor!r}")
        _ = self.knobs  # checked
        for name, value in (("ctx", self.ctx), ("batch", self.batch), ("threads", self.threads)):
            if value is not None:
                check_number(f"--{name}", value, 1, 2**31, whole=True)

    @property
    def knobs(self) -> PolicyConfig:
        """The policy's constants."""
        if isinstance(self.set, Mapping):
            return policy_from_values(self.set)
        return policy_from_settings(self.set)


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
