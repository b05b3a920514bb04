"""The reference's answer, and how far another one is from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.checksums import read_checksums
from dynajax.checkpoint.mapping import tensor_name
from dynajax.checkpoint.reading import read_into
from dynajax.checkpoint.shards import Stored
from dynajax.checkpoint.spec import read_config
from dynajax.reference import forward

CHUNK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may cost: by the type of weights and activations on the device."""

    cosine: float  # of a layer's FFN input with the reference's, at any position
    logits: float  # largest difference / largest magnitude


TOLERANCES = {
    "float32": Tolerance(cosine=0.99999, logits=2e-4),
    "float16": Tolerance(cosine=0.9995, logits=0.02),
    "bfloat16": Tolerance(cosine=0.995, logits=0.1),
}


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the reference computes for T tokens."""

    hidden: tuple[npt.NDArray[np.float32], ...]  # L arrays [T, D]
    logits: npt.NDArray[np.float64]  # [T, V]


class _FromFile(Mapping[str, npt.NDArray]):
    """Tensors under their published names, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint):
        self._stored: dict[str, Stored] = {
            tensor_name(part, checkpoint.spec, layer): stored for (part, layer), stored in checkpoint.tensors.items()
        }

    def __getitem__(self, name: str) -> npt.NDArray:
        out = np.empty(self._stored[name].shape, np.float32)
        read_into(self._stored[name], out)
        return out

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def expected(checkpoint: Checkpoint, ids: Sequence[int]) -> Expected:
    """The reference's answer; one tensor in memory at a time."""
    hidden: list[npt.NDArray[np.float32]] = []
    config = read_config(checkpoint.folder)
    logits = forward(config, _FromFile(checkpoint), ids, lambda layer, h: hidden.append(h.astype(np.float32)))
    return Expected(tuple(hidden), logits)


def cosines(got: Sequence[npt.NDArray], wanted: Sequence[npt.NDArray]) -> list[float]:
    """The worst cosine over the positions of every layer [L]; NaN counts as -1."""
    worst = []
    for a, b in zip(got, wanted, strict=True):
        a64, b64 = a.astype(np.float64), b.astype(np.float64)
        lengths = np.linalg.norm(a64, axis=1) * np.linalg.norm(b64, axis=1)
        cosine = (a64 * b64).sum(axis=1) / np.maximum(lengths, 1e-300)
        worst.append(float(np.nan_to_num(cosine, nan=-1.0).min()))
    return worst


def logits_error(got: npt.NDArray, wanted: npt.NDArray) -> float:
    """The largest difference over the largest magnitude; infinite if anything is not finite."""
    error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    return error if np.isfinite(error) else float("inf")


def broken_checksums(checkpoint: Checkpoint) -> list[str] | None:
    """The tensors whose bytes are not those of the folder's checksums.json; None without such a file."""
    folder = checkpoint.folder
    sums = read_checksums(folder) if folder.is_dir() else None
    if sums is None:
        return None
    stored = {name: tensor for shard in checkpoint.shards for name, tensor in shard.tensors.items()}
    missing = sorted(sums.keys() - stored.keys())
    return missing + [name for name in sorted(sums.keys() & stored.keys()) if _digest(stored[name]) != sums[name]]


def _digest(stored: Stored) -> str:
    digest, path = hashlib.sha256(), Path(stored.path)
    with path.open("rb") as file:
        file.seek(stored.offset)
        left = stored.nbytes
        while left and (block := file.read(min(left, CHUNK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
