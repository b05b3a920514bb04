"""Tiny random Switch Transformers, spelled as the published ones.

make_switch(folder, expert_capacity=3)         # config.json and model.safetensors
switch_logits(folder, source, target)          # what the model must compute, float64
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # teaches NumPy, and so safetensors, what bfloat16 is
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from dynajax.reference import encoded_forward
from dynajax.reference.switch import is_sparse, stack_layers
from dynajax.testing.families import Config, Family, Shapes, write

_SWITCH: Config = {
    "add_router_probs": False,
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "batch_prioritized_routing": False,
    "d_ff": 44,  # of an expert, and of a layer without any
    "d_kv": 6,  # times heads is not d_model
    "d_model": 32,
    "decoder_sparse_step": 2,
    "decoder_start_token_id": 0,
    "dense_act_fn": "relu",
    "dropout_rate": 0.1,
    "encoder_sparse_step": 2,
    "eos_token_id": 1,
    "expert_capacity": 64,
    "feed_forward_proj": "relu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "is_gated_act": False,
    "layer_norm_epsilon": 1e-06,
    "model_type": "switch_transformers",
    "num_decoder_layers": 4,
    "num_experts": 4,
    "num_heads": 5,
    "num_layers": 4,
    "num_sparse_decoder_layers": 2,
    "num_sparse_encoder_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 40,
    "relative_attention_num_buckets": 12,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "router_jitter_noise": 0.01,
    "router_type": "tokens_masked",
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 96,
}


class SwitchFamily(Family):
    """Weights of its own scales: attention is not scaled, and the tied head scales what it reads."""

    def tensors(self, config: Config, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
        rng = np.random.default_rng(seed)
        return {name: _filled(name, shape, rng) for name, shape in self.shapes(config).items()}


def switch_shapes(config: Config) -> Shapes:
    """Every tensor by its published name."""
    hidden, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    shapes: Shapes = {"shared.weight": (config["vocab_size"], hidden)}
    for stack in ("encoder", "decoder"):
        for i in range(stack_layers(config, stack)):
            at = f"{stack}.block.{i}.layer."
            halves = ("SelfAttention",) if stack == "encoder" else ("SelfAttention", "EncDecAttention")
            for half, name in enumerate(halves):
                shapes |= {f"{at}{half}.{name}.{part}.weight": (inner, hidden) for part in "qkv"}
                shapes[f"{at}{half}.{name}.o.weight"] = (hidden, inner)
                shapes[f"{at}{half}.layer_norm.weight"] = (hidden,)
            if i == 0:
                table = (config["relative_attention_num_buckets"], config["num_heads"])
                shapes[f"{at}0.SelfAttention.relative_attention_bias.weight"] = table
            shapes[f"{at}{len(halves)}.layer_norm.weight"] = (hidden,)
            shapes |= _ffn(config, f"{at}{len(halves)}.mlp.", sparse=is_sparse(config, stack, i))
        shapes[f"{stack}.final_layer_norm.weight"] = (hidden,)
    return shapes


def _ffn(config: Config, at: str, *, sparse: bool) -> Shapes:
    hidden, width = config["d_model"], config["d_ff"]
    if not sparse:
        return {f"{at}wi.weight": (width, hidden), f"{at}wo.weight": (hidden, width)}
    shapes: Shapes = {f"{at}router.classifier.weight": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        one = f"{at}experts.expert_{expert}."
        shapes |= {f"{one}wi.weight": (width, hidden), f"{one}wo.weight": (hidden, width)}
    return shapes


def _filled(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A hidden state near 1, peaked attention, routers that are sure and yet use every expert."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return 1 + np.float32(0.2) * noise
    if name == "shared.weight" or "relative" in name:
        return noise
    part = name.split(".")[-2]
    scale = {"q": 0.8, "k": 1.0, "wo": 2.0, "classifier": 2.0}.get(part, 1.0)
    return noise * np.float32(scale / shape[-1] ** 0.5)


SWITCH = SwitchFamily(published="google/switch-base-8", base=_SWITCH, shapes=switch_shapes)


def make_switch(folder: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> Path:
    """Write config.json and model.safetensors; changes: of config.json. -> `folder`."""
    return write(folder, SWITCH, dtype=dtype, seed=seed, **changes)


def switch_logits(
    folder: Path, source: npt.ArrayLike, target: npt.ArrayLike, *, at_once: bool = False
) -> npt.NDArray[np.float64]:
    """The plain float64 forward of the model in `folder`; see `reference.switch.encoded_forward`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return encoded_forward(config, load_file(folder / "model.safetensors"), source, target, at_once=at_once)
