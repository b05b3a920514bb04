"""The one table of what a llama-family checkpoint holds and where it goes. Names only, no files."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from dynajax.config import ModelSpec

IGNORABLE = ("*.rotary_emb.inv_freq", "rotary_emb.inv_freq")  # recomputed from rope_theta


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes (`part`) and its shape in letters: Q = heads x H, K = kv_heads x H."""

    part: str
    letters: str


TENSORS: dict[str, Place] = {
    "model.embed_tokens.weight": Place("embed", "VD"),
    "model.layers.{layer}.input_layernorm.weight": Place("attention_norm", "D"),
    "model.layers.{layer}.self_attn.q_proj.weight": Place("q", "QD"),
    "model.layers.{layer}.self_attn.k_proj.weight": Place("k", "KD"),
    "model.layers.{layer}.self_attn.v_proj.weight": Place("v", "KD"),
    "model.layers.{layer}.self_attn.o_proj.weight": Place("o", "DQ"),
    "model.layers.{layer}.post_attention_layernorm.weight": Place("ffn_norm", "D"),
    "model.layers.{layer}.mlp.gate_proj.weight": Place("gate", "FD"),
    "model.layers.{layer}.mlp.up_proj.weight": Place("up", "FD"),
    "model.layers.{layer}.mlp.down_proj.weight": Place("down", "DF"),  # its columns are the units' rows
    "model.norm.weight": Place("norm", "D"),
    "lm_head.weight": Place("head", "VD"),
}

ATTENTION_PARTS = ("attention_norm", "q", "k", "v", "o", "ffn_norm")  # AttentionBlock's parameters
HEAD_NAME = "lm_head.weight"
_NAME_OF = {place.part: pattern for pattern, place in TENSORS.items()}


def tensor_name(part: str, layer: int | None = None) -> str:
    """("q", 3) -> "model.layers.3.self_attn.q_proj.weight"."""
    return _NAME_OF[part].format(layer=layer)


def shape_of(part: str, spec: ModelSpec) -> tuple[int, ...]:
    """The stored shape of a part, in the checkpoint's [out, in] order."""
    sizes = {
        "V": spec.vocab,
        "D": spec.hidden,
        "F": spec.ffn,
        "Q": spec.heads * spec.head_dim,
        "K": spec.kv_heads * spec.head_dim,
    }
    return tuple(sizes[letter] for letter in TENSORS[_NAME_OF[part]].letters)


def expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor this model must have -> its shape. A tied model needs no lm_head.weight."""
    result = {}
    for pattern, place in TENSORS.items():
        if spec.tied and pattern == HEAD_NAME:
            continue
        layers = range(spec.layers) if "{layer}" in pattern else (None,)
        result |= {pattern.format(layer=layer): shape_of(place.part, spec) for layer in layers}
    return result


def is_ignorable(name: str) -> bool:
    """True for tensors that hold nothing the model needs."""
    return any(fnmatchcase(name, pattern) for pattern in IGNORABLE)


def declared_parameters(spec: ModelSpec) -> int:
    """How many parameters the config declares, counted by hand and not from TENSORS: it checks that table."""
    attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
    layer = attention + 3 * spec.ffn * spec.hidden + 2 * spec.hidden
    tables = 1 if spec.tied else 2
    return spec.layers * layer + tables * spec.vocab * spec.hidden + spec.hidden
