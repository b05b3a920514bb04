"""A model folder, opened: everything validated before anything is allocated, then read part by part."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import mapping
from dynajax.checkpoint.reading import STORED_DTYPES, numpy_dtype, read_into, read_transposed_into
from dynajax.checkpoint.shards import INDEX, Shard, Stored, find_shards, read_shard
from dynajax.checkpoint.spec import read_spec
from dynajax.checkpoint.wording import SHOWN, listing, located, plain, quoted
from dynajax.config import ModelSpec
from dynajax.errors import ModelError, StorageError

log = logging.getLogger(__name__)

_SAMPLES = 64  # blocks of every shard's data that enter the fingerprint
_SAMPLE_BYTES = 4096
_NOT_IDENTITY = ("max_positions", "dtype", "bos_id", "eos_ids")  # change what is run, not what is computed


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One validated model folder. Holds names and offsets only; every read allocates or fills what it returns.

    Reads raise NumericalError for NaN, infinity or float16 overflow, and ModelError if a shard changed
    since `open`.
    """

    folder: Path
    spec: ModelSpec
    shards: tuple[Shard, ...]
    tensors: dict[str, Stored]  # the expected ones only

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Validate config, index, shards and every tensor's name, shape and type.

        One ModelError lists all problems of the first stage that has any: the config, then the files, then
        the tensors.
        """
        folder = Path(folder)
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
        identity = {key: value for key, value in asdict(self.spec).items() if key not in _NOT_IDENTITY}
        digest = hashlib.sha256(b"dynajax weights 1\n" + json.dumps(identity, sort_keys=True).encode())
        for shard in self.shards:
            digest.update(shard.header)
            for block in _samples(shard):
                digest.update(block)
        return digest.hexdigest()

    def embed(self, dtype: str) -> npt.NDArray:
        """The embedding table [V, D]."""
        return self._read("embed", dtype)

    def head(self, dtype: str) -> npt.NDArray | None:
        """The output projection [V, D]; None when it is tied to the embedding."""
        return None if self.spec.tied else self._read("head", dtype)

    def norm(self, dtype: str) -> npt.NDArray:
        """The final norm [D]."""
        return self._read("norm", dtype)

    def attention(self, layer: int, dtype: str) -> dict[str, npt.NDArray]:
        """One layer's weights outside the FFN, under the parameter names of `AttentionBlock`."""
        return {part: self._read(part, dtype, layer) for part in mapping.ATTENTION_PARTS}

    def fill_bundle(self, layer: int, out: npt.NDArray) -> None:
        """Write one layer's FFN into `out` [F, P=3, W=1, D]: gate row, up row, down column of each neuron."""
        shape = (self.spec.ffn, 3, 1, self.spec.hidden)
        if out.shape != shape:
            raise ValueError(f"out must have the shape {shape}, got {out.shape}")
        if out.dtype not in STORED_DTYPES.values():
            raise ValueError(f"out must be float32, float16 or bfloat16, got {out.dtype}")
        read_into(self._stored("gate", layer), out[:, 0, 0, :])
        read_into(self._stored("up", layer), out[:, 1, 0, :])
        read_transposed_into(self._stored("down", layer), out[:, 2, 0, :])

    def _stored(self, part: str, layer: int | None = None) -> Stored:
        if layer is not None and not 0 <= layer < self.spec.layers:
            raise ValueError(f"layer must be from 0 to {self.spec.layers - 1}, got {layer}")
        return self.tensors[mapping.tensor_name(part, layer)]

    def _read(self, part: str, dtype: str, layer: int | None = None) -> npt.NDArray:
        stored = self._stored(part, layer)
        out = np.empty(stored.shape, numpy_dtype(dtype))
        read_into(stored, out)
        return out


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


def _match(found: dict[str, Stored], spec: ModelSpec) -> tuple[dict[str, Stored], list[str]]:
    """The expected tensors among those found, and every problem with them."""
    wanted = mapping.expected(spec)
    problems = []
    missing = wanted.keys() - found.keys()
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {listing(missing)}")
        if mapping.HEAD_NAME in missing:
            problems.append("without lm_head.weight, config.json must say tie_word_embeddings: true")
    extra = {name for name in found.keys() - wanted.keys() if not mapping.is_ignorable(name)}
    if spec.tied and mapping.HEAD_NAME in extra and found[mapping.HEAD_NAME].shape == mapping.shape_of("head", spec):
        extra.discard(mapping.HEAD_NAME)
        log.info("lm_head.weight is stored although config.json ties it to the embedding: ignored")
    if extra:
        problems.append(f"{len(extra)} tensors are unknown: {listing(extra)}")
    for what, wrong in (
        ("have the wrong shape", _wrong_shapes(found, wanted)),
        ("have an unsupported type", _wrong_dtypes(found, wanted)),
    ):
        if wrong:
            problems.append(f"{len(wrong)} tensors {what}: {listing(wrong)}")
    return {name: found[name] for name in wanted if name in found}, problems


def _wrong_shapes(found: dict[str, Stored], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} {quoted(found[name].shape)}, expected {shape}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]


def _wrong_dtypes(found: dict[str, Stored], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name} {plain(found[name].dtype)}, expected {'/'.join(STORED_DTYPES)}"
        for name in wanted
        if name in found and found[name].dtype not in STORED_DTYPES
    ]


def _samples(shard: Shard) -> list[bytes]:
    """Evenly spaced blocks of the data, the first and the last included; all of it if there is little."""
    start, end = len(shard.header), shard.stamp.size
    last = max(start, end - _SAMPLE_BYTES)
    offsets = sorted({start + (last - start) * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    try:
        with shard.path.open("rb", buffering=0) as file:
            return [os.pread(file.fileno(), min(_SAMPLE_BYTES, end - offset), offset) for offset in offsets]
    except OSError as error:
        raise StorageError(f"cannot read {plain(shard.path.name)}: {error.strerror}") from error
