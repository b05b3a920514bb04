"""What a generation gives back: its text, and figures that say how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Event:
    """One token of a stream; `text` is what became certain with it, possibly nothing."""

    text: str
    token_id: int
    index: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds, compilation left out of the others; rates in tokens per second, None where nothing was done."""

    load_s: float
    compile_s: float
    prefill_s: float
    decode_s: float
    prefill_tok_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Where the live units were found, over decode steps. Live: the activation is not zero.

    hot_share: live units on the device / live units; computed_hot_share the same of units computed at all.
    """

    kind: str
    live_per_token: float | None
    hot_share: float | None
    hot_share_layers_ge_1: float | None
    computed_hot_share: float | None
    migrated: int
    migrated_bytes: int
    late_plans: int
    density: float | None
    recall: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished generation; `to_json` is the object of `generate.py --json`."""

    model: str
    model_path: str
    text: str | None  # None without a tokenizer
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    seed: int
    sparsity: str
    policy: str
    predictor: str
    timings: Timings
    units: Units
    ffn: dict[str, float | None]  # hot_s, cold_s, cold_share
    memory: dict[str, int]  # budget, plan, peak, host and pool bytes
    host: dict[str, float | int | None]  # bytes_read, gb_s

    def to_json(self) -> dict[str, Any]:
        """Plain types only; keys in the order of the contract."""

        def plain(record) -> dict[str, Any]:
            return {name: getattr(record, name) for name in type(record).__dataclass_fields__}

        return plain(self) | {
            "token_ids": list(self.token_ids),
            "timings": plain(self.timings),
            "units": plain(self.units),
        }


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where there is no whole."""
    return part / whole if whole else None
