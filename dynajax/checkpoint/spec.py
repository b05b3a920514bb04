"""config.json -> ModelSpec. Nothing is guessed: what this version does not compute is refused by name.

Three rules. A value the answer depends on must be written in the file (class defaults change between library versions;
only `rope_theta` of dense families, `num_key_value_heads`, `tie_word_embeddings` and what `families` names have
defaults that all files rely on). A key known to change the computation in a way not implemented here (`NEUTRAL`) must
be absent, null or hold a value without effect. Any other key is ignored, `auto_map` among them: code from a model
folder is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynajax.checkpoint.families import FAMILIES
from dynajax.checkpoint.family import Family
from dynajax.checkpoint.fields import Fields, found
from dynajax.checkpoint.gguf_file import read_gguf
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.mixtures import MIXTURES, NOT_YET
from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.rope import read_rope
from dynajax.checkpoint.switch import SWITCH
from dynajax.checkpoint.wording import located, quoted
from dynajax.config import DTYPE_BYTES, Activation, ActivationKind, ModelSpec
from dynajax.errors import ModelError

GGUF = ".gguf"
CONFIG_BYTES = 2**20  # the largest config.json read
ACTIVATIONS: dict[str, ActivationKind] = {"relu": "relu", "fatrelu": "fatrelu", "silu": "silu", "swish": "silu"}

# Keys that change the computation and are not implemented -> values under which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "bias", "lm_head_bias"), (False,)),
    **dict.fromkeys(("sliding_window", "attention_sink", "attn_logit_softcapping", "final_logit_softcapping"), ()),
    **dict.fromkeys(("quantization_config", "compression_config", "clip_qkv", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("scale_emb", "embedding_multiplier", "residual_multiplier", "logit_scale"), (1,)),
    **dict.fromkeys(("logits_scaling", "partial_rotary_factor", "rotary_pct"), (1,)),
    **dict.fromkeys(("scale_depth", "dim_model_base", "attention_multiplier"), ()),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "alibi", "rope_interleave"), (False,)),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "is_encoder_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "num_nextn_predict_layers"), ([], 0)),
    **dict.fromkeys(("thresholds", "sparse_thresholds"), ([],)),  # CATS: one silu threshold per layer
}


def read_spec(folder: Path) -> ModelSpec:
    """The model that `folder/config.json` describes, or the header of a .gguf file. ModelError lists everything wrong
    with it in one line."""
    is_file = folder.suffix == GGUF and folder.is_file()
    return spec_of(read_config(folder), folder if is_file else folder / "config.json")


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says, unchecked; of a .gguf file what it would say."""
    if folder.suffix == GGUF and folder.is_file():
        return read_gguf(folder).config
    path = folder / "config.json"
    if problem := stray_link(path):
        raise ModelError(problem)
    return read_json(path, CONFIG_BYTES)


def spec_of(config: dict, source: Path) -> ModelSpec:
    """The model a config describes; `source` is named in a ModelError."""
    kind = config.get("model_type", _only_family(config.get("architectures")))
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in NOT_YET:
        known = ", ".join([*MIXTURES, *SWITCH])
        raise ModelError(
            f"{located(source)}: model_type {found(kind)} is a mixture of experts that this version does not run yet "
            f"({NOT_YET[kind]}): it runs {known}"
        )
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{located(source)}: model_type {found(kind)} is not supported: this version runs {known}")
    fields = Fields(_renamed(config, family))
    _check_architectures(fields, family)
    _check_neutral(fields, family)
    values = _sizes(fields)
    values |= _rest(fields, family, values["vocab"])
    values |= family.traits(fields)
    _check_heads(fields, values)
    if fields.problems:
        problems = [_own_names(problem, family) for problem in dict.fromkeys(fields.problems)]
        raise ModelError(f"{located(source)}: " + "; ".join(problems))
    return ModelSpec(layout=family.layout, **values)


def _only_family(architectures: object) -> str | None:
    """The family of a config without model_type, as old ones with code of their own are, if its class is only one's."""
    names = [name for name, family in FAMILIES.items() if architectures == list(family.architectures)]
    return names[0] if len(names) == 1 else None


def _renamed(config: dict, family: Family) -> dict[str, Any]:
    """The config under llama's names, with the family's defaults where it says nothing."""
    named = dict(config)
    for name, theirs in family.rename.items():
        if config.get(theirs) is not None:
            named[name] = config[theirs]
    return named | {name: value for name, value in family.defaults.items() if named.get(name) is None}


def _own_names(problem: str, family: Family) -> str:
    """A problem in the words of the file it is about."""
    name, space, text = problem.partition(" ")
    return family.rename.get(name, name) + space + text


def _check_architectures(fields: Fields, family: Family) -> None:
    names = fields.get("architectures")
    listed = names if isinstance(names, list) else [] if names is None else [names]
    if any(name not in family.architectures for name in listed):
        known = ", ".join(family.architectures)
        fields.complain(f"architectures {quoted(names)} is not supported: of this model_type this version runs {known}")


def _check_neutral(fields: Fields, family: Family) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if name not in family.reads and value is not None and value not in neutral:
            fields.complain(f"{name} {quoted(value)} is not implemented")
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        fields.complain(f"layer_types {quoted(kinds)} is not implemented: full_attention only")


def _sizes(fields: Fields) -> dict[str, Any]:
    """The integer fields of ModelSpec, with the bounds that keep a lying config from costing memory."""
    before = len(fields.problems)
    hidden = fields.integer("hidden_size", 2**17)
    heads = fields.integer("num_attention_heads", 2**12)
    kv_heads = fields.integer("num_key_value_heads", 2**12, default=heads)
    head_dim = fields.integer("head_dim", 2**12, default=max(1, hidden // heads))
    if len(fields.problems) == before and fields.get("head_dim") is None and hidden % heads:
        fields.complain(f"hidden_size {hidden} must be a multiple of num_attention_heads {heads} (no head_dim given)")
    return {
        "layers": fields.integer("num_hidden_layers", 2**10),
        "hidden": hidden,
        "ffn": fields.integer("intermediate_size", 2**20, default=_ffn_default(fields, hidden)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": fields.integer("vocab_size", 2**22),
        "max_positions": fields.integer("max_position_embeddings", 2**24),
    }


def _ffn_default(fields: Fields, hidden: int) -> int | None:
    """Falcon's files leave it out."""
    return 4 * hidden if fields.get("model_type") == "falcon" else None


def _check_heads(fields: Fields, values: dict[str, Any]) -> None:
    heads, kv_heads, head_dim = values["heads"], values["kv_heads"], values["head_dim"]
    if fields.problems:
        return  # only without any do the numbers mean something together
    if heads % kv_heads:
        fields.complain(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2 and values["rope"] is not None and values.get("latent") is None:
        fields.complain(f"the head size must be even for rotary positions, got {head_dim}")


def _rest(fields: Fields, family: Family, vocab: int) -> dict[str, Any]:
    bos_ids = fields.token_ids("bos_token_id", vocab)
    return {
        "activation": _activation(fields, family),
        "rope": read_rope(fields),
        "norm_eps": fields.number("rms_norm_eps", fields.get("rms_norm_eps"), positive=True),
        "tied": fields.flag("tie_word_embeddings", False),  # absent: false, as every llama config class has it
        "dtype": _dtype(fields),
        "bos_id": bos_ids[0] if bos_ids else None,
        "eos_ids": fields.token_ids("eos_token_id", vocab),
    }


def _activation(fields: Fields, family: Family) -> Activation:
    """hidden_act, with hidden_act_param as fatrelu's threshold (SparseLLM's ProSparse spelling)."""
    name, param = fields.get("hidden_act"), fields.get("hidden_act_param")
    known = family.activations or ACTIVATIONS
    kind = known.get(name) if isinstance(name, str) else None
    if kind is None:
        shifted = isinstance(name, str) and "shift" in name
        why = "shifted ReLU is not implemented" if shifted else "not supported"
        fields.complain(
            f"hidden_act {found(name)}: {why}; this version runs {', '.join(family.activations or ACTIVATIONS)}"
        )
        return Activation()
    if kind == "fatrelu":
        return Activation(kind=kind, threshold=fields.number("hidden_act_param", param, positive=False))
    if param not in (None, 0):
        fields.complain(
            f"hidden_act_param {quoted(param)} has no meaning with hidden_act {quoted(name)}: is it fatrelu?"
        )
    return Activation(kind=kind)


def _dtype(fields: Fields) -> str:
    """The type the weights were meant for: `dtype`, else `torch_dtype`, else float32."""
    value = fields.get("dtype") if fields.get("dtype") is not None else fields.get("torch_dtype")
    if value is None:
        return "float32"
    if isinstance(value, str) and value in DTYPE_BYTES:
        return value
    fields.complain(f"dtype {quoted(value)} is not supported: this version runs {', '.join(DTYPE_BYTES)}")
    return "float32"
