"""What a simulated run is told and what it tells: a model's bytes, a system's ways, sums over tokens. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dynajax.config import NeuronPolicy, PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bytes of a model as one token meets them; of neurons, of one."""

    layers: int
    neurons: int  # F of the model
    unit: float  # on the device
    host_unit: float
    dtype: str  # of the host's rows
    parts: int  # rows of a neuron
    attention: float  # a layer, beside its neurons
    kv_token: float  # a layer, a token of context
    head: float
    score: float  # predictors of a layer that a token asks
    scores: int  # programs that ask them
    ranks: bool = False  # those rank the neurons of a token, for none is exactly zero
    piece: int = 1  # neurons that are sent at a time

    def prefix(self, tokens: int, *, bucketed: bool) -> int:
        """Tokens of context that attention reads: those there are, or the engine's buckets 256, 512, ..."""
        size = 256
        while bucketed and size < tokens:
            size *= 2
        return size if bucketed else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a system decides and computes. What differs in speed stands in `Hardware.systems`."""

    policy: NeuronPolicy
    config: PolicyConfig
    skips: bool = True  # neurons that score below their threshold are left out
    device_reads: Literal["rows", "slots"] = "slots"  # only those of the pool that reach it, or all of it
    rows_s: float = 0.0  # of the device, a layer: what reading only some rows costs whatever their number
    gate_first: bool = True  # the host reads up and down only where the gate is not zero
    waits: bool = False  # a layer waits for its plan however long that takes
    merges: int = 1  # hand-overs between the two sides in a layer
    bucketed: bool = True  # see Load.prefix
    one_pool: bool = True  # the threads that gather are those that compute
    copies: Literal["blocks", "units"] = "blocks"  # gathered and sent together, or each neuron by a copy of its own


@dataclass(slots=True)
class Tally:
    """Sums over decoded tokens and layers; neurons of the activity, not of the model."""

    tokens: int = 0
    seconds: float = 0.0
    live: int = 0
    hot_live: int = 0
    on_device: int = 0  # computed there
    on_host: int = 0
    missed: int = 0  # live and not computed
    migrated: int = 0
    late: int = 0
    hot_s: float = 0.0
    cold_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)  # by lane

    def figures(self) -> dict[str, float]:
        """What a run of the engine reports, by the same names."""
        computed = max(1, self.on_device + self.on_host)
        return {
            "decode_tok_s": self.tokens / self.seconds,
            "hot_share": self.hot_live / max(1, self.live),
            "computed_hot_share": self.on_device / computed,
            "cold_share": self.cold_s / max(1e-30, self.hot_s + self.cold_s),
            "recall": 1 - self.missed / max(1, self.live),
            "migrated_per_token": self.migrated / self.tokens,
            "late_plans": self.late,
        } | {f"busy_{lane}": seconds / self.seconds for lane, seconds in sorted(self.busy_s.items())}
