"""The checkpoint's side of a comparison: tensors by their published names, and the checksums of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.checksums import read_checksums
from dynajax.checkpoint.mapping import tensor_name
from dynajax.checkpoint.reading import read_into
from dynajax.checkpoint.shards import Stored
from dynajax.errors import StorageError

CHUNK_BYTES = 2**24
OnStep = Callable[[int, int], None]  # done, total; may raise


class FromFile(Mapping[str, npt.NDArray[np.float32]]):
    """Tensors by published name, whatever the file calls them; read when they are asked for, kept by nobody."""

    def __init__(self, checkpoint: Checkpoint):
        self._stored: dict[str, Stored] = {
            tensor_name(part, checkpoint.spec, layer): stored for (part, layer), stored in checkpoint.tensors.items()
        }

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        return read_tensor(self._stored[name])

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_tensor(stored: Stored) -> npt.NDArray[np.float32]:
    """A tensor's values, which float32 holds exactly. NumericalError if one is NaN or infinite."""
    out = np.empty(stored.shape, np.float32)
    read_into(stored, out)
    return out


def broken_checksums(checkpoint: Checkpoint, on_tensor: OnStep) -> tuple[str, ...] | None:
    """The tensors whose bytes are not those of the folder's checksums.json; None without such a file."""
    folder = checkpoint.folder
    sums = read_checksums(folder) if folder.is_dir() else None
    if sums is None:
        return None
    stored = {name: tensor for shard in checkpoint.shards for name, tensor in shard.tensors.items()}
    broken = []
    for done, (name, digest) in enumerate(sorted(sums.items()), start=1):
        if name not in stored or _digest(stored[name]) != digest:
            broken.append(name)
        on_tensor(done, len(sums))
    return tuple(broken)


def _digest(stored: Stored) -> str:
    digest, path = hashlib.sha256(), Path(stored.path)
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            left = stored.nbytes
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        raise StorageError(f"cannot read {path.name}: {error.strerror}") from error
    return digest.hexdigest()
