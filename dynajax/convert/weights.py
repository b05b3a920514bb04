"""A folder with PyTorch weights -> the same model with safetensors, tensor by tensor."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy.typing as npt

from dynajax.checkpoint.checksums import CHECKSUMS_NAME
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.mapping import is_ignorable
from dynajax.checkpoint.paths import is_plain_name, stray_link
from dynajax.checkpoint.reading import DTYPES
from dynajax.checkpoint.shards import INDEX, INDEX_BYTES
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.convert.folder import Progress, Tensor, write_folder
from dynajax.convert.numbers import converted
from dynajax.convert.torch_zip import TorchFile, TorchTensor
from dynajax.errors import ModelError, StorageError, UsageError

log = logging.getLogger(__name__)

HEAD_NAME = "lm_head.weight"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
_PART = re.compile(r"pytorch_model-(\d{5})-of-(\d{5})\.bin")
_CONFIG_BYTES = 2**20
_COPIED = (".json", ".jinja", ".md", ".model", ".npz", ".txt")
_COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_COPIED_BYTES = 2**26
_REMADE = (TORCH_INDEX, INDEX, CHECKSUMS_NAME, "config.json")


def convert_weights(source: Path, target: Path, *, dtype: str | None = None, progress: Progress | None = None) -> Path:
    """Write the model of `source` (`pytorch_model.bin`, or its numbered parts) into the new folder `target`.

    dtype float32, float16 or bfloat16; None keeps each tensor's own type, but float64 becomes float32. Integers,
    buffers that no model reads, and a head that config.json ties to the embedding are left out. config.json gets
    the new type; tokenizer, licence and other small files are copied. Memory: one block, or one tensor if it is
    not stored in row-major order.

    Raises ModelError (not a sound model, nothing of it run), NumericalError (NaN, infinity, or too large for
    `dtype`), UsageError (`target` is taken) and StorageError; `target` is then not there.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {quoted(dtype)}")
    config = read_json(_inside(source, "config.json"), _CONFIG_BYTES)
    found = _wanted(_tensors(source), tied=config.get("tie_word_embeddings") is True)
    tensors = [_to_write(tensor, dtype) for tensor in found]
    return write_folder(target, tensors, config=config, files=_small_files(source), progress=progress)


def has_torch_weights(names: Iterable[str]) -> bool:
    """Whether a folder of these file names is one for `convert_weights`."""
    return any(name == TORCH_SINGLE or _PART.fullmatch(name) for name in names)


def _inside(folder: Path, name: str) -> Path:
    if problem := stray_link(folder / name):
        raise ModelError(problem)
    return folder / name


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise StorageError(f"cannot read {located(folder)}: {error.strerror}") from error


def _tensors(source: Path) -> list[TorchTensor]:
    """Every tensor of every part, compared with the index if there is one."""
    weight_map = _weight_map(source)
    names = _part_names(source, weight_map)
    if missing := [name for name in names if not (source / name).is_file()]:
        raise ModelError(
            f"{located(source)}: {len(missing)} of {len(names)} parts are missing: {listing(missing)}: "
            "download them again"
        )
    tensors: dict[str, TorchTensor] = {}
    homes: dict[str, str] = {}
    for part in names:
        file = TorchFile.open(_inside(source, part))
        if twice := tensors.keys() & file.tensors.keys():
            raise ModelError(f"{plain(part)} holds tensors that another part holds too: {listing(twice)}")
        tensors |= file.tensors
        homes |= dict.fromkeys(file.tensors, part)
    if weight_map is not None and (wrong := weight_map.items() ^ homes.items()):
        differing = {name for name, _ in wrong}
        raise ModelError(f"{TORCH_INDEX} and the parts disagree about {len(differing)} tensors: {listing(differing)}")
    return list(tensors.values())


def _weight_map(source: Path) -> dict[str, str] | None:
    """Tensor name -> part, if `source` has an index that counts: the single file goes before it."""
    if os.path.lexists(source / TORCH_SINGLE) or not os.path.lexists(source / TORCH_INDEX):
        return None
    weight_map = read_json(_inside(source, TORCH_INDEX), INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{TORCH_INDEX} must hold an object weight_map, tensor name -> file name")
    if bad := {str(name) for name in weight_map.values() if not is_plain_name(name) or not name.endswith(".bin")}:
        raise ModelError(f"{TORCH_INDEX} names parts that are not plain .bin files in the folder: {listing(bad)}")
    return weight_map


def _part_names(source: Path, weight_map: dict[str, str] | None) -> list[str]:
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    names = _names_in(source)
    if TORCH_SINGLE in names:
        return [TORCH_SINGLE]
    totals = {match[2] for name in names if (match := _PART.fullmatch(name))}
    if len(totals) != 1 or not (total := int(min(totals))):
        raise ModelError(f"{located(source)} has neither {TORCH_SINGLE} nor one set of numbered parts of it")
    return [f"pytorch_model-{i:05}-of-{total:05}.bin" for i in range(1, total + 1)]


def _wanted(tensors: list[TorchTensor], *, tied: bool) -> list[TorchTensor]:
    """Without what a model folder does not hold; one log line each says what was left out."""
    kept = {tensor.name: tensor for tensor in tensors}
    integers = [tensor.name for tensor in tensors if not tensor.is_float]
    buffers = [tensor.name for tensor in tensors if tensor.is_float and _is_buffer(tensor)]
    head = kept.get(HEAD_NAME)
    shared = tied and head is not None and any(t.place == head.place for t in tensors if t is not head)
    for what, names in (
        ("integers, which no weights are", integers),
        ("buffers that hold nothing the model needs", buffers),
        ("the head, which config.json ties to the embedding", [HEAD_NAME] if shared else []),
    ):
        if names:
            log.info("left out, %s: %s", what, listing(names))
        for name in names:
            del kept[name]
    if doubles := [tensor.name for tensor in kept.values() if tensor.dtype == "float64"]:
        log.info("%d tensors are float64 and are rounded to float32 or below: %s", len(doubles), listing(doubles))
    return list(kept.values())


def _is_buffer(tensor: TorchTensor) -> bool:
    """Frequencies and masks; the matrices of a predictor inside the checkpoint are ignorable too, but kept."""
    return is_ignorable(tensor.name) and len(tensor.shape) < 2


def _to_write(tensor: TorchTensor, dtype: str | None) -> Tensor:
    kind = dtype or ("float32" if tensor.dtype == "float64" else tensor.dtype)

    def blocks() -> Iterator[npt.NDArray]:
        for block in tensor.blocks():
            yield converted(block, kind, tensor.name)

    return Tensor(tensor.name, kind, tensor.shape, blocks)


def _small_files(source: Path) -> dict[str, Path | bytes]:
    """Tokenizer, generation config, statistics, licence: by ending, and never code or weights."""
    files: dict[str, Path | bytes] = {}
    for name in _names_in(source):
        path = source / name
        wanted = name.endswith(_COPIED) or name.split(".")[0] in _COPIED_NAMES
        if name.startswith(".") or name in _REMADE or not wanted or not path.is_file():
            continue
        if path.stat().st_size > _COPIED_BYTES:
            log.info("not copied, too large for what it is: %s", plain(name))
            continue
        files[plain(name)] = _inside(source, name)
    return files
