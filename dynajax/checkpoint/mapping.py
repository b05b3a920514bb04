"""What the checkpoint of each layout holds and where it goes. Names only, no files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dynajax.config import Layout, ModelSpec

# Recomputed from rope_theta; attention masks of old files; TurboSparse's predictors, which only guess what is zero.
IGNORABLE = ("*rotary_emb.inv_freq", "*.masked_bias", "*.mlp.predictor.fc?.weight")
Key = tuple[str, int | None]  # part and layer


@dataclass(frozen=True, slots=True)
class Place:
    """How a part is stored: its name below the model's prefix, and its shape in letters.

    Q = heads x H, K = kv_heads x H, Z = Q + 2 K (queries, keys and values in one matrix), S = learned positions with
    the two rows that nothing uses.
    """

    name: str
    letters: str


def _weight_and_bias(part: str, name: str, letters: str) -> dict[str, Place]:
    return {part: Place(f"{name}.weight", letters), f"{part}_bias": Place(f"{name}.bias", letters[0])}


_LLAMA = "layers.{layer}."
_FALCON = "h.{layer}."
_HEAD = {"head": Place("lm_head.weight", "VD")}
PLACES: dict[Layout, dict[str, Place]] = {
    "llama": {
        "embed": Place("embed_tokens.weight", "VD"),
        "attention_norm": Place(_LLAMA + "input_layernorm.weight", "D"),
        **_weight_and_bias("q", _LLAMA + "self_attn.q_proj", "QD"),
        **_weight_and_bias("k", _LLAMA + "self_attn.k_proj", "KD"),
        **_weight_and_bias("v", _LLAMA + "self_attn.v_proj", "KD"),
        **_weight_and_bias("o", _LLAMA + "self_attn.o_proj", "DQ"),
        "q_norm": Place(_LLAMA + "self_attn.q_norm.weight", "H"),
        "k_norm": Place(_LLAMA + "self_attn.k_norm.weight", "H"),
        "ffn_norm": Place(_LLAMA + "post_attention_layernorm.weight", "D"),
        **_weight_and_bias("gate", _LLAMA + "mlp.gate_proj", "FD"),
        **_weight_and_bias("up", _LLAMA + "mlp.up_proj", "FD"),
        **_weight_and_bias("down", _LLAMA + "mlp.down_proj", "DF"),  # its columns are the units' rows
        "norm": Place("norm.weight", "D"),
        **_HEAD,
    },
    "opt": {
        "embed": Place("embed_tokens.weight", "VD"),
        "positions": Place("embed_positions.weight", "SD"),
        **_weight_and_bias("attention_norm", _LLAMA + "self_attn_layer_norm", "D"),
        **_weight_and_bias("q", _LLAMA + "self_attn.q_proj", "QD"),
        **_weight_and_bias("k", _LLAMA + "self_attn.k_proj", "KD"),
        **_weight_and_bias("v", _LLAMA + "self_attn.v_proj", "KD"),
        **_weight_and_bias("o", _LLAMA + "self_attn.out_proj", "DQ"),
        **_weight_and_bias("ffn_norm", _LLAMA + "final_layer_norm", "D"),
        **_weight_and_bias("up", _LLAMA + "fc1", "FD"),
        **_weight_and_bias("down", _LLAMA + "fc2", "DF"),
        **_weight_and_bias("norm", "final_layer_norm", "D"),
        **_HEAD,
    },
    "falcon": {
        "embed": Place("word_embeddings.weight", "VD"),
        **_weight_and_bias("attention_norm", _FALCON + "ln_attn", "D"),
        **_weight_and_bias("shared_norm", _FALCON + "input_layernorm", "D"),  # where both halves read one norm
        "qkv": Place(_FALCON + "self_attention.query_key_value.weight", "ZD"),
        "o": Place(_FALCON + "self_attention.dense.weight", "DQ"),
        **_weight_and_bias("ffn_norm", _FALCON + "ln_mlp", "D"),
        "up": Place(_FALCON + "mlp.dense_h_to_4h.weight", "FD"),
        "down": Place(_FALCON + "mlp.dense_4h_to_h.weight", "DF"),
        **_weight_and_bias("norm", "ln_f", "D"),
        **_HEAD,
    },
}
LEARNED_OFFSET = 2  # OPT's position p is row p + 2

_OUTER = r"(?:module\.|_orig_mod\.|language_model\.|model\.language_model\.)?"  # what wrappers put in front
_PREFIXES: dict[Layout, tuple[str, str]] = {  # as published, and every spelling accepted
    "llama": ("model.", r"(?:model\.)?"),
    "opt": ("model.decoder.", r"(?:model\.)?(?:decoder\.)?"),
    "falcon": ("transformer.", r"(?:transformer\.)?"),
}


def attention_parts(spec: ModelSpec) -> tuple[str, ...]:
    """AttentionBlock's parameters, in alphabetical order."""
    norms = ["attention_norm"] if spec.shared_norm else ["attention_norm", "ffn_norm"]
    parts = ["q", "k", "v", "o", *norms]
    parts += [f"{norm}_bias" for norm in norms if spec.norm == "layer"]
    parts += ["q_bias", "k_bias", "v_bias"] if spec.qkv_bias else []
    parts += ["q_norm", "k_norm"] if spec.qk_norm else []
    parts += ["o_bias"] if spec.o_bias else []
    parts += ["down_bias"] if spec.ffn_bias else []
    return tuple(sorted(parts))


def unit_parts(spec: ModelSpec) -> tuple[str, ...]:
    """The parts of a unit, in the order in which its rows are stored."""
    return ("gate", "up", "down") if spec.gated else ("up", "down")


def stored_as(part: str, spec: ModelSpec) -> str:
    """The part in whose tensor a part is stored: itself, but for fused projections and shared norms."""
    if spec.layout == "falcon":
        if part in ("q", "k", "v"):
            return "qkv"
        if spec.shared_norm and part.startswith("attention_norm"):
            return part.replace("attention_norm", "shared_norm")
    return part


def fused_rows(part: str, spec: ModelSpec) -> list[slice]:
    """Where q, k or v lies in a fused matrix: for every KV head its queries, then its key, then its value."""
    size, shared = spec.head_dim, spec.heads // spec.kv_heads
    first = {"q": 0, "k": shared, "v": shared + 1}[part] * size
    count = shared * size if part == "q" else size
    stride = (shared + 2) * size
    return [slice(group * stride + first, group * stride + first + count) for group in range(spec.kv_heads)]


def shape_of(part: str, spec: ModelSpec) -> tuple[int, ...]:
    """The stored shape of a part's tensor, in the checkpoint's [out, in] order."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {"V": spec.vocab, "D": spec.hidden, "F": spec.ffn, "H": spec.head_dim, "Q": queries, "K": keys}
    sizes |= {"Z": queries + 2 * keys, "S": spec.max_positions + LEARNED_OFFSET}
    return tuple(sizes[letter] for letter in PLACES[spec.layout][stored_as(part, spec)].letters)


def tensor_name(part: str, spec: ModelSpec, layer: int | None = None, prefix: str | None = None) -> str:
    """("q", llama, 3) -> "model.layers.3.self_attn.q_proj.weight"."""
    published = _PREFIXES[spec.layout][0]
    prefix = published if prefix is None else prefix
    name = PLACES[spec.layout][stored_as(part, spec)].name.format(layer=layer)
    return (_outer(prefix) if part == "head" else prefix) + name


def prefix_of(names: Iterable[str], spec: ModelSpec) -> str:
    """What stands before the embedding's name in this file; the published prefix if it is not there."""
    published, accepted = _PREFIXES[spec.layout]
    pattern = re.compile(f"({_OUTER}{accepted}){re.escape(PLACES[spec.layout]['embed'].name)}")
    found = [match[1] for name in names if (match := pattern.fullmatch(name))]
    return found[0] if len(found) == 1 else published


def _outer(prefix: str) -> str:
    """The wrapper's part of a prefix, which the head has too."""
    match = re.match(_OUTER, prefix)
    return match[0] if match else ""


def expected(spec: ModelSpec) -> dict[Key, tuple[int, ...]]:
    """Every (part, layer) that must be stored -> its shape; a tied model needs no head."""
    once = ["embed", "norm", *(["norm_bias"] if spec.norm == "layer" else [])]
    once += [] if spec.rope is not None else ["positions"]
    once += [] if spec.tied else ["head"]
    each = [*attention_parts(spec), *unit_parts(spec)]
    each += [f"{part}_bias" for part in unit_parts(spec) if spec.ffn_bias]
    stored = dict.fromkeys(stored_as(part, spec) for part in each)  # fused ones once
    keys: list[Key] = [(part, None) for part in once]
    keys += [(part, layer) for layer in range(spec.layers) for part in stored]
    return {(part, layer): shape_of(part, spec) for part, layer in keys}


def is_ignorable(name: str) -> bool:
    """True for tensors that hold nothing the model needs."""
    return any(fnmatchcase(name, pattern) for pattern in IGNORABLE)


def declared_parameters(spec: ModelSpec) -> int:
    """How many parameters the config declares, counted by hand and not from the tables here: it checks them."""
    units = spec.ffn * spec.ffn_parts * spec.hidden + spec.ffn * (spec.ffn_parts - 1) * spec.ffn_bias
    tables = (1 if spec.tied else 2) * spec.vocab * spec.hidden
    if spec.rope is None:
        tables += spec.position_parameters + LEARNED_OFFSET * spec.hidden
    return spec.layers * (spec.block_parameters + units) + tables + spec.norm_parameters
