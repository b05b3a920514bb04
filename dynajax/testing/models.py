"""Tiny llamas of any ModelSpec: write one, load one as a flax module."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from flax import nnx
from safetensors.numpy import save_file

from dynajax.checkpoint import Checkpoint
from dynajax.config import Activation, ModelSpec
from dynajax.models.decoder import Decoder, MixtureFfn
from dynajax.models.encoder_decoder import EncoderDecoder

TINY = ModelSpec(
    layers=2, hidden=32, ffn=48, heads=4, kv_heads=4, head_dim=8, vocab=96, max_positions=512, bos_id=1, eos_ids=(2,)
)
TINY_SILU = replace(TINY, activation=Activation(kind="silu"))
TINY_FATRELU = replace(TINY, activation=Activation(kind="fatrelu", threshold=0.01))
TINY_GQA = replace(TINY, kv_heads=2)
TINY_WIDE_HEADS = replace(TINY, head_dim=16)  # heads x head_dim != hidden
TINY_TIED = replace(TINY, tied=True)

AnyModel = TypeVar("AnyModel", Decoder, EncoderDecoder)
RopeSpelling = Literal["old", "new", "absent"]


def make_checkpoint(
    folder: Path,
    spec: ModelSpec,
    *,
    seed: int = 0,
    shards: int = 1,
    rope_spelling: RopeSpelling = "new",
    dtype: str = "float32",
    config: dict[str, Any] | None = None,  # keys to set, or with None to drop
) -> Path:
    """Write a random model in the Hugging Face layout, without a tokenizer; -> `folder`.

    Half of the gates are positive; with fatrelu they are so small that one in five lies between 0 and the
    threshold. More than one shard brings an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {name: value.astype(kind) for name, value in random_tensors(spec, seed).items()}
    settings = {**hf_config(spec, rope_spelling, dtype), **(config or {})}
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: names[i * shards // len(tensors)] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name, home in weight_map.items() if home == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def random_tensors(spec: ModelSpec, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """All tensors by their Hugging Face names, scaled so that every part matters to the logits."""
    rng = np.random.default_rng(seed)
    threshold = spec.activation.threshold
    gate_scale = 2 * threshold if spec.activation.kind == "fatrelu" and threshold > 0 else 1.0

    def matrix(rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale / columns**0.5)).astype("f4")

    def norm() -> npt.NDArray[np.float32]:
        return 1 + 0.2 * rng.standard_normal(spec.hidden, dtype=np.float32)

    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors = {"model.embed_tokens.weight": matrix(spec.vocab, spec.hidden, spec.hidden**0.5)}
    for i in range(spec.layers):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": norm(),
            f"{at}self_attn.q_proj.weight": matrix(queries, spec.hidden, 2.0),  # peaked: positions matter
            f"{at}self_attn.k_proj.weight": matrix(keys, spec.hidden, 2.0),
            f"{at}self_attn.v_proj.weight": matrix(keys, spec.hidden),
            f"{at}self_attn.o_proj.weight": matrix(spec.hidden, queries),
            f"{at}post_attention_layernorm.weight": norm(),
            f"{at}mlp.gate_proj.weight": matrix(spec.ffn, spec.hidden, gate_scale),
            f"{at}mlp.up_proj.weight": matrix(spec.ffn, spec.hidden, 1.0 / gate_scale),
            f"{at}mlp.down_proj.weight": matrix(spec.hidden, spec.ffn, 2.0),
        }
    tensors["model.norm.weight"] = norm()
    if not spec.tied:
        tensors["lm_head.weight"] = matrix(spec.vocab, spec.hidden)
    return tensors


def hf_config(spec: ModelSpec, rope_spelling: RopeSpelling, dtype: str) -> dict[str, Any]:
    """What config.json says of `spec`; None stands for a key that is left out.

    old: `rope_theta` and `torch_dtype` (transformers 4); new: `rope_parameters` and `dtype` (5).
    """
    custom = spec.activation.kind == "fatrelu"
    assert spec.rope is not None, "llama rotates"
    theta = spec.rope.theta
    rope: dict[str, Any] = {
        "old": {"rope_theta": theta, "rope_scaling": None},
        "new": {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}},
        "absent": {},
    }[rope_spelling]
    if rope_spelling == "absent" and theta != 10_000.0:
        raise ValueError(f"an absent rope_theta means 10000, got {theta}")
    return {
        "architectures": ["SparseLlamaForCausalLM" if custom else "LlamaForCausalLM"],
        "model_type": "sparsellama" if custom else "llama",
        "hidden_act": spec.activation.kind,
        "hidden_act_param": spec.activation.threshold if custom else None,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": None if spec.heads * spec.head_dim == spec.hidden else spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids) if len(spec.eos_ids) > 1 else next(iter(spec.eos_ids), None),
        "torch_dtype" if rope_spelling == "old" else "dtype": dtype,
        **rope,
    }


def load_decoder(checkpoint: Checkpoint, dtype: str = "float32") -> Decoder:
    """The whole model as a flax module on the default device, for parity tests and reports."""
    spec = checkpoint.spec
    return filled(nnx.eval_shape(lambda: Decoder(spec, nnx.Rngs(0), jax.numpy.dtype(dtype))), checkpoint, dtype)


def load_encoder_decoder(checkpoint: Checkpoint, dtype: str = "float32") -> EncoderDecoder:
    """The same of a model with an encoder."""
    spec = checkpoint.spec
    model = nnx.eval_shape(lambda: EncoderDecoder(spec, nnx.Rngs(0), jax.numpy.dtype(dtype)))
    model.encoder_norm.set_value(jax.numpy.array(checkpoint.encoder_norm(dtype)))
    return filled(model, checkpoint, dtype)


def filled(decoder: AnyModel, checkpoint: Checkpoint, dtype: str) -> AnyModel:
    """The model itself, with the weights of a checkpoint."""
    spec = checkpoint.spec

    def put(module: nnx.Module, name: str, value: npt.NDArray | None) -> None:
        param = getattr(module, name)
        if param is not None and value is not None:
            param.set_value(jax.numpy.array(value))

    put(decoder, "embed", checkpoint.embed(dtype))
    if isinstance(decoder, Decoder):
        put(decoder, "positions", checkpoint.positions(dtype))
        put(decoder, "head", checkpoint.head(dtype))
    for name, value in zip(("norm", "norm_bias"), checkpoint.norm(dtype), strict=False):
        put(decoder, name, value)
    for layer in range(spec.layers):
        for name, value in checkpoint.attention(layer, dtype).items():
            put(decoder.attention[layer], name, value)
        for name, value in checkpoint.routing(layer, dtype).items():
            ffn = decoder.ffn[layer]
            assert isinstance(ffn, MixtureFfn), "a dense model routes nothing"
            put(ffn.block, name, value)
    units = np.empty((spec.units, spec.ffn_parts, spec.unit_rows, spec.unit_width), jax.numpy.dtype(dtype))
    for layer in spec.unit_layers:
        checkpoint.fill_bundle(layer, units)
        for part, name in enumerate(("gate", "up", "down") if spec.gated else ("up", "down")):
            put(decoder.ffn[layer], name, units[:, part].reshape(-1, spec.unit_width))
    return decoder
