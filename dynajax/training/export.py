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
from dynajax.models.decoder import Decoder
from dynajax.training.report import Measurements

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a llama-family model."""
    assert spec.rope is not None, "llama rotates"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "mlp_bias": False,
        "bos_token_id": spec.bos_id,
        "eos_token_id": spec.eos_ids[0],
        "dtype": "bfloat16",
    }


def hf_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Every weight in bfloat16 under its Hugging Face name; the down projection back as [D, F]."""

    def value(param, *, transpose: bool = False) -> np.ndarray:
        array = np.asarray(param[...], np.float32)
        return np.ascontiguousarray(array.T if transpose else array).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": value(model.embed), "model.norm.weight": value(model.norm)}
    if model.head is not None:
        tensors["lm_head.weight"] = value(model.head)
    for i, (attention, ffn) in enumerate(zip(model.attention, model.ffn, strict=True)):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": value(attention.attention_norm),
            f"{at}self_attn.q_proj.weight": value(attention.q),
            f"{at}self_attn.k_proj.weight": value(attention.k),
            f"{at}self_attn.v_proj.weight": value(attention.v),
            f"{at}self_attn.o_proj.weight": value(attention.o),
            f"{at}post_attention_layernorm.weight": value(attention.ffn_norm),
            f"{at}mlp.gate_proj.weight": value(ffn.gate),
            f"{at}mlp.up_proj.weight": value(ffn.up),
            f"{at}mlp.down_proj.weight": value(ffn.down, transpose=True),
        }
    return tensors


def write_weights(folder: Path, model: Decoder, tokenizer_from: Path) -> None:
    """Weights, config and tokenizer into an empty folder."""
    folder.mkdir(parents=True)
    save_file(hf_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(hf_config(model.spec), indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, folder / name)


def write_card(folder: Path, facts: dict[str, Any], measured: Measurements) -> None:
    """measurements.json, and README.md made from it. facts: how the model was trained, and its sources."""
    record = {**facts, "heldout": measured.to_json()}
    (folder / "measurements.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_card(facts, measured), encoding="utf-8")


def _card(facts: dict[str, Any], measured: Measurements) -> str:
    sources = facts["corpus"]
    lines = [
        "# tiny-relullama",
        "",
        f"A ReLU-gated Llama of {facts['parameters']:,} parameters, trained from scratch by this project on a CPU, so "
        "that every mechanism of dynajax can be run, tested and measured on a real language model without a download. "
        "It writes phrases, not stories.",
        "",
        f"- Training: `scripts/train_tiny.py --minutes {facts['minutes']:g}`, seed {facts['seed']}: {facts['steps']:,} "
        f"steps, {facts['tokens']:,} tokens, context 256, on {facts['machine']}.",
        "- Beside the cross-entropy, small terms shape the neurons' activity: none dead, some frequent, many rare "
        "(`PHASES` in `dynajax/training/loop.py`). They were adjusted during the run while watching the table of "
        "sparsity below (`docs/log.md`), so that table is not an independent measurement.",
        "- Weights bfloat16; tokenizer: byte-level BPE of 4,096 tokens trained on the same text, "
        "`<|endoftext|>` (id 0) before every document.",
        "- Licence: Apache-2.0 for the weights; the texts are in the public domain or CC0 (below).",
        "",
        f"## Held-out loss ({measured.tokens:,} tokens of `tests/data/heldout`, windows of 256)",
        "",
        "| source | nats/token |",
        "|---|---|",
        *(f"| {name} | {loss:.3f} |" for name, loss in measured.loss.items()),
        f"| mean over sources | {measured.loss_mean:.3f} |",
        f"| mean with the FFNs of layers >= 1 removed | {measured.loss_without_ffn:.3f} |",
        "",
        "## Sparsity on the same text",
        "",
        "| layer | active | dead | top 40 % cover | Jaccard distance, adjacent tokens |",
        "|---|---|---|---|---|",
        *(
            f"| {i} | {row.active:.3f} | {row.dead:.3f} | {row.top40_covers:.3f} | {row.jaccard_distance:.3f} |"
            for i, row in enumerate(measured.layers)
        ),
        "",
        "`activations.npz` holds every neuron's frequency, measured on "
        f"{facts['stats_tokens']:,} tokens of the training text; placement starts from it.",
        "",
        "## Corpus",
        "",
        "| source | package | version | sha256 of the text | licence |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {entry['package']} | {entry['version']} | `{entry['text_sha256']}` | {entry['licence']} |"
            for name, entry in sources.items()
        ),
        "",
    ]
    return "\n".join(lines)


def swap_in(draft: Path, out: Path) -> None:
    """Put the finished draft in the place of `out`; whoever looks sees the old folder or the new one."""
    old = out.with_name(out.name + ".old")
    if out.exists():
        out.rename(old)
    draft.rename(out)
    shutil.rmtree(old, ignore_errors=True)
