"""Write a llama folder as the GGUF file that llama.cpp runs, so that both engines can be timed on the same weights.

    python -m benchmarks.to_gguf smollm2-135m runs/smollm2-135m-Q8_0.gguf --type Q8_0
    python -m benchmarks.to_gguf runs/synth-1.1b runs/synth-1.1b-Q4_0.gguf --type Q4_0 --speed-only

Every matrix gets the type, the head and the embedding too (llama.cpp's own tool keeps the head of a Q4_0 file at six
bits, which is slower to read); norms stay float32. There is no tokenizer inside: the file is for token ids. llama.cpp
computes silu for this architecture, whatever the model was trained with. Of a ReLU model the file therefore gives
other answers in the same time, since llama.cpp computes every neuron either way: `--speed-only` says that you know.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quant_shape_to_byte_shape, quantize

from dynajax.checkpoint import Checkpoint
from dynajax.config import ModelSpec, Rope
from dynajax.errors import UsageError
from dynajax.model_folder import model_folder

TYPES = ("F16", "Q8_0", "Q4_0")
BLOCK = 32  # values that share a scale
PARTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "attention_norm": "attn_norm",
         "ffn_norm": "ffn_norm"}  # fmt: skip
UNIT_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
Named = tuple[str, npt.NDArray[np.float32]]


def check(spec: ModelSpec, kind: str, *, speed_only: bool) -> None:
    """UsageError for what the file could not say, and for answers that would silently be other ones."""
    plain = ModelSpec(
        layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn, heads=spec.heads, kv_heads=spec.kv_heads,
        head_dim=spec.head_dim, vocab=spec.vocab, activation=spec.activation, norm_eps=spec.norm_eps,
        rope=Rope(theta=spec.rope.theta) if spec.rope is not None else Rope(), tied=spec.tied,
        max_positions=spec.max_positions, dtype=spec.dtype, bos_id=spec.bos_id, eos_ids=spec.eos_ids,
    )  # fmt: skip
    if spec != plain:
        names = [name for name in ModelSpec.__dataclass_fields__ if getattr(spec, name) != getattr(plain, name)]
        raise UsageError(f"only plain llama models are written, this one has its own {', '.join(names)}")
    if spec.activation.kind != "silu" and not speed_only:
        raise UsageError(
            f"llama.cpp would compute silu where this model has {spec.activation.kind}: its answers would be wrong and "
            "only its speed right; say --speed-only if that is what is wanted"
        )
    if kind not in TYPES:
        raise UsageError(f"--type must be one of {', '.join(TYPES)}, got {kind!r}")
    if kind != "F16" and (wrong := [size for size in (spec.hidden, spec.ffn) if size % BLOCK]):
        raise UsageError(f"{kind} needs rows of a multiple of {BLOCK} values, got {wrong[0]}: use --type F16")


def paired(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows [heads*H, D] in llama.cpp's order: the two rows of each rotary pair, half a head apart here, side by side.

    Example, one head of 4 rows: 0 1 2 3 -> 0 2 1 3.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file in its order."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found: dict[str, tuple[int, ...]] = {"token_embd": (spec.vocab, spec.hidden), "output_norm": (spec.hidden,)}
    if not spec.tied:
        found["output"] = (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        own: dict[str, tuple[int, ...]] = {
            "attn_q": (queries, spec.hidden), "attn_k": (keys, spec.hidden), "attn_v": (keys, spec.hidden),
            "attn_output": (spec.hidden, queries), "attn_norm": (spec.hidden,), "ffn_norm": (spec.hidden,),
            "ffn_gate": (spec.ffn, spec.hidden), "ffn_up": (spec.ffn, spec.hidden), "ffn_down": (spec.hidden, spec.ffn),
        }  # fmt: skip
        found |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def tensors_of(checkpoint: Checkpoint) -> Iterator[Named]:
    """The same tensors with their values, a layer at a time."""
    spec = checkpoint.spec
    yield "token_embd.weight", checkpoint.embed("float32")
    yield "output_norm.weight", checkpoint.norm("float32")[0]
    if (head := checkpoint.head("float32")) is not None:
        yield "output.weight", head
    units = np.empty((spec.units, spec.ffn_parts, spec.unit_rows, spec.unit_width), np.float32)
    for layer in range(spec.layers):
        weights = checkpoint.attention(layer, "float32")
        weights["q"], weights["k"] = paired(weights["q"], spec.heads), paired(weights["k"], spec.kv_heads)
        for part, name in PARTS.items():
            yield f"blk.{layer}.{name}.weight", weights[part]
        checkpoint.fill_bundle(layer, units)
        for index, name in enumerate(UNIT_PARTS):
            rows = units[:, index, 0]
            yield f"blk.{layer}.{name}.weight", rows.T if name == "ffn_down" else rows


def metadata(writer: gguf.GGUFWriter, spec: ModelSpec, kind: str) -> None:
    """The keys that llama.cpp reads."""
    assert spec.rope is not None
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("no_vocab")
    if spec.activation.kind != "silu":
        writer.add_description(f"for timing only: trained with {spec.activation.kind}, computed with silu")


def convert(source: Path, target: Path, kind: str, *, speed_only: bool = False) -> int:
    """Write `target` from the folder `source` -> its bytes. Memory: a few tensors. UsageError: see `check`."""
    checkpoint = Checkpoint.open(source)
    check(checkpoint.spec, kind, speed_only=speed_only)
    if target.exists():
        raise UsageError(f"{target} exists: choose a new name")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + ".part")
    wanted, plain = gguf.GGMLQuantizationType[kind], gguf.GGMLQuantizationType.F32
    shapes = shapes_of(checkpoint.spec)
    writer = gguf.GGUFWriter(draft, "llama")
    metadata(writer, checkpoint.spec, kind)
    for name, shape in shapes.items():
        stored = wanted if len(shape) == 2 else plain
        stored_shape = quant_shape_to_byte_shape(shape, stored)
        writer.add_tensor_info(name, stored_shape, np.dtype(np.uint8), int(np.prod(stored_shape)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, value), expected in zip(tensors_of(checkpoint), shapes, strict=True):
        assert name == expected and value.shape == shapes[name], (name, expected, value.shape)
        writer.write_tensor_data(quantize(np.ascontiguousarray(value), wanted if value.ndim == 2 else plain))
    writer.close()
    return draft.rename(target).stat().st_size


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", default="F16", choices=TYPES)
    parser.add_argument("--speed-only", action="store_true", help="a ReLU model, whose answers will be wrong")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    folder = model_folder(args.model, offline=True)
    try:
        size = convert(folder, args.target, args.type, speed_only=args.speed_only)
    except UsageError as error:
        parser.error(str(error))
    told = {
        "file": str(args.target),
        "bytes": size,
        "type": args.type,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
