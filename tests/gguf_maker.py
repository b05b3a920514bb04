"""Small GGUF files for tests, written with the `gguf` package; the reader under test only dequantises with it."""

import gguf
import numpy as np
from gguf.quants import quantize

from dynajax.checkpoint.gguf_file import _LAYER_NAMES, _NAMES
from dynajax.config import Activation, ModelSpec

SPEC = ModelSpec(
    layers=2,
    hidden=32,
    ffn=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=96,
    max_positions=512,
    activation=Activation(kind="silu"),
    bos_id=1,
    eos_ids=(2,),
)
KINDS = {kind.name: kind for kind in gguf.GGMLQuantizationType}
OLD_NAMES = {new: old for old, new in _NAMES.items()}
OLD_PARTS = {new: old for old, new in _LAYER_NAMES.items()}


def gguf_name(name):
    """ "model.layers.0.mlp.up_proj.weight" -> "blk.0.ffn_up.weight"."""
    if name in OLD_NAMES:
        return OLD_NAMES[name]
    _, _, layer, *part, end = name.split(".")
    return f"blk.{layer}.{OLD_PARTS['.'.join(part)]}.{end}"


def paired(weight, heads):
    """Rows as the llama converter stores them: of each head the two halves of every rotary pair side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def metadata_of(spec, architecture="llama"):
    own = {
        "block_count": spec.layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": 10_000.0,
    }
    return {f"{architecture}.{key}": value for key, value in own.items()} | {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(path, tensors, metadata, *, kind="F32", architecture="llama"):
    """Write tensors [out, in] under their GGUF names; matrices as `kind`, the rest as F32. None drops a key."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, value in tensors.items():
        chosen = KINDS[kind if value.ndim == 2 else "F32"]
        raw = value.astype(np.float32) if chosen == KINDS["F32"] else quantize(value.astype(np.float32), chosen)
        writer.add_tensor(name, raw, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def make_gguf(path, tensors, spec=SPEC, *, kind="F32", metadata=None):
    """A llama GGUF of Hugging Face tensors: names and rows as the converter has them."""
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
    stored = {}
    for name, value in tensors.items():
        part = name.split(".")[-2]
        stored[gguf_name(name)] = paired(value, heads[part]) if part in heads else value
    return write_gguf(path, stored, metadata_of(spec) | (metadata or {}), kind=kind)
