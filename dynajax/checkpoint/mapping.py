"""What the checkpoint of each layout holds and where it goes. Names only, no files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from dynajax.checkpoint.layouts import LEARNED_OFFSET, OUTER, PLACES, Place, prefixes
from dynajax.config import ModelSpec

# Recomputed from rope_theta; attention masks of old files; TurboSparse's predictors, which only guess what is zero.
IGNORABLE = ("*rotary_emb.inv_freq", "*.masked_bias", "*.mlp.predictor.fc?.weight")
# Copies of the one embedding, and a table of old T5 files that no attention between decoder and encoder reads.
OF_ENCODERS = (
    *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
Key = tuple[str, int | None]  # part and layer
_EXPERT = re.compile(r"expert_(gate|up|down)\.(\d+)")


def attention_parts(spec: ModelSpec, layer: int = 0) -> tuple[str, ...]:
    """The parameters of a layer's block of attention (see `models`), in alphabetical order."""
    norms = ["attention_norm"] if spec.shared_norm else ["attention_norm", "ffn_norm"]
    if spec.latent is not None:
        queries = ["q"] if spec.latent.q_rank is None else ["q_down", "q_down_norm", "q_up"]
        return tuple(sorted([*queries, "kv_down", "kv_down_norm", "key_up", "value_up", "o", *norms]))
    parts = ["q", "k", "v", "o", *norms]
    parts += [f"{norm}_bias" for norm in norms if spec.norm == "layer"]
    parts += ["q_bias", "k_bias", "v_bias"] if spec.qkv_bias else []
    parts += ["q_norm", "k_norm"] if spec.qk_norm or spec.qk_norm_whole else []
    parts += ["o_bias"] if spec.o_bias else []
    parts += ["down_bias"] if spec.ffn_bias else []
    if spec.encoder is not None:
        parts += ["relative"]
        parts += [f"cross_{part}" for part in ("norm", "q", "k", "v", "o")] if layer in spec.stepped else []
    return tuple(sorted(parts))


def routing_parts(spec: ModelSpec, layer: int) -> dict[str, str]:
    """RoutingBlock's parameters -> the parts that they are stored as; none without experts."""
    if spec.experts is None:
        return {}
    if layer not in spec.experts.layers:
        return {part: part for part in unit_parts(spec)}
    parts = {"router": "router"}
    if spec.experts.shared != "none":
        parts |= {part: f"shared_{part}" for part in unit_parts(spec)}
    return parts | ({"mix": "mix"} if spec.experts.shared == "gated" else {})


def unit_parts(spec: ModelSpec) -> tuple[str, ...]:
    """The parts of a unit, in the order in which its rows are stored."""
    return ("gate", "up", "down") if spec.gated else ("up", "down")


def expert_part(part: str, expert: int) -> str:
    """("gate", 17) -> the key's part of that expert's tensor, in files that hold each by itself."""
    return f"expert_{part}.{expert}"


def is_unit_part(part: str, spec: ModelSpec) -> bool:
    """Whether a tensor goes into the arenas of the units: an FFN's weights and biases, with experts only theirs."""
    if spec.experts is not None:
        return part.startswith("expert")
    return part != "down_bias" and part.removesuffix("_bias") in unit_parts(spec)


def stack_of(spec: ModelSpec, layer: int) -> int:
    """The first layer of the stack that a layer belongs to, which holds the relative positions of all of them."""
    return spec.stepped[0] if layer in spec.stepped else 0


def stored_as(part: str, spec: ModelSpec) -> str:
    """The part in whose tensor a part is stored: itself, but for fused projections and shared norms."""
    if part in ("key_up", "value_up"):
        return "kv_up"
    if spec.layout == "falcon":
        if part in ("q", "k", "v"):
            return "qkv"
        if spec.shared_norm and part.startswith("attention_norm"):
            return part.replace("attention_norm", "shared_norm")
    return part


def fused_rows(part: str, spec: ModelSpec) -> list[slice]:
    """Where a part lies in a fused matrix.

    q, k and v: for every KV head its queries, then its key, then its value. key_up and value_up: for every head the
    rows of its key, then those of its value.
    """
    if spec.latent is not None:
        plain, value = spec.latent.plain, spec.latent.value
        first, count = {"key_up": (0, plain), "value_up": (plain, value)}[part]
        stride, groups = plain + value, spec.heads
    else:
        size, shared = spec.head_dim, spec.heads // spec.kv_heads
        first = {"q": 0, "k": shared, "v": shared + 1}[part] * size
        count, stride, groups = (shared * size if part == "q" else size), (shared + 2) * size, spec.kv_heads
    return [slice(group * stride + first, group * stride + first + count) for group in range(groups)]


def shape_of(part: str, spec: ModelSpec) -> tuple[int, ...]:
    """The stored shape of a part's tensor, in the checkpoint's [out, in] order."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.qk_norm_whole and part in ("q_norm", "k_norm"):
        return (queries if part == "q_norm" else keys,)
    sizes = {"V": spec.vocab, "D": spec.hidden, "F": spec.ffn, "H": spec.head_dim, "Q": queries, "K": keys, "I": 1}
    sizes |= {"Z": queries + 2 * keys, "S": spec.max_positions + LEARNED_OFFSET}
    if spec.experts is not None:
        sizes |= {"E": spec.units, "W": spec.unit_rows, "U": 2 * spec.unit_rows, "X": spec.experts.shared_width}
    if spec.encoder is not None:
        sizes |= {"R": spec.encoder.buckets, "N": spec.heads}
    if (latent := spec.latent) is not None:
        sizes |= {"A": latent.q_rank or 0, "C": latent.kv_rank, "B": latent.kv_rank + latent.rotary}
        sizes |= {"G": spec.heads * (latent.plain + latent.value), "Y": spec.heads * latent.value}
    return tuple(sizes[letter] for letter in _place(part, spec)[0].letters)


def tensor_name(
    part: str, spec: ModelSpec, layer: int | None = None, prefix: str | None = None, *, merged: bool = False
) -> str:
    """("q", llama, 3) -> "model.layers.3.self_attn.q_proj.weight"; merged: as transformers 5 names it in memory."""
    published, _ = prefixes(spec.layout)
    prefix = published if prefix is None else prefix
    place, expert = _place(part, spec)
    name = place.merged if merged and place.merged is not None else place.name
    where = {} if spec.encoder is None or layer is None else _in_stack(spec, layer)
    return (_outer(prefix) if part == "head" else prefix) + name.format(layer=layer, expert=expert, **where)


def _in_stack(spec: ModelSpec, layer: int) -> dict[str, str | int]:
    """What a name says of a layer where there are two stacks; half: of a layer, the one with its FFN."""
    decoding = layer in spec.stepped
    return {"stack": "decoder" if decoding else "encoder", "block": layer - stack_of(spec, layer), "half": 1 + decoding}


def _place(part: str, spec: ModelSpec) -> tuple[Place, int | None]:
    """A part's place in its layout, and the number of the expert that it names."""
    places = PLACES[spec.layout]
    if match := _EXPERT.fullmatch(part):
        return places[f"expert_{match[1]}"], int(match[2])
    return places[stored_as(part, spec)], None


def prefix_of(names: Iterable[str], spec: ModelSpec) -> str:
    """What stands before the embedding's name in this file; the published prefix if it is not there."""
    published, accepted = prefixes(spec.layout)
    pattern = re.compile(f"({OUTER}{accepted}){re.escape(PLACES[spec.layout]['embed'].name)}")
    found = [match[1] for name in names if (match := pattern.fullmatch(name))]
    return found[0] if len(found) == 1 else published


def is_merged(names: Collection[str], spec: ModelSpec, prefix: str) -> bool:
    """Whether this file holds a layer's experts as transformers 5 does in memory: three axes, names of its own."""
    if spec.experts is None or "experts_down" not in PLACES[spec.layout]:
        return False
    return tensor_name("experts_down", spec, spec.experts.layers[0], prefix, merged=True) in names


def _outer(prefix: str) -> str:
    """The wrapper's part of a prefix, which the head has too."""
    match = re.match(OUTER, prefix)
    return match[0] if match else ""


def expected(spec: ModelSpec, *, merged: bool = False) -> dict[Key, tuple[int, ...]]:
    """Every (part, layer) that must be stored -> its shape; a tied model needs no head."""
    once = ["embed", "norm", *(["norm_bias"] if spec.norm == "layer" else [])]
    once += (["positions"] if spec.learned_positions else []) + (["encoder_norm"] if spec.encoder is not None else [])
    once += [] if spec.tied else ["head"]
    keys: list[Key] = [(part, None) for part in once]
    units = [*unit_parts(spec), *(f"{part}_bias" for part in unit_parts(spec) if spec.ffn_bias)]
    experts = _expert_parts(spec, merged)
    for layer in range(spec.layers):
        attention = [*attention_parts(spec, layer), *(units if spec.experts is None else [])]
        stored = dict.fromkeys(stored_as(part, spec) for part in attention)  # fused ones once
        if layer != stack_of(spec, layer):
            stored.pop("relative", None)
        parts = [*stored, *routing_parts(spec, layer).values()]
        parts += experts if spec.experts is not None and layer in spec.experts.layers else []
        keys += [(part, layer) for part in parts]
    shapes = {part: shape_of(part, spec) for part in {part for part, _ in keys}}
    return {(part, layer): shapes[part] for part, layer in keys}


def _expert_parts(spec: ModelSpec, merged: bool) -> list[str]:
    """The tensors of one layer's experts."""
    if spec.experts is None:
        return []
    if merged or "expert_up" not in PLACES[spec.layout]:
        return ["experts_gate_up", "experts_down"]
    return [expert_part(part, expert) for expert in range(spec.units) for part in unit_parts(spec)]


def is_ignorable(name: str, spec: ModelSpec | None = None) -> bool:
    """True for tensors that hold nothing the model needs; spec None: whatever the model."""
    known = IGNORABLE if spec is None or spec.encoder is None else IGNORABLE + OF_ENCODERS
    return any(fnmatchcase(name, pattern) for pattern in known)


def declared_parameters(spec: ModelSpec) -> int:
    """How many parameters the config declares, counted by hand and not from the tables here: it checks them."""
    tables = (1 if spec.tied else 2) * spec.vocab * spec.hidden
    if spec.learned_positions:
        tables += spec.position_parameters + LEARNED_OFFSET * spec.hidden
    units = spec.units * spec.unit_rows * spec.ffn_parts * spec.hidden + spec.ffn * (spec.ffn_parts - 1) * spec.ffn_bias
    count = spec.layers * spec.block_parameters + len(spec.unit_layers) * units
    if spec.encoder is not None:  # one table a stack
        count += spec.cross_parameters - (spec.layers - 2) * spec.relative_parameters
    return count + sum(map(spec.always_parameters, range(spec.layers))) + tables + spec.norm_parameters
