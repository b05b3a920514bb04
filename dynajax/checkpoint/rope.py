"""The rotary part of config.json -> Rope: `rope_theta` with `rope_scaling`, or `rope_parameters` (transformers 5)."""

from __future__ import annotations

import math
from typing import Any

from dynajax.checkpoint.fields import Fields
from dynajax.checkpoint.wording import quoted
from dynajax.config import Rope, RopeKind

DEFAULT_THETA = 10_000.0
KINDS: dict[object, RopeKind] = {None: "default", "default": "default", "linear": "linear", "llama3": "llama3"}
KINDS |= {"yarn": "yarn"}
# What a table may say: the names read here, and those that say the same again.
KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    *("truncate", "partial_rotary_factor", "finetuned"),
}


def read_rope(fields: Fields) -> Rope:
    """The rotary positions a config asks for."""
    plain = fields.get("rope_theta")
    bases = [] if plain is None else [fields.number("rope_theta", plain, positive=True)]
    tables = []
    for name in ("rope_parameters", "rope_scaling"):
        table = fields.get(name)
        if table is None:
            continue
        if not isinstance(table, dict):
            fields.complain(f"{name} must be an object or null, got {quoted(table)}")
            continue
        tables.append((name, table))
        if table.get("rope_theta") is not None:
            bases.append(fields.number(f"{name}.rope_theta", table["rope_theta"], positive=True))
    if len(set(bases)) > 1:
        fields.complain(f"two different rotary bases are given: {', '.join(str(base) for base in bases)}")
    theta = bases[0] if bases else DEFAULT_THETA
    scaled = [_scaled(fields, name, table, theta) for name, table in tables]
    if len(scaled) == 2 and scaled[0] != scaled[1] and Rope(theta=theta) not in scaled:
        fields.complain("rope_parameters and rope_scaling contradict each other")
    return next((rope for rope in scaled if rope.kind != "default"), Rope(theta=theta))


def has_base(fields: Fields) -> bool:
    """Whether the file says what the rotary base is."""
    tables = [table for name in ("rope_parameters", "rope_scaling") if isinstance(table := fields.get(name), dict)]
    return any(table.get("rope_theta") is not None for table in (fields.config, *tables))


def _scaled(fields: Fields, name: str, table: dict[str, Any], theta: float) -> Rope:
    spelled = table.get("rope_type", table.get("type"))
    kind = KINDS.get(spelled) if isinstance(spelled, str | None) else None
    if kind is None or (table.get("type") not in (None, spelled)):
        fields.complain(f"{name} of type {quoted(spelled)} is not implemented")
        return Rope(theta=theta)
    if unknown := sorted(key for key in table if key not in KNOWN):
        fields.complain(f"{name}.{unknown[0]} is not implemented")
    if table.get("partial_rotary_factor") not in (None, 1):
        fields.complain(f"{name}.partial_rotary_factor {quoted(table['partial_rotary_factor'])} is not implemented")
    if kind == "default":
        return Rope(theta=theta)

    def number(key: str, default: float | None = None) -> float:
        value = table.get(key)
        return (
            default if value is None and default is not None else fields.number(f"{name}.{key}", value, positive=True)
        )

    factor = number("factor")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor)
    original = table.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    if original is None and kind == "yarn":  # as every reader of such files takes it
        original = fields.get("max_position_embeddings")
    if not isinstance(original, int) or isinstance(original, bool) or not 1 <= original <= 2**24:
        fields.complain(f"{name}.original_max_position_embeddings must be an integer >= 1, got {quoted(original)}")
        original = 1
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if not high > low:
            fields.complain(f"{name}.high_freq_factor must be above low_freq_factor, got {high:g} and {low:g}")
        return Rope(theta=theta, kind=kind, factor=factor, original_positions=original, low_freq=low, high_freq=high)
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=_attention_factor(table, factor, number),
        truncate=table.get("truncate") is not False,
    )


def latent_scale(fields: Fields) -> float:
    """By what DeepSeek's `mscale_all_dim` multiplies the scores of attention, in a scaling that `read_rope` accepts."""
    for name in ("rope_parameters", "rope_scaling"):
        table = fields.get(name)
        if isinstance(table, dict) and table.get("rope_type", table.get("type")) not in (None, "default"):
            weight = table.get("mscale_all_dim")
            if not weight:
                return 1.0
            weight = fields.number(f"{name}.mscale_all_dim", weight, positive=True)
            return _growth(weight, fields.number(f"{name}.factor", table.get("factor"), positive=True)) ** 2
    return 1.0


def _growth(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _attention_factor(table: dict[str, Any], factor: float, number: Any) -> float:
    """What yarn multiplies cosine and sine with: as given, else 0.1 ln(factor) + 1 (Peng et al. 2023, section 3.4)."""
    if table.get("attention_factor") is not None:
        return number("attention_factor")
    if table.get("mscale") and table.get("mscale_all_dim"):
        return _growth(number("mscale"), factor) / _growth(number("mscale_all_dim"), factor)
    return _growth(1.0, factor)
