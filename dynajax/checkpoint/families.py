"""The families: how each one's config.json spells what every model has, and what it has of its own."""

from __future__ import annotations

from dynajax.checkpoint.family import QWEN_READS, Family, Traits, biases, no_sliding_window
from dynajax.checkpoint.fields import Fields, found
from dynajax.checkpoint.mixtures import MIXTURES
from dynajax.checkpoint.switch import SWITCH
from dynajax.checkpoint.wording import quoted


def _llama(fields: Fields) -> Traits:
    return biases(fields) | {"ffn_bias": fields.flag("mlp_bias", False)}


def _mistral(fields: Fields) -> Traits:
    """Without the key the window is 4,096, in the config class of every version."""
    window = fields.integer("sliding_window", 2**24, default=4096) if _window_is_on(fields) else None
    return {"window": window}


def _window_is_on(fields: Fields) -> bool:
    return "sliding_window" not in fields.config or fields.get("sliding_window") is not None


def _minicpm(fields: Fields) -> Traits:
    """Hu et al. 2024, section 3: embeddings x scale_emb, every residual branch x scale_depth / sqrt(L), logits over
    hidden_size / dim_model_base."""
    layers, hidden = fields.get("num_hidden_layers"), fields.get("hidden_size")
    whole = isinstance(layers, int) and isinstance(hidden, int) and layers > 0 and hidden > 0
    depth = fields.number("scale_depth", fields.get("scale_depth"), positive=True)
    base = fields.number("dim_model_base", fields.get("dim_model_base"), positive=True)
    return {
        "embed_scale": fields.number("scale_emb", fields.get("scale_emb"), positive=True),
        "residual_scale": depth / layers**0.5 if whole else 1.0,
        "logit_scale": base / hidden if whole else 1.0,
    }


def _opt(fields: Fields) -> Traits:
    neutral = {"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True}
    for name, wanted in (neutral | {"_remove_final_layer_norm": False}).items():
        if fields.flag(name, wanted) is not wanted:
            fields.complain(f"{name} {quoted(fields.get(name))} is not implemented")
    projected = fields.get("word_embed_proj_dim")
    if projected not in (None, fields.get("hidden_size")):
        fields.complain(f"word_embed_proj_dim {quoted(projected)} is not implemented: it must be hidden_size")
    return {"gated": False, "norm": "layer", "rope": None, "qkv_bias": True, "o_bias": True, "ffn_bias": True}


def _falcon(fields: Fields) -> Traits:
    grouped = fields.flag("new_decoder_architecture", False)
    if fields.flag("bias", False):
        fields.complain("bias true is not implemented")
    if fields.flag("alibi", False):
        fields.complain("alibi true is not implemented")
    if not grouped and not (fields.flag("parallel_attn", True) and fields.flag("multi_query", True)):
        fields.complain("without new_decoder_architecture, only parallel_attn and multi_query true are implemented")
    norms = fields.get("num_ln_in_parallel_attn")
    if norms not in (None, 1, 2) or (norms == 2 and not grouped):
        fields.complain(f"num_ln_in_parallel_attn {found(norms)} is not implemented")
    heads = fields.integer("num_kv_heads", 2**12, default=fields.get("num_attention_heads")) if grouped else 1
    shared = not grouped or norms == 1
    return {"gated": False, "norm": "layer", "parallel": True, "shared_norm": shared, "kv_heads": heads}


def _qwen2(fields: Fields) -> Traits:
    no_sliding_window(fields)
    return {"qkv_bias": True}


def _qwen3(fields: Fields) -> Traits:
    no_sliding_window(fields)
    return biases(fields) | {"qk_norm": True}


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_WINDOW = frozenset({"sliding_window"})
_FALCON_NAMES = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
    "intermediate_size": "ffn_hidden_size",
}
_OPT_NAMES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}

FAMILIES: dict[str, Family] = {
    "llama": Family(architectures=("LlamaForCausalLM",), reads=_BIASES, traits=_llama),
    "sparsellama": Family(architectures=("SparseLlamaForCausalLM",), reads=_BIASES, traits=_llama),  # ProSparse
    "llama_sparse_relu": Family(  # SparseLM: the gate is ReLU, the file says silu
        architectures=("SparseLlamaForCausalLM",),
        reads=_BIASES,
        activations={"silu": "relu", "relu": "relu"},
        traits=_llama,
    ),
    "mistral": Family(architectures=("MistralForCausalLM",), reads=_WINDOW, traits=_mistral),
    "bamboo": Family(  # Bamboo and TurboSparse-Mistral: dReLU, the file says relu
        architectures=("BambooForCausalLM",), reads=_WINDOW, activations={"relu": "drelu"}, traits=_mistral
    ),
    "minicpm": Family(
        architectures=("MiniCPMForCausalLM",),
        defaults={"tie_word_embeddings": True},
        reads=frozenset({"scale_emb", "scale_depth", "dim_model_base"}),
        traits=_minicpm,
    ),
    "qwen2": Family(architectures=("Qwen2ForCausalLM",), reads=QWEN_READS, traits=_qwen2),
    "qwen3": Family(architectures=("Qwen3ForCausalLM",), reads=QWEN_READS | {"attention_bias"}, traits=_qwen3),
    "opt": Family(
        architectures=("OPTForCausalLM",),
        layout="opt",
        rename=_OPT_NAMES,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        traits=_opt,
    ),
    "falcon": Family(
        architectures=("FalconForCausalLM",),
        layout="falcon",
        rename=_FALCON_NAMES,
        defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
        reads=frozenset({"bias", "alibi", "parallel_attn", "multi_query"}),
        traits=_falcon,
    ),
    **MIXTURES,
    **SWITCH,
}
