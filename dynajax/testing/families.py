"""Tiny random checkpoints of every dense model family, each spelled as the published model spells it.

    write(folder, "minicpm", scale_depth=2.0)      # config.json and model.safetensors
    family_logits(folder, tokens)                  # dynajax.testing.oracle: what the model must compute

`None` in a config is JSON's null, as in the published file; a key that the published file lacks is missing here too.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published spelling. `shapes` gives the tensors of a config by their published names."""

    published: str  # the model whose config.json is followed
    base: Mapping[str, Any]
    shapes: Callable[[Config], Shapes]

    def config(self, **overrides: Any) -> Config:
        """A fresh config.json; overrides are set as they are, also keys that the published file lacks."""
        return copy.deepcopy({**self.base, **overrides})

    def tensors(self, config: Config, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
        """Random weights, scaled so that every part matters to the logits."""
        rng = np.random.default_rng(seed)
        return {name: _filled(name, shape, config, rng) for name, shape in self.shapes(config).items()}


def write(folder: Path, family: str | Family, *, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Path:
    """Write config.json and model.safetensors of a family, or of FAMILIES[family]; -> `folder`."""
    family = FAMILIES[family] if isinstance(family, str) else family
    folder.mkdir(parents=True, exist_ok=True)
    config = family.config(**{"torch_dtype": dtype, **overrides})
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {name: value.astype(kind) for name, value in family.tensors(config, seed).items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- tensors ------------------------------------------------------------------------------------------------------


def llama_shapes(config: Config, *, predictor_rank: int = 0) -> Shapes:
    """llama and what has its names; with a predictor as in TurboSparse, whose config does not tell its rank."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv = size * (config.get("num_key_value_heads") or heads)
    attention_bias, qwen2 = config.get("attention_bias", False), config.get("model_type") == "qwen2"
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        for part, width in (("q", heads * size), ("k", kv), ("v", kv)):
            shapes |= _linear(f"{at}self_attn.{part}_proj", width, hidden, bias=attention_bias or qwen2)
        if config.get("model_type") == "qwen3":
            shapes |= {f"{at}self_attn.{part}_norm.weight": (size,) for part in "qk"}
        shapes |= _linear(f"{at}self_attn.o_proj", hidden, heads * size, bias=attention_bias)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
        for part, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            shapes |= _linear(f"{at}mlp.{part}_proj", rows, columns, bias=config.get("mlp_bias", False))
        if predictor_rank:
            shapes |= _linear(f"{at}mlp.predictor.fc1", predictor_rank, hidden, bias=False)
            shapes |= _linear(f"{at}mlp.predictor.fc2", ffn, predictor_rank, bias=False)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", "scale_emb" in config):  # MiniCPM ties without saying so
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def opt_shapes(config: Config, *, root: str = "model.decoder.") -> Shapes:
    hidden, bias = config["hidden_size"], config.get("enable_bias", True)
    shapes: Shapes = {
        f"{root}embed_tokens.weight": (config["vocab_size"], hidden),
        f"{root}embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
        **_norm(f"{root}final_layer_norm", hidden),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"{root}layers.{i}."
        for part in ("k", "v", "q", "out"):
            shapes |= _linear(f"{at}self_attn.{part}_proj", hidden, hidden, bias=bias)
        shapes |= _norm(f"{at}self_attn_layer_norm", hidden) | _norm(f"{at}final_layer_norm", hidden)
        shapes |= _linear(f"{at}fc1", config["ffn_dim"], hidden, bias=bias)
        shapes |= _linear(f"{at}fc2", hidden, config["ffn_dim"], bias=bias)
    return shapes


def falcon_shapes(config: Config) -> Shapes:
    hidden, bias, new = config["hidden_size"], config["bias"], config["new_decoder_architecture"]
    ffn = config.get("ffn_hidden_size") or 4 * hidden  # no published file names it
    size = hidden // config["num_attention_heads"]
    kv = config["num_kv_heads"] if new else 1
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"transformer.h.{i}."
        for norm in ("ln_attn", "ln_mlp") if new else ("input_layernorm",):
            shapes |= _norm(f"{at}{norm}", hidden)
        shapes |= _linear(f"{at}self_attention.query_key_value", hidden + 2 * kv * size, hidden, bias=bias)
        shapes |= _linear(f"{at}self_attention.dense", hidden, hidden, bias=bias)
        shapes |= _linear(f"{at}mlp.dense_h_to_4h", ffn, hidden, bias=bias)
        shapes |= _linear(f"{at}mlp.dense_4h_to_h", hidden, ffn, bias=bias)
    return shapes | _norm("transformer.ln_f", hidden)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _filled(name: str, shape: tuple[int, ...], config: Config, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Weights that keep a hidden state near 1, gates half positive, attention peaked, every bias felt."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(".bias"):
        return np.float32(0.3) * noise
    if len(shape) == 1:  # the weight of a norm
        return 1 + np.float32(0.2) * noise
    if "embed" in name:
        return noise * np.float32(1 / config.get("scale_emb", config.get("embedding_multiplier", 1)))
    scale = 1.0
    if any(part in name for part in ("q_proj", "k_proj", "query_key_value", "q_b_proj", "kv_a_proj")):
        scale = 2.0  # peaked: positions matter
    elif any(part in name for part in ("down_proj", "fc2", "dense_4h_to_h", "w2.weight", "output_linear")):
        scale = 2.0  # half of what it adds up is zero
    elif config.get("hidden_act") == "fatrelu" and config["hidden_act_param"] > 0:
        gate = 2 * config["hidden_act_param"]  # one gate in five lies between 0 and the threshold
        scale = {"gate_proj": gate, "up_proj": 1 / gate}.get(name.split(".")[-2], 1.0)
    return noise * np.float32(scale / shape[-1] ** 0.5)


# --- configs ------------------------------------------------------------------------------------------------------

_SIZES: Config = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 96,
}
_COMMON: Config = {
    **_SIZES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float32",
    "use_cache": True,
}
_RELULLAMA: Config = {  # no rope_theta
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "relu",
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_LLAMA3: Config = {
    **_RELULLAMA,
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_type": "llama3",
    },
}
_LINEAR: Config = {**_RELULLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}}
_YARN: Config = {
    **_RELULLAMA,
    "hidden_size": 48,  # six pairs a head: enough to tell one ramp from another
    "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 64, "type": "yarn", "finetuned": True},
}
_PROSPARSE: Config = {
    **_RELULLAMA,
    "architectures": ["SparseLlamaForCausalLM"],
    "model_type": "sparsellama",
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.01,
}
_SPARSELM: Config = {
    **_RELULLAMA,
    "architectures": ["SparseLlamaForCausalLM"],
    "model_type": "llama_sparse_relu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",  # and yet it is a ReLU
    "mlp_bias": False,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
_MISTRAL: Config = {
    **_COMMON,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "sliding_window": 64,
    "tie_word_embeddings": False,
}
_BAMBOO: Config = {
    **_MISTRAL,
    "architectures": ["BambooForCausalLM"],
    "model_type": "bamboo",
    "attention_dropout": 0.0,
    "hidden_act": "relu",  # twice: on gate and on up
}
_MINICPM_UNTYPED: Config = {  # neither model_type nor tie_word_embeddings nor rope_theta
    **_COMMON,
    "architectures": ["MiniCPMForCausalLM"],
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.03,
    "num_key_value_heads": 2,
    "rope_scaling": None,
    "scale_emb": 12,
    "dim_model_base": 8,
    "scale_depth": 1.4,
}
_MINICPM_LLAMA: Config = {**_RELULLAMA, "hidden_act": "fatrelu", "hidden_act_param": 0.03, "num_key_value_heads": 2}
_QWEN2: Config = {
    **_COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_window_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
_QWEN3: Config = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 16,  # times heads is not hidden_size
    "rope_scaling": None,
    "sliding_window": None,
}
_OPT: Config = {
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 80,
    "hidden_size": 32,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 512,
    "model_type": "opt",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 96,
    "word_embed_proj_dim": 32,
}
_FALCON: Config = {  # neither ffn size nor max_position_embeddings nor rope_theta nor tie_word_embeddings
    "activation": "relu",
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "new_decoder_architecture": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_kv_heads": 2,
    "parallel_attn": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 96,
}
_FALCON_7B: Config = {  # num_kv_heads is there, and does not count
    **_FALCON,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_kv_heads": 4,
}


def _llama(published: str, base: Config, **changes: Any) -> Family:
    return Family(published=published, base={**base, **changes}, shapes=llama_shapes)


FAMILIES: dict[str, Family] = {
    "llama": _llama("SparseLLM/ReluLLaMA-7B", _RELULLAMA),
    "llama-biases": _llama("llama with every bias", _LLAMA3, attention_bias=True, mlp_bias=True, rope_scaling=None),
    "llama-linear": _llama("lmsys/vicuna-7b-v1.5-16k", _LINEAR),
    "llama-llama3": _llama("meta-llama/Llama-3.1-8B", _LLAMA3),
    "llama-yarn": _llama("NousResearch/Yarn-Llama-2-7b-64k", _YARN),
    "sparsellama": _llama("SparseLLM/prosparse-llama-2-7b", _PROSPARSE),
    "sparselm": _llama("SakanaAI/SparseLM2B", _SPARSELM),
    "mistral": _llama("mistralai/Mistral-7B-v0.1", _MISTRAL),
    "bamboo": _llama("PowerInfer/Bamboo-base-v0_1", _BAMBOO),
    "turbosparse": Family(
        published="PowerInfer/TurboSparse-Mistral-Instruct",
        base=_BAMBOO,
        shapes=partial(llama_shapes, predictor_rank=6),
    ),
    "minicpm": _llama("openbmb/MiniCPM-S-1B-sft", _MINICPM_UNTYPED, model_type="minicpm"),
    "minicpm-untyped": _llama("openbmb/MiniCPM-2B-sft-bf16", _MINICPM_UNTYPED),
    "minicpm-llama": _llama("openbmb/MiniCPM-S-1B-sft-llama-format", _MINICPM_LLAMA),
    "qwen2": _llama("Qwen/Qwen2-7B", _QWEN2),
    "qwen3": _llama("Qwen/Qwen3-8B", _QWEN3),
    "opt": Family(published="facebook/opt-125m", base=_OPT, shapes=opt_shapes),
    "opt-bare": Family(
        published="facebook/opt weights saved without `model.`",
        base=_OPT,
        shapes=partial(opt_shapes, root="decoder."),
    ),
    "falcon-40b": Family(published="SparseLLM/ReluFalcon-40B", base=_FALCON, shapes=falcon_shapes),
    "falcon-7b": Family(published="tiiuae/falcon-7b", base=_FALCON_7B, shapes=falcon_shapes),
}
