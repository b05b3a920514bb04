"""What this version has to know of a `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynajax.checkpoint.fields import Fields
from dynajax.config import ActivationKind, Layout

Traits = dict[str, Any]  # fields of ModelSpec


def _no_traits(fields: Fields) -> Traits:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`. A value the answer depends on must be in the file, but for what `defaults` names: there every
    reader of such files agrees."""

    architectures: tuple[str, ...]
    layout: Layout = "llama"
    rename: Mapping[str, str] = field(default_factory=dict)  # llama's name of a key -> this family's
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # keys that other families must not have
    activations: Mapping[str, ActivationKind] | None = None  # what hidden_act means here, if not what it says
    traits: Callable[[Fields], Traits] = _no_traits


def biases(fields: Fields) -> Traits:
    """attention_bias, as llama's classes have it: on all four projections."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def no_sliding_window(fields: Fields) -> None:
    """Qwen's files name a window that they do not use."""
    if fields.flag("use_sliding_window", False):
        fields.complain("use_sliding_window true is not implemented")


QWEN_READS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
