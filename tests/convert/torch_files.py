"""What torch.save writes, written without torch: a zip of stored members, the pickle made of opcodes by hand."""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype("float64"): "DoubleStorage",
    np.dtype("float32"): "FloatStorage",
    np.dtype("float16"): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype("int64"): "LongStorage",
    np.dtype("uint8"): "ByteStorage",
}
MARK, TUPLE, REDUCE, STOP, EMPTY_TUPLE = b"(", b"t", b"R", b".", b")"
ORDERED = b"ccollections\nOrderedDict\n" + EMPTY_TUPLE + REDUCE


@dataclass(frozen=True)
class Raw:
    """A tensor whose numbers are chosen freely. `store` is the storage's content."""

    store: np.ndarray
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    numel: int | None = None  # what the pickle says of the storage
    key: str | None = None  # shared by equal keys

    @classmethod
    def of(cls, array: np.ndarray) -> "Raw":
        stride = tuple(step // array.itemsize for step in np.empty(array.shape, array.dtype).strides)
        return cls(np.ascontiguousarray(array).reshape(-1), array.shape, stride)


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(max(1, value.bit_length() // 8 + 1), "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values: tuple[int, ...]) -> bytes:
    return MARK + b"".join(map(number, values)) + TUPLE


def storage(name: str, key: str, numel: int) -> bytes:
    return (
        MARK + text("storage") + f"ctorch\n{name}\n".encode() + text(key) + text("cpu") + number(numel) + TUPLE + b"Q"
    )


def tensor(raw: Raw, key: str) -> bytes:
    numel = raw.store.size if raw.numel is None else raw.numel
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n" + MARK + storage(STORAGES[raw.store.dtype], key, numel)
        + number(raw.offset) + numbers(raw.shape) + numbers(raw.stride) + b"\x89" + ORDERED + TUPLE + REDUCE
    )  # fmt: skip


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + STOP


def dictionary(entries: Mapping[str, bytes]) -> bytes:
    return ORDERED + MARK + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def as_raw(value: "np.ndarray | Raw") -> Raw:
    return value if isinstance(value, Raw) else Raw.of(value)


def save(path: Path, tensors: "Mapping[str, np.ndarray | Raw] | np.ndarray | Raw", *, outer: str | None = None) -> Path:
    """torch.save(tensors, path); with `outer` it is {outer: tensors, "epoch": 3}."""
    if not isinstance(tensors, Mapping):
        raw = as_raw(tensors)
        return save_zip(path, pickled(tensor(raw, "0")), {"0": raw.store})
    raws = {name: as_raw(value) for name, value in tensors.items()}
    keys = {name: raw.key or str(i) for i, (name, raw) in enumerate(raws.items())}
    body = dictionary({name: tensor(raw, keys[name]) for name, raw in raws.items()})
    body += b"}" + text("_metadata") + ORDERED + b"sb"  # the state of an OrderedDict
    if outer is not None:
        body = b"}" + MARK + text(outer) + body + text("epoch") + number(3) + b"u"
    return save_zip(path, pickled(body), {keys[name]: raw.store for name, raw in raws.items()})


def save_zip(path: Path, pickle: bytes, stores: Mapping[str, np.ndarray], **changes: object) -> Path:
    """The archive; changes: more members by name, or None to drop one."""
    root = path.stem
    members: dict[str, object] = {"data.pkl": pickle, "byteorder": b"little"}
    members |= {f"data/{key}": store.tobytes() for key, store in stores.items()} | {"version": b"3\n"} | changes
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(zipfile.ZipInfo(f"{root}/{name}"), content)
    return path
