"""Write a mixture of experts of random weights in the form of Qwen3-MoE: what loading and moving large experts cost.

    python -m benchmarks.make_moe runs/moe-4gb --layers 7

Routing of random weights is nearly uniform: no stand-in for what a trained router does.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
NOISE = 2**20  # random numbers that every tensor is cut from: drawing gigabytes of them would take minutes


def tensors_of(layer: int, config: dict, noise: npt.NDArray) -> Iterator[tuple[str, npt.NDArray]]:
    """A layer's tensors by name."""
    hidden, size, width = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    at, ones = f"model.layers.{layer}.", np.ones(hidden, ml_dtypes.bfloat16)
    rng = np.random.default_rng(layer)

    def random(*shape: int) -> npt.NDArray:
        start = int(rng.integers(0, NOISE))
        return np.resize(np.roll(noise, -start), shape)

    for part, shape in {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
    }.items():
        yield f"{at}self_attn.{part}_proj.weight", random(*shape)
    for part in "qk":
        yield f"{at}self_attn.{part}_norm.weight", np.ones(size, ml_dtypes.bfloat16)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{norm}.weight", ones
    yield f"{at}mlp.gate.weight", random(config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        mine = f"{at}mlp.experts.{expert}."
        yield f"{mine}gate_proj.weight", random(width, hidden)
        yield f"{mine}up_proj.weight", random(width, hidden)
        yield f"{mine}down_proj.weight", random(hidden, width)


def write(folder: Path, *, layers: int, experts: int, top_k: int, width: int, **changes: int) -> int:
    """The folder, a shard a layer; -> bytes of weights. changes: of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
    config: dict[str, Any] = CONFIG | {"num_hidden_layers": layers} | sizes | changes
    noise = (np.random.default_rng(0).standard_normal(NOISE, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    shape = (config["vocab_size"], config["hidden_size"])
    ends = {
        "model.embed_tokens.weight": np.resize(noise, shape),
        "lm_head.weight": np.resize(noise[::-1], shape),
        "model.norm.weight": np.ones(shape[1], ml_dtypes.bfloat16),
    }
    shards = itertools.chain([ends], (dict(tensors_of(layer, config, noise)) for layer in range(layers)))
    total, where = 0, {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, default in {"layers": 7, "experts": 64, "top-k": 8, "width": 768}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    total = write(args.folder, layers=args.layers, experts=args.experts, top_k=args.top_k, width=args.width)
    print(json.dumps({"folder": str(args.folder), "bytes": total}))


if __name__ == "__main__":
    main()
