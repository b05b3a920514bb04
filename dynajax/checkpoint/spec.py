"""config.json -> ModelSpec. Nothing is guessed: what this version does not compute is refused by name.

Three rules. A value the answer depends on must be written in the file (class defaults change between
library versions; only `rope_theta`, `num_key_value_heads` and `tie_word_embeddings` have defaults every
llama-family file relies on). A key known to change the computation in a way not implemented here
(`NEUTRAL`) must be absent, null or hold a value without effect. Any other key is ignored, `auto_map`
among them: code from a model folder is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.paths import stray_link
from dynajax.checkpoint.wording import located, quoted
from dynajax.config import DTYPE_BYTES, Activation, ActivationKind, ModelSpec
from dynajax.errors import ModelError

CONFIG_BYTES = 2**20  # the largest config.json read
MODEL_TYPES = ("llama", "sparsellama")
ARCHITECTURES = ("LlamaForCausalLM", "SparseLlamaForCausalLM")
ACTIVATIONS: dict[str, ActivationKind] = {"relu": "relu", "fatrelu": "fatrelu", "silu": "silu", "swish": "silu"}
MOST_IDS = 256  # end-of-text tokens
DEFAULT_ROPE_THETA = 10_000.0
PLAIN_ROPE = (None, "default")

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
    """The model `folder/config.json` describes. ModelError lists everything wrong with it in one line."""
    path = folder / "config.json"
    if problem := stray_link(path):
        raise ModelError(problem)
    fields = _Fields(read_json(path, CONFIG_BYTES))
    _check_family(fields)
    _check_neutral(fields)
    sizes = _sizes(fields)
    rest = _rest(fields, sizes["vocab"])
    if fields.problems:
        raise ModelError(f"{located(path)}: " + "; ".join(fields.problems))
    return ModelSpec(**sizes, **rest)


class _Fields:
    """Typed reads from a config; what is wrong is collected, and a harmless stand-in returned."""

    def __init__(self, config: dict):
        self.config = config
        self.problems: list[str] = []

    def complain(self, text: str) -> None:
        self.problems.append(text)

    def get(self, name: str) -> object:
        return self.config.get(name)

    def integer(self, name: str, most: int, default: int | None = None) -> int:
        """An int (never a bool, a float or a string) from 1 to `most`; None means `default`, if there is one."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        self.complain(f"{name} must be an integer from 1 to {most}, got {_found(value)}")
        return most

    def number(self, name: str, value: object, *, positive: bool) -> float:
        """A finite number > 0 (or >= 0)."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (0 < value < 1e30 or (value == 0 and not positive)):  # NaN and infinity fail too
            return float(value)
        self.complain(f"{name} must be a number {'>' if positive else '>='} 0, got {_found(value)}")
        return 1.0

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """One id, a list of them, or nothing."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        ids = tuple(i for i in listed if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab)
        if len(ids) == len(listed) <= MOST_IDS:
            return ids
        self.complain(f"{name} must be at most {MOST_IDS} token ids below vocab_size {vocab}, got {_found(value)}")
        return ()


def _found(value: object) -> str:
    return "nothing" if value is None else quoted(value)


def _check_family(fields: _Fields) -> None:
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        fields.complain(f"model_type {_found(kind)} is not supported: this version runs {', '.join(MODEL_TYPES)}")
    names = fields.get("architectures")
    listed = names if isinstance(names, list) else [] if names is None else [names]
    if any(name not in ARCHITECTURES for name in listed):
        fields.complain(f"architectures {quoted(names)} is not supported: this version runs {', '.join(ARCHITECTURES)}")


def _check_neutral(fields: _Fields) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            fields.complain(f"{name} {quoted(value)} is not implemented")
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        fields.complain(f"layer_types {quoted(kinds)} is not implemented: full_attention only")


def _sizes(fields: _Fields) -> dict[str, Any]:
    """The integer fields of ModelSpec, with the bounds that keep a lying config from costing memory."""
    before = len(fields.problems)
    hidden = fields.integer("hidden_size", 2**17)
    heads = fields.integer("num_attention_heads", 2**12)
    kv_heads = fields.integer("num_key_value_heads", 2**12, default=heads)
    head_dim = fields.integer("head_dim", 2**12, default=max(1, hidden // heads))
    if len(fields.problems) == before:  # only then do the four numbers mean something together
        if fields.get("head_dim") is None and hidden % heads:
            fields.complain(
                f"hidden_size {hidden} must be a multiple of num_attention_heads {heads} (no head_dim given)"
            )
        if heads % kv_heads:
            fields.complain(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            fields.complain(f"the head size must be even for rotary positions, got {head_dim}")
    return {
        "layers": fields.integer("num_hidden_layers", 2**10),
        "hidden": hidden,
        "ffn": fields.integer("intermediate_size", 2**20),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": fields.integer("vocab_size", 2**22),
        "max_positions": fields.integer("max_position_embeddings", 2**24),
    }


def _rest(fields: _Fields, vocab: int) -> dict[str, Any]:
    tied = fields.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        fields.complain(f"tie_word_embeddings must be true or false, got {quoted(tied)}")
    bos_ids = fields.token_ids("bos_token_id", vocab)
    return {
        "activation": _activation(fields),
        "rope_theta": _rope_theta(fields),
        "norm_eps": fields.number("rms_norm_eps", fields.get("rms_norm_eps"), positive=True),
        "tied": tied is True,  # absent: false, as every llama config class has it; a missing head is then named
        "dtype": _dtype(fields),
        "bos_id": bos_ids[0] if bos_ids else None,
        "eos_ids": fields.token_ids("eos_token_id", vocab),
    }


def _activation(fields: _Fields) -> Activation:
    """hidden_act, with hidden_act_param as fatrelu's threshold (SparseLLM's ProSparse spelling)."""
    name, param = fields.get("hidden_act"), fields.get("hidden_act_param")
    kind = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        shifted = isinstance(name, str) and "shift" in name
        why = "shifted ReLU is not implemented" if shifted else "not supported"
        fields.complain(f"hidden_act {_found(name)}: {why}; this version runs {', '.join(ACTIVATIONS)}")
        return Activation()
    if kind == "fatrelu":
        return Activation(kind=kind, threshold=fields.number("hidden_act_param", param, positive=False))
    if param not in (None, 0):
        fields.complain(
            f"hidden_act_param {quoted(param)} has no meaning with hidden_act {quoted(name)}: is it fatrelu?"
        )
    return Activation(kind=kind)


def _rope_theta(fields: _Fields) -> float:
    """The rotary base from `rope_theta`, or from `rope_parameters` / `rope_scaling` (transformers 5)."""
    plain_base = fields.get("rope_theta")
    bases = [] if plain_base is None else [fields.number("rope_theta", plain_base, positive=True)]
    for name in ("rope_parameters", "rope_scaling"):
        table = fields.get(name)
        if table is None:
            continue
        if not isinstance(table, dict):
            fields.complain(f"{name} must be an object or null, got {quoted(table)}")
            continue
        for kind in (table.get("rope_type"), table.get("type")):
            if kind not in PLAIN_ROPE:
                fields.complain(f"{name} of type {quoted(kind)} is not implemented")
        if table.get("partial_rotary_factor") not in (None, 1):
            fields.complain(f"{name}.partial_rotary_factor {quoted(table['partial_rotary_factor'])} is not implemented")
        if table.get("rope_theta") is not None:
            bases.append(fields.number(f"{name}.rope_theta", table["rope_theta"], positive=True))
    if len(set(bases)) > 1:
        fields.complain(f"two different rotary bases are given: {', '.join(str(base) for base in bases)}")
    return bases[0] if bases else DEFAULT_ROPE_THETA


def _dtype(fields: _Fields) -> str:
    """The type the weights were meant for: `dtype`, else `torch_dtype`, else float32."""
    value = fields.get("dtype") if fields.get("dtype") is not None else fields.get("torch_dtype")
    if value is None:
        return "float32"
    if isinstance(value, str) and value in DTYPE_BYTES:
        return value
    fields.complain(f"dtype {quoted(value)} is not supported: this version runs {', '.join(DTYPE_BYTES)}")
    return "float32"
