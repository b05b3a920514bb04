"""A GGUF file -> a Hugging Face folder: weights dequantised, rows in their order, the tokenizer as tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dynajax.checkpoint.generation import GENERATION_NAME
from dynajax.checkpoint.gguf_file import GgufModel, read_gguf
from dynajax.checkpoint.reading import STORED_DTYPES, read_blocks
from dynajax.checkpoint.shards import Stored
from dynajax.convert.folder import Progress, Tensor, write_folder
from dynajax.text import CONFIG_NAME, JSON_NAME, Tokenizer
from dynajax.vocabulary import MODEL_KEY, from_gguf

TEMPLATE_NAME = "chat_template.jinja"
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def convert_gguf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
    files: Mapping[str, Path | bytes] | None = None,
) -> Path:
    """Write `target` whole or not at all, and return it.

    dtype: float32, float16 or bfloat16 for every tensor. None keeps what is not quantised as it is, and writes
    quantised tensors as float16: the scales in a GGUF are float16, so that of the 16-bit types it rounds least (by
    2**-11 of a value, far below a step of 4 or 8 bits). files: more files to put there.

    Raises what `read_gguf` and `write_folder` raise; NumericalError for NaN, or values beyond float16.
    """
    model = read_gguf(source)
    tensors = [_tensor(stored, dtype) for stored in model.shard.tensors.values()]
    more = {**_tokenizer_files(model), GENERATION_NAME: _json(_generation(model)), **(files or {})}
    return write_folder(target, tensors, config=model.config, files=more, progress=progress)


def _tensor(stored: Stored, dtype: str | None) -> Tensor:
    kept = STORED_DTYPES.get(stored.dtype)
    chosen = dtype or ("float16" if kept is None else kept.name)
    return Tensor(stored.name, chosen, stored.shape, partial(read_blocks, stored, chosen))


def _generation(model: GgufModel) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: model.config[name] for name in names if name in model.config}


def _tokenizer_files(model: GgufModel) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and the chat template, as far as the file has them."""
    if MODEL_KEY not in model.metadata:
        return {}
    tokenizer = Tokenizer(from_gguf(model.metadata))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_max_length"] = model.config["max_position_embeddings"]
    for name, role in ROLES.items():
        index = model.token_id(role)
        text = None if index is None else tokenizer.token_text(index)
        if text is not None:
            config[name] = text
    files = {JSON_NAME: tokenizer.to_json().encode()}
    if model.chat_template is not None:
        config["chat_template"] = model.chat_template
        files[TEMPLATE_NAME] = model.chat_template.encode()
    return {**files, CONFIG_NAME: _json(config)}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
