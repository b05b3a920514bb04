"""PyTorch's zip checkpoints (.bin, .pt, .pth), read without PyTorch and without running anything in them.

The names, types and places of the tensors are read at once, their values only when asked for. No number in the
file is trusted: each is compared with what the file really holds before anything is read or allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dynajax.checkpoint.wording import SHOWN, listing, located, plain, quoted
from dynajax.convert.tensor_pickle import ITEM_BYTES, Storage, View, load
from dynajax.convert.zip_members import BLOCK_BYTES, Archive, Member
from dynajax.errors import ModelError, StorageError

PICKLE_BYTES = 2**22  # the largest data.pkl read; 10,000 tensors take 1.5 MB
MOST_DIMS = 8
MOST_ITEMS = 2**40
SPREAD = 16  # a strided tensor may be spread over this many times its own bytes
FLOATS = ("float64", "float32", "float16", "bfloat16")
_SMALL_BYTES = 64
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # PyTorch before 1.6
_RESAVE = (
    "where PyTorch is installed, save it again as a zip file: torch.save(torch.load(path, weights_only=True), path)"
)


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensor:
    """One tensor; its numbers are checked against `member`, whose bytes are its storage."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # items
    offset: int  # items into the storage
    archive: Archive
    member: Member

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two names of the same values in the same file."""
        return self.archive.path, self.member.name, self.dtype, self.offset, self.shape, self.stride

    def blocks(self) -> Iterator[npt.NDArray]:
        """The values in row-major order, in pieces; each is valid until the next is asked for.

        ModelError if the storage's checksum does not match or the file changed. A tensor that does not lie in
        row-major order is read whole.
        """
        if self.size == 0:
            return
        self.archive.check(self.member)
        if not _is_row_major(self.shape, self.stride):
            yield from self._strided_blocks()
            return
        kind = _numpy_dtype(self.dtype)
        buffer = np.empty(min(self.size, BLOCK_BYTES // kind.itemsize), kind)
        for first in range(0, self.size, len(buffer)):
            block = buffer[: self.size - first]
            self._fill(block, self.offset + first)
            yield block

    def read(self) -> npt.NDArray:
        """All values, in the stored type and shape."""
        out = np.empty(self.size, _numpy_dtype(self.dtype))
        done = 0
        for block in self.blocks():
            out[done : done + block.size] = block.reshape(-1)
            done += block.size
        return out.reshape(self.shape)

    def _strided_blocks(self) -> Iterator[npt.NDArray]:
        """Rows of the first axis, made contiguous."""
        held = np.empty(_reach(self.shape, self.stride), _numpy_dtype(self.dtype))
        self._fill(held, self.offset)
        steps = tuple(step * held.itemsize for step in self.stride)
        whole = as_strided(held, self.shape, steps, writeable=False)
        rows = max(1, BLOCK_BYTES * self.shape[0] // (self.size * held.itemsize))
        for first in range(0, self.shape[0], rows):
            yield np.ascontiguousarray(whole[first : first + rows])

    def _fill(self, out: npt.NDArray, first: int) -> None:
        self.archive.read_into(self.member, first * out.itemsize, out.view(np.uint8).data)


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """The tensors of one file by name, in its order; of a file that is one bare tensor, under the name ""."""

    path: Path
    tensors: dict[str, TorchTensor]

    @classmethod
    def open(cls, path: Path) -> TorchFile:
        """Read names and places. ModelError for whatever is not a sound zip checkpoint of tensors only.

        A dictionary of tensors inside another one (`{"state_dict": {...}, "epoch": 3}`) is found if it is the only
        one. Entries of the dictionary that are no tensors are left out.
        """
        _refuse_other_formats(path)
        archive = Archive.open(path)
        root = _root(archive)
        _check_byte_order(archive, root)
        raw = archive.read(archive.members[f"{root}/data.pkl"], PICKLE_BYTES)
        found = _state_dict(load(raw, plain(path.name)), plain(path.name))
        tensors, problems = {}, []
        for name, view in found.items():
            member = archive.members.get(f"{root}/data/{view.storage.key}")
            if problem := _problem(view, member):
                problems.append(f"{plain(name)}: {problem}")
            elif member is not None:
                tensors[name] = TorchTensor(
                    name, view.storage.dtype, view.shape, view.stride, view.offset, archive, member
                )
        if problems:
            more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ModelError(f"{plain(path.name)} is corrupt: " + "; ".join(problems[:SHOWN]) + more)
        return cls(path, tensors)


def _numpy_dtype(dtype: str) -> np.dtype:
    """A bool is read as uint8: its byte may hold anything."""
    if dtype == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype("uint8" if dtype == "bool" else dtype)


def _refuse_other_formats(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error
    if start.startswith(b"PK\x03\x04"):
        return
    if start.startswith(_LEGACY):
        raise ModelError(f"{located(path)} is in PyTorch's format from before 1.6, which is not read: {_RESAVE}")
    if start[257:262] == b"ustar":
        raise ModelError(f"{located(path)} is a tar file, PyTorch's first format, which is not read: {_RESAVE}")
    if start.startswith(b"\x80"):
        raise ModelError(f"{located(path)} is a bare pickle, not a PyTorch zip file, and is never run: {_RESAVE}")
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{located(path)} is a git-lfs pointer, the file itself was not downloaded: git lfs pull")
    raise ModelError(f"{located(path)} is not a PyTorch zip file: it starts with {quoted(start[:8])}")


def _root(archive: Archive) -> str:
    """The one folder in the archive that everything lies in."""
    roots = {name.split("/")[0] for name in archive.members}
    name = plain(archive.path.name)
    if len(roots) != 1 or f"{(root := roots.pop())}/data.pkl" not in archive.members:
        raise ModelError(f"{name} is a zip file, but not a PyTorch checkpoint: no data.pkl in its one folder")
    if any(member.startswith((f"{root}/constants.pkl", f"{root}/code/")) for member in archive.members):
        raise ModelError(f"{name} is a TorchScript program, not a checkpoint: save its state_dict() instead")
    return root


def _check_byte_order(archive: Archive, root: str) -> None:
    member = archive.members.get(f"{root}/byteorder")
    order = b"little" if member is None else archive.read(member, _SMALL_BYTES)
    if order != b"little":
        raise ModelError(f"{plain(archive.path.name)} has the byte order {quoted(order)}, only little is read")


def _state_dict(value: object, where: str) -> dict[str, View]:
    """The dictionary of tensors in what the pickle describes."""
    if isinstance(value, View):
        return {"": value}
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds a {type(value).__name__}, expected tensors by name")
    inner = {key: part for key, part in value.items() if isinstance(part, dict) and _tensors_of(part)}
    own = _tensors_of(value)
    if (own and inner) or len(inner) > 1:
        keys = listing([*map(str, inner), *(["its own level"] if own else [])])
        raise ModelError(f"{where} holds several dictionaries of tensors ({keys}): save the one that is meant")
    chosen = own or next((_tensors_of(part) for part in inner.values()), {})
    if not chosen:
        raise ModelError(f"{where} holds no tensors by name")
    if bad := [str(key) for key in chosen if not isinstance(key, str)]:
        raise ModelError(f"{where} names tensors by numbers: {listing(bad)}")
    return chosen


def _tensors_of(value: dict) -> dict[str, View]:
    return {key: part for key, part in value.items() if isinstance(part, View)}


def _problem(view: View, member: Member | None) -> str | None:
    """Why the numbers of a tensor cannot be true, or None. Python's integers do not overflow."""
    storage, shape, stride = view.storage, view.shape, view.stride
    if member is None:
        return f"its storage {quoted(storage.key)} is missing"
    if not _fits(storage, member):
        return f"its storage has {member.size} bytes, not {quoted(storage.numel)} x {ITEM_BYTES[storage.dtype]}"
    if len(shape) != len(stride) or len(shape) > MOST_DIMS:
        return f"shape {quoted(shape)} and strides {quoted(stride)} do not go together"
    if min(*shape, *stride, view.offset, 0) < 0 or math.prod(max(size, 1) for size in shape) > MOST_ITEMS:
        return f"shape {quoted(shape)}, strides {quoted(stride)} or offset {quoted(view.offset)} out of range"
    if 0 in shape:
        return None
    reach, size = _reach(shape, stride), math.prod(shape)
    if view.offset + reach > storage.numel or size > storage.numel:
        return f"shape {quoted(shape)} reaches beyond its storage of {storage.numel} items"
    if reach > SPREAD * size:
        return f"{size} items are spread over {reach}: save a contiguous copy"
    return None


def _fits(storage: Storage, member: Member) -> bool:
    return member.size == storage.numel * ITEM_BYTES[storage.dtype]


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Items from the first one of a tensor to its last, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
