"""A trained decoder as an ordinary Hugging Face folder: config, bfloat16 safetensors, statistics, model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dynajax.config import ModelSpec
from dynajax.models.decoder import AttentionBlock, Decoder, Ffn, MixtureFfn
from dynajax.training.report import LayerLoad, LayerSparsity, Measurements

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a llama, or with experts of a Qwen3-MoE."""
    assert spec.rope is not None, "both rotate"
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if spec.experts is not None:
        assert spec.qk_norm and spec.experts.shared == "none" and len(spec.unit_layers) == spec.layers
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": spec.experts.router.experts,
            "num_experts_per_tok": spec.experts.router.top_k,
            "norm_topk_prob": spec.experts.router.renormalise,
            "moe_intermediate_size": spec.experts.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return kind | {
        "hidden_act": spec.activation.kind,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied,
        "attention_bias": False,
        "bos_token_id": spec.bos_id,
        "eos_token_id": spec.eos_ids[0],
        "dtype": "bfloat16",
    }


def hf_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Every weight in bfloat16 under its Hugging Face name; down projections back as [D, F]."""
    tensors = {"model.embed_tokens.weight": _value(model.embed), "model.norm.weight": _value(model.norm)}
    if model.head is not None:
        tensors["lm_head.weight"] = _value(model.head)
    for i, (attention, ffn) in enumerate(zip(model.attention, model.ffn, strict=True)):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": _value(attention.attention_norm),
            **{f"{at}self_attn.{part}_proj.weight": _value(getattr(attention, part)) for part in "qkvo"},
            f"{at}post_attention_layernorm.weight": _value(attention.ffn_norm),
        }
        assert isinstance(attention, AttentionBlock), "both have keys and values of every head"
        if attention.q_norm is not None:
            tensors |= {
                f"{at}self_attn.{part}_norm.weight": _value(getattr(attention, f"{part}_norm")) for part in "qk"
            }
        tensors |= {f"{at}mlp.{name}": array for name, array in _ffn_tensors(ffn).items()}
    return tensors


def _ffn_tensors(ffn: Ffn | MixtureFfn) -> dict[str, np.ndarray]:
    if isinstance(ffn, Ffn):
        return _projections({part: _value(getattr(ffn, part)) for part in ("gate", "up", "down")})
    parts = {part: _value(getattr(ffn, part)) for part in ("gate", "up", "down")}
    tensors, width = {"gate.weight": _value(ffn.block.router)}, ffn.spec.unit_rows
    for expert in range(ffn.spec.units):
        mine = {part: array[expert * width : (expert + 1) * width] for part, array in parts.items()}
        tensors |= {f"experts.{expert}.{name}": array for name, array in _projections(mine).items()}
    return tensors


def _projections(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    turned = parts | {"down": parts["down"].T}
    return {f"{part}_proj.weight": np.ascontiguousarray(array) for part, array in turned.items()}


def _value(param) -> np.ndarray:
    return np.asarray(param[...], np.float32).astype(ml_dtypes.bfloat16)


def write_weights(folder: Path, model: Decoder, tokenizer_from: Path) -> None:
    """Weights, config and tokenizer into an empty folder."""
    folder.mkdir(parents=True)
    save_file(hf_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(hf_config(model.spec), indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, folder / name)


def write_card(folder: Path, name: str, facts: dict[str, Any], measured: Measurements) -> None:
    """measurements.json, and README.md made from it. facts: how the model was trained, and its sources."""
    record = {**facts, "heldout": measured.to_json()}
    (folder / "measurements.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_card(name, facts, measured), encoding="utf-8")


INTRODUCTIONS = {
    "tiny-relullama": "A ReLU-gated Llama of {:,} parameters, trained",
    "tiny-moe": "A mixture of experts in the form of Qwen3-MoE, of {:,} parameters, trained",
}
PURPOSE = (
    "from scratch by this project on a CPU, so that every mechanism of dynajax can be run, tested and measured on a "
    "real language model without a download. It writes phrases, not stories."
)
SHAPED = {
    "tiny-relullama": "- Beside the cross-entropy, small terms shape the neurons' activity: none dead, some frequent, "
    "many rare (`PHASES` in `dynajax/training/loop.py`). They were adjusted during the run while watching the table of "
    "sparsity below (`docs/log.md`), so that table is not an independent measurement.",
    "tiny-moe": "- Beside the cross-entropy, a term of weight `BALANCE` (`dynajax/training/loop.py`) asks the experts "
    "to share the work.",
}


def _card(name: str, facts: dict[str, Any], measured: Measurements) -> str:
    sources = facts["corpus"]
    arch = " --arch moe" if name == "tiny-moe" else ""
    lines = [
        f"# {name}",
        "",
        f"{INTRODUCTIONS[name].format(facts['parameters'])} {PURPOSE}",
        "",
        f"- Training: `scripts/train_tiny.py{arch} --minutes {facts['minutes']:g}`, seed {facts['seed']}: "
        f"{facts['steps']:,} steps, {facts['tokens']:,} tokens, context 256, on {facts['machine']}.",
        SHAPED[name],
        "- Weights bfloat16; tokenizer: byte-level BPE of 4,096 tokens trained on the same text, "
        "`<|endoftext|>` (id 0) before every document.",
        "- Licence: Apache-2.0 for the weights; the texts are in the public domain or CC0 (below).",
        "",
        f"## Held-out loss ({measured.tokens:,} tokens of `tests/data/heldout`, windows of 256)",
        "",
        "| source | nats/token |",
        "|---|---|",
        *(f"| {source} | {loss:.3f} |" for source, loss in measured.loss.items()),
        f"| mean over sources | {measured.loss_mean:.3f} |",
        f"| mean with the FFNs of layers >= 1 removed | {measured.loss_without_ffn:.3f} |",
        "",
        *_units(measured),
        "",
        f"`activations.npz` holds every {'expert' if measured.loads else 'neuron'}'s frequency, measured on "
        f"{facts['stats_tokens']:,} tokens of the training text; placement starts from it.",
        "",
        "## Corpus",
        "",
        "| source | package | version | sha256 of the text | licence |",
        "|---|---|---|---|---|",
        *(
            f"| {source} | {entry['package']} | {entry['version']} | `{entry['text_sha256']}` | {entry['licence']} |"
            for source, entry in sources.items()
        ),
        "",
    ]
    return "\n".join(lines)


def _units(measured: Measurements) -> list[str]:
    if measured.loads:
        head = "| layer | least used | most used | same as the token before | foretold by the layer before |"
        rows = [_load_row(i, row) for i, row in enumerate(measured.loads)]
        return ["## Experts on the same text", "", head, "|---|---|---|---|---|", *rows]
    head = "| layer | active | dead | top 40 % cover | Jaccard distance, adjacent tokens |"
    rows = [_sparsity_row(i, row) for i, row in enumerate(measured.layers)]
    return ["## Sparsity on the same text", "", head, "|---|---|---|---|---|", *rows]


def _load_row(layer: int, row: LayerLoad) -> str:
    foretold = "-" if row.gate_reuse is None else f"{row.gate_reuse:.3f}"
    return f"| {layer} | {row.least:.3f} | {row.most:.3f} | {row.repeated:.3f} | {foretold} |"


def _sparsity_row(layer: int, row: LayerSparsity) -> str:
    return f"| {layer} | {row.active:.3f} | {row.dead:.3f} | {row.top40_covers:.3f} | {row.jaccard_distance:.3f} |"


def swap_in(draft: Path, out: Path) -> None:
    """Put the finished draft in the place of `out`; whoever looks sees the old folder or the new one."""
    old = out.with_name(out.name + ".old")
    if out.exists():
        out.rename(old)
    draft.rename(out)
    shutil.rmtree(old, ignore_errors=True)
