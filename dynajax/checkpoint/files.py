"""A model folder, opened: everything validated before anything is allocated, then read part by part."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import mapping
from dynajax.checkpoint.gguf_file import read_gguf
from dynajax.checkpoint.reading import (
    READABLE,
    STORED_DTYPES,
    numpy_dtype,
    pack_columns_into,
    pack_rows_into,
    read_into,
    read_transposed_into,
)
from dynajax.checkpoint.shards import INDEX, Shard, Stored, find_shards, read_shard
from dynajax.checkpoint.spec import GGUF, read_spec, spec_of
from dynajax.checkpoint.wording import SHOWN, listing, located, plain, quoted
from dynajax.config import ModelSpec
from dynajax.errors import ModelError, StorageError
from dynajax.quant import GROUP, bits_of, held_as, pack_into, packed_rows, packed_shape, stored_as

log = logging.getLogger(__name__)

_SAMPLES = 64  # blocks of every shard's data that enter the fingerprint
_SAMPLE_BYTES = 4096
_NOT_IDENTITY = ("max_positions", "dtype", "bos_id", "eos_ids")  # change what is run, not what is computed


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One validated model folder or .gguf file: names and offsets; every read allocates or fills what it returns.

    Of the packed types matrices are packed while they are read, and what is no matrix comes as float32 (see
    `quant.held_as`).
    Reads raise NumericalError for NaN, infinity or float16 overflow, and ModelError if a shard changed
    since `open`.
    """

    folder: Path
    spec: ModelSpec
    shards: tuple[Shard, ...]
    tensors: dict[mapping.Key, Stored]  # (part, layer) -> where it lies; the expected ones only

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Validate config, index, shards and every tensor's name, shape and type; of a .gguf file its header.

        One ModelError lists all problems of the first stage that has any: the config, then the files, then
        the tensors.
        """
        folder = Path(folder)
        if folder.suffix == GGUF and folder.is_file():
            model = read_gguf(folder)
            spec, shards, weight_map = spec_of(model.config, folder), (model.shard,), None
        else:
            if not folder.is_dir():
                raise ModelError(f"{located(folder)} is not a folder: a model is a folder with config.json")
            spec = read_spec(folder)
            try:
                paths, weight_map = find_shards(folder)
            except OSError as error:
                raise StorageError(f"cannot read {located(folder)}: {error.strerror}") from error
            shards = _read_shards(folder, paths)
        problems = _index_problems(shards, weight_map)
        found = {name: stored for shard in shards for name, stored in shard.tensors.items()}
        tensors, more = _match(found, spec)
        if problems or more:
            raise ModelError(f"{located(folder)}: " + "; ".join([*problems, *more]))
        checkpoint = cls(folder, spec, shards, tensors)
        if checkpoint.parameters != mapping.declared_parameters(spec):
            declared = mapping.declared_parameters(spec)
            raise ModelError(f"{located(folder)}: {checkpoint.parameters} parameters found, {declared} declared")
        return checkpoint

    @property
    def parameters(self) -> int:
        """How many parameters the model has; a tied head counts once."""
        return sum(int(np.prod(stored.shape, dtype=np.int64)) for stored in self.tensors.values())

    def fingerprint(self) -> str:
        """64 hex digits that name these weights: predictors and statistics are made for one fingerprint.

        Covers what the config says of the computation, every header, and 64 blocks of 4 KiB evenly spaced
        over each shard's data: another model or another training state differs, a change of single values
        may go unseen. Milliseconds even for 26 GB.
        """
        identity = json.dumps(_identity(self.spec), sort_keys=True)
        digest = hashlib.sha256(b"dynajax weights 2\n" + identity.encode())
        for shard in self.shards:
            digest.update(shard.header)
            for block in _samples(shard.path, len(shard.header), shard.stamp.size):
                digest.update(block)
        return digest.hexdigest()

    def embed(self, dtype: str) -> npt.NDArray:
        """The embedding table [V, D]."""
        return self._read("embed", dtype)

    def positions(self, dtype: str) -> npt.NDArray | None:
        """Learned positions [P, D]; None where the model rotates instead."""
        return self._read("positions", dtype)[mapping.LEARNED_OFFSET :] if self.spec.learned_positions else None

    def head(self, dtype: str) -> npt.NDArray | None:
        """The output projection [V, D]; None when it is tied to the embedding."""
        return None if self.spec.tied else self._read("head", dtype)

    def norm(self, dtype: str) -> tuple[npt.NDArray, ...]:
        """The final norm: weight [D], and bias [D] where it has one."""
        parts = ("norm", "norm_bias") if self.spec.norm == "layer" else ("norm",)
        return tuple(self._read(part, dtype) for part in parts)

    def encoder_norm(self, dtype: str) -> npt.NDArray:
        """The norm behind an encoder [D]."""
        return self._read("encoder_norm", dtype)

    def attention(self, layer: int, dtype: str) -> dict[str, npt.NDArray]:
        """One layer's attention and norms, under the parameter names of its block (see `models`)."""
        parts = mapping.attention_parts(self.spec, layer)
        fused = {name: self._read(name, dtype, layer) for name in ("qkv", "kv_up") if (name, layer) in self.tensors}
        weights = {}
        for part in parts:
            stored_as = mapping.stored_as(part, self.spec)
            if stored_as in fused:
                rows = mapping.fused_rows(part, self.spec)
                weights[part] = np.concatenate([fused[stored_as][taken] for taken in rows])
            else:
                holder = mapping.stack_of(self.spec, layer) if part == "relative" else layer
                weights[part] = self._read(stored_as, dtype, holder)
        return weights

    def routing(self, layer: int, dtype: str) -> dict[str, npt.NDArray]:
        """What a layer of a mixture of experts has for every token, under the parameter names of `RoutingBlock`: router
        [E, D], float32 where the model says so, and gate, up and down [X, D], down's columns as rows."""
        weights = {}
        for name, part in mapping.routing_parts(self.spec, layer).items():
            if name == "down":
                stored = self._stored(part, layer)
                shape, kind = stored_as(stored.shape[::-1], dtype)
                weights[name] = np.empty(shape, kind if kind == "uint8" else numpy_dtype(kind))
                _fill(stored, weights[name], turned=True)
            else:
                weights[name] = self._read(part, self.spec.routing_dtype(name, dtype), layer, called=name)
        return weights

    def fill_bundle(self, layer: int, out: npt.NDArray) -> None:
        """Write one layer's units into `out` [units, P, W, D], contiguous, packed [units, P, W, groups, n]: gate rows,
        up rows, down columns of each.

        A unit is a neuron, W = 1, or an expert, W neurons. With biases the column behind a row holds the neuron's own
        (see `ModelSpec.unit_width`), the rest zeros.
        """
        spec = self.spec
        shape = (spec.units, spec.ffn_parts, spec.unit_rows, spec.unit_width)
        if out.dtype != np.uint8 and out.dtype not in STORED_DTYPES.values():
            raise ValueError(f"out must be float32, float16, bfloat16 or packed, got {out.dtype}")
        wanted = packed_shape(shape, bits_of(out)) if out.dtype == np.uint8 else shape
        if out.shape != wanted:
            raise ValueError(f"out must have the shape {wanted}, got {out.shape}")
        if spec.experts is not None:
            self._fill_experts(layer, out)
            return
        if out.dtype == np.uint8:
            self._fill_packed(layer, out)
            return
        out[..., spec.hidden :] = 0
        for index, part in enumerate(mapping.unit_parts(spec)):
            rows = out[:, index, 0, : spec.hidden]
            if part == "down":
                read_transposed_into(self._stored(part, layer), rows)
            else:
                read_into(self._stored(part, layer), rows)
                if spec.ffn_bias:
                    read_into(self._stored(f"{part}_bias", layer), out[:, index, 0, spec.hidden])

    def _fill_packed(self, layer: int, out: npt.NDArray[np.uint8]) -> None:
        """`fill_bundle` of packed neurons. A bias fills a group, so that its scale alone stands for it: only the column
        at D meets anything but zeros."""
        spec, bits = self.spec, bits_of(out)
        for index, part in enumerate(mapping.unit_parts(spec)):
            _fill(self._stored(part, layer), out[:, index, 0], turned=part == "down")
            if spec.ffn_bias:
                biases = np.zeros(len(out), np.float32)
                if part != "down":
                    read_into(self._stored(f"{part}_bias", layer), biases)
                behind = np.broadcast_to(biases[:, None], (len(out), spec.unit_width - spec.hidden))
                pack_into(behind, packed_rows(out[:, index, 0]), bits, spec.hidden // GROUP)

    def _fill_experts(self, layer: int, out: npt.NDArray) -> None:
        """One expert after the other, straight from its tensors or from its share of a layer's."""
        if layer not in self.spec.unit_layers:
            raise ValueError(f"layer must be one that has experts, {self.spec.unit_layers}, got {layer}")
        for expert, unit in enumerate(out):
            for part, rows in zip(mapping.unit_parts(self.spec), unit, strict=True):
                stored = self._expert(part, layer, expert)
                _fill(stored, rows, turned=part == "down")

    def _expert(self, part: str, layer: int, expert: int) -> Stored:
        """Where an expert's gate or up [W, D] or down [D, W] lies."""
        width, hidden = self.spec.unit_rows, self.spec.hidden
        if (alone := self.tensors.get((mapping.expert_part(part, expert), layer))) is not None:
            return alone
        if part == "down":
            return self.tensors["experts_down", layer].piece(expert, (hidden, width))
        return self.tensors["experts_gate_up", layer].piece(2 * expert + (part == "up"), (width, hidden))

    def _stored(self, part: str, layer: int | None = None) -> Stored:
        if layer is not None and not 0 <= layer < self.spec.layers:
            raise ValueError(f"layer must be from 0 to {self.spec.layers - 1}, got {layer}")
        return self.tensors[part, layer]

    def _read(self, part: str, dtype: str, layer: int | None = None, called: str | None = None) -> npt.NDArray:
        """called: the name in its block, where that is another."""
        stored = self._stored(part, layer)
        shape, kind = held_as(called or part, stored.shape, dtype, tied=self.spec.tied)
        out = np.empty(shape, kind if kind == "uint8" else numpy_dtype(kind))
        _fill(stored, out)
        return out


def _fill(stored: Stored, out: npt.NDArray, *, turned: bool = False) -> None:
    """Read a tensor into `out`, packing it if that is packed; turned: its columns become rows."""
    if out.dtype != np.uint8:
        (read_transposed_into if turned else read_into)(stored, out)
        return
    (pack_columns_into if turned else pack_rows_into)(stored, packed_rows(out), bits_of(out))


def _identity(record: Any) -> dict[str, Any]:
    """What a record says that its defaults do not: a field added later changes no fingerprint."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {f.name: values[f.name] for f in fields(record) if values[f.name] != f.default}
    return {
        name: _identity(value) if is_dataclass(value) else value
        for name, value in changed.items()
        if name not in _NOT_IDENTITY
    }


def _read_shards(folder: Path, paths: Sequence[Path]) -> tuple[Shard, ...]:
    shards, problems = [], []
    for path in paths:
        try:
            shards.append(read_shard(path))
        except ModelError as error:
            problems.append(str(error))
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ModelError(f"{located(folder)}: " + "; ".join(problems[:SHOWN]) + more)
    return tuple(shards)


def _index_problems(shards: Sequence[Shard], weight_map: dict[str, str] | None) -> list[str]:
    """Tensors the index and the shards disagree about."""
    if weight_map is None:
        return []
    held = {(name, shard.path.name) for shard in shards for name in shard.tensors}
    lacking = [f"{name} in {file}" for name, file in weight_map.items() if (name, file) not in held]
    unlisted = [f"{name} in {file}" for name, file in held if weight_map.get(name) != file]
    problems = []
    if lacking:
        problems.append(f"{INDEX} lists {len(lacking)} tensors that the shards lack: {listing(lacking)}")
    if unlisted:
        problems.append(f"the shards hold {len(unlisted)} tensors that {INDEX} does not list: {listing(unlisted)}")
    return problems


def _match(found: dict[str, Stored], spec: ModelSpec) -> tuple[dict[mapping.Key, Stored], list[str]]:
    """The expected tensors among those found, and every problem with them."""
    prefix = mapping.prefix_of(found, spec)
    merged = mapping.is_merged(found.keys(), spec, prefix)
    shapes = mapping.expected(spec, merged=merged)
    names = {(part, layer): mapping.tensor_name(part, spec, layer, prefix, merged=merged) for part, layer in shapes}
    wanted = {names[key]: shape for key, shape in shapes.items()}
    head = mapping.tensor_name("head", spec, prefix=prefix)
    problems = []
    missing = wanted.keys() - found.keys()
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {listing(missing)}")
        if head in missing:
            problems.append(f"without {head}, config.json must say tie_word_embeddings: true")
    extra = {name for name in found.keys() - wanted.keys() if not mapping.is_ignorable(name, spec)}
    if spec.tied and head in extra and found[head].shape == mapping.shape_of("head", spec):
        extra.discard(head)
        log.info("%s is stored although config.json ties it to the embedding: ignored", head)
    if extra:
        problems.append(f"{len(extra)} tensors are unknown: {listing(extra)}")
    for what, wrong in (
        ("have the wrong shape", _wrong_shapes(found, wanted)),
        ("have an unsupported type", _wrong_dtypes(found, wanted)),
    ):
        if wrong:
            problems.append(f"{len(wrong)} tensors {what}: {listing(wrong)}")
    return {key: found[name] for key, name in names.items() if name in found}, problems


def _wrong_shapes(found: dict[str, Stored], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} {quoted(found[name].shape)}, expected {shape}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]


def _wrong_dtypes(found: dict[str, Stored], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} {plain(found[name].dtype)}, expected {'/'.join(READABLE)}"
        for name in wanted
        if name in found and found[name].dtype not in READABLE
    ]


def sampled(path: Path, start: int) -> str:
    """16 hex digits of blocks of a file's data from `start` on, as the fingerprint takes them."""
    digest = hashlib.sha256()
    for block in _samples(path, start, path.stat().st_size):
        digest.update(block)
    return digest.hexdigest()[:16]


def _samples(path: Path, start: int, end: int) -> list[bytes]:
    """Evenly spaced blocks of the data, the first and the last included; all of it if there is little."""
    last = max(start, end - _SAMPLE_BYTES)
    offsets = sorted({start + (last - start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    try:
        with path.open("rb", buffering=0) as file:
            return [os.pread(file.fileno(), min(_SAMPLE_BYTES, end - offset), offset) for offset in offsets]
    except OSError as error:
        raise StorageError(f"cannot read {plain(path.name)}: {error.strerror}") from error
