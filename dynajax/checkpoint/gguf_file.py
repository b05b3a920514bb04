"""A GGUF file of the llama family -> the config, names and row order that a Hugging Face folder would have.

What a GGUF does not say: the activation. Files of these architectures are run with silu everywhere, so silu it
is; a ReLU model stored as `llama` cannot be told apart, convert it from its Hugging Face folder instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.gguf_header import GgufHeader, read_header
from dynajax.checkpoint.reading import READABLE, read_into
from dynajax.checkpoint.shards import Shard, Stored
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.errors import ModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROTARY_PAIRED = ("llama",)  # architectures whose q and k rows are stored as rotary pairs side by side
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
POWERINFER = re.compile(r"blk\.\d+\.(ffn_down_t|fc1|fc2)\.")
TOKENS = "tokenizer.ggml.tokens"
CHAT_TEMPLATE = "tokenizer.chat_template"
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

_NAMES = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(\w+)\.(weight|bias)")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")
_OLD_CONTEXT = 8192.0  # what every llama3 scaling so far was stretched from
_LOW, _HIGH = 1.0, 4.0  # its two bounds, in turns over that context


@dataclass(frozen=True, slots=True, eq=False)
class GgufModel:
    """One file, translated. Nothing but its header was read."""

    config: dict[str, Any]  # as config.json would say it
    shard: Shard  # tensors under their Hugging Face names; its header is the file's
    metadata: dict[str, Any]  # the file's own keys: tokenizer.ggml.*, general.*

    @property
    def chat_template(self) -> str | None:
        value = self.metadata.get(CHAT_TEMPLATE)
        return value if isinstance(value, str) else None

    def token_id(self, role: str) -> int | None:
        """The id of "bos", "eos", "unknown" or "padding"; None if the file names none."""
        value = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_gguf(path: Path) -> GgufModel:
    """Read the header and translate it. ModelError lists everything that is not supported, in one line."""
    header = read_header(path)
    keys = _Keys(header.metadata)
    _check_family(header, keys)
    if not keys.problems:
        config = _config(header, keys)
        tensors = _tensors(header, config, keys.architecture in ROTARY_PAIRED)
        config |= _rope(header, keys, config)
        _check_types(tensors, keys)
    if keys.problems:
        raise ModelError(f"{located(path)}: " + "; ".join(keys.problems))
    return GgufModel(config, Shard(path, header.stamp, header.raw, tensors), header.metadata)


class _Keys:
    """Typed reads of the metadata; what is wrong is collected."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.architecture: Any = metadata.get("general.architecture")
        self.problems: list[str] = []

    def own(self, name: str) -> Any:
        """The value of the architecture's key `name`, "block_count" for one."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer, or a list of one integer again and again, as some converters write per layer."""
        value = self.own(name)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
            value = int(value[0])
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        found = "nothing" if value is None else quoted(value)
        self.problems.append(f"{self.architecture}.{name} must be one integer > 0, got {found}")
        return 1

    def number(self, name: str, default: float | None = None) -> float:
        """A number; stored as float32, so its shortest spelling is taken: 1e-05 and not 9.99999974e-06."""
        value = self.own(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(str(np.float32(value)))
        found = "nothing" if value is None else quoted(value)
        self.problems.append(f"{self.architecture}.{name} must be a number, got {found}")
        return 1.0


def _check_family(header: GgufHeader, keys: _Keys) -> None:
    metadata = header.metadata
    if any(key.startswith("powerinfer.") for key in metadata) or any(POWERINFER.match(name) for name in header.tensors):
        keys.problems.append(
            "this is a PowerInfer GGUF (transposed down, predictors inside), which is not read: "
            "use the model's Hugging Face folder"
        )
    elif not isinstance(keys.architecture, str) or keys.architecture not in ARCHITECTURES:
        found = "nothing" if keys.architecture is None else quoted(keys.architecture)
        keys.problems.append(f"general.architecture {found} is not supported: GGUF of {', '.join(ARCHITECTURES)} only")
    if metadata.get("split.count", 1) not in (0, 1):
        keys.problems.append(f"it is one of {quoted(metadata['split.count'])} parts: merge them (gguf-split --merge)")
    if keys.own("expert_count") not in (None, 0):
        keys.problems.append(f"{keys.architecture}.expert_count {quoted(keys.own('expert_count'))} is not supported")


def _config(header: GgufHeader, keys: _Keys) -> dict[str, Any]:
    """config.json without its rotary part."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=max(1, hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, default=head_dim) != head_dim:
            keys.problems.append(f"{keys.architecture}.{name} {keys.own(name)} differs from the head size {head_dim}")
    embedding = header.tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None else keys.integer("vocab_size")
    tokens = header.metadata.get(TOKENS)
    if isinstance(tokens, list) and len(tokens) > rows:
        keys.problems.append(f"the tokenizer has {len(tokens)} tokens, the embedding {rows} rows")
    bias = any(name.startswith("blk.0.attn_") and name.endswith(".bias") for name in header.tensors)
    return {
        "architectures": [ARCHITECTURES[keys.architecture]],
        "model_type": keys.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": rows,
        "tie_word_embeddings": HEAD not in header.tensors,
        "dtype": _dtype(header),
        **({"attention_bias": bias, "mlp_bias": False} if keys.architecture == "llama" else {}),
        **_special_ids(header.metadata, rows),
    }


def _special_ids(metadata: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id, as far as the file names them."""

    def named(key: str) -> list[int]:
        value = metadata.get(key)
        return [value] if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < rows else []

    ends = list(dict.fromkeys(value for key in END_KEYS for value in named(key)))
    found = {
        "bos_token_id": named("tokenizer.ggml.bos_token_id")[:1],
        "eos_token_id": [ends] if len(ends) > 1 else ends,
        "pad_token_id": named("tokenizer.ggml.padding_token_id")[:1],
    }
    return {name: values[0] for name, values in found.items() if values}


def _dtype(header: GgufHeader) -> str:
    """The type of the matrices; float16 for quantised ones, whose scales are float16: bfloat16 would round more."""
    kinds = {stored.dtype for stored in header.tensors.values() if len(stored.shape) > 1}
    plain_kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    widest = next((name for kind, name in plain_kinds.items() if kind in kinds), "float16")
    return widest if kinds and kinds <= set(plain_kinds) else "float16"


def _tensors(header: GgufHeader, config: Mapping[str, Any], paired: bool) -> dict[str, Stored]:
    """The tensors under their Hugging Face names; those it has no name for keep their own, and are refused later."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for name, stored in header.tensors.items():
        if name == ROPE_FACTORS or name.endswith(".attn_rot_embd.weight"):
            continue
        layer = _LAYER.fullmatch(name)
        part = layer[2] if layer else ""
        if layer and part in _LAYER_NAMES:
            new = f"model.layers.{layer[1]}.{_LAYER_NAMES[part]}.{layer[3]}"
        else:
            new = _NAMES.get(name, name)
        rotary = heads[part] if paired and part in heads and stored.shape[0] % (2 * heads[part]) == 0 else None
        found[new] = replace(stored, name=new, rotary_heads=rotary)
    return found


def _check_types(tensors: Mapping[str, Stored], keys: _Keys) -> None:
    wrong = [f"{name} {plain(stored.dtype)}" for name, stored in tensors.items() if stored.dtype not in READABLE]
    if wrong:
        keys.problems.append(
            f"{len(wrong)} tensors have a type that is not read ({', '.join(READABLE)} are): {listing(wrong)}"
        )


def _rope(header: GgufHeader, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, and rope_scaling if positions are stretched in a way that has a Hugging Face name."""
    theta = keys.number("rope.freq_base", default=10_000.0)
    scaling = _scaling(keys)
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is not None:
        llama3 = _llama3(stored, theta, config["head_dim"])
        if scaling or llama3 is None:
            keys.problems.append(f"{ROPE_FACTORS} holds factors that are not llama3's: not supported")
        scaling = llama3 or scaling
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """The scaling that the keys name; None for none. A key that is not read here is a problem."""
    kind = keys.own("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=1.0))
    start = f"{keys.architecture}.rope.scaling."
    unknown = sorted(key for key in keys.metadata if key.startswith(start) and key[len(start) :] not in _SCALING_KEYS)
    if unknown:
        keys.problems.append(f"{listing(unknown)} not supported")
    if kind not in (None, "none", "linear", "yarn"):
        keys.problems.append(f"{start}type {quoted(kind)} is not supported")
    if kind == "none" or factor == 1.0:
        return None
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length")
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "linear", "factor": factor}


def _llama3(stored: Stored, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling whose factors are in `stored`, {} if they are all one, None if there is none."""
    if stored.dtype != "F32" or stored.shape != (head_dim // 2,):
        return None
    found = np.empty(stored.shape, np.float32)
    read_into(stored, found)
    if (found == 1).all():
        return {}
    scaling = {
        "rope_type": "llama3",
        "factor": float(found.max()),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": int(_OLD_CONTEXT),
    }
    same = np.allclose(found, llama3_factors(theta, head_dim, scaling["factor"]), rtol=1e-4, atol=0)
    return scaling if same else None


def llama3_factors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    """By what each rotary frequency [H/2] is divided: 1 for fast ones, `factor` for slow ones, smooth between."""
    turns = _OLD_CONTEXT * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * pi)
    smooth = np.clip((turns - _LOW) / (_HIGH - _LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
