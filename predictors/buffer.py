"""Tokens on their way through training: a shuffle buffer and a reservoir of fixed size. NumPy only.

A token is one row of every array: the vectors that predictors read, half precision with one scale a vector, and a bit
a neuron. What comes out depends on the order of the tokens and the seed alone, not on how they were handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from predictors.forms import Reads, Shape

Rows = dict[str, npt.NDArray]  # each [T, L, ...]
Vectors = Sequence[npt.NDArray[np.floating]]


def layout(shape: Shape, reads: Sequence[Reads]) -> dict[str, tuple[tuple[int, ...], type]]:
    """{name: (shape of one token's row, type)}."""
    rows: dict[str, tuple[tuple[int, ...], type]] = {"live": ((shape.layers, -(-shape.ffn // 8)), np.uint8)}
    for name in reads:
        rows |= {
            name: ((shape.layers, shape.hidden), np.float16),
            f"{name}_scale": ((shape.layers,), np.float32),
        }
    return rows


def token_bytes(shape: Shape, reads: Sequence[Reads]) -> int:
    return sum(int(np.prod(row)) * np.dtype(kind).itemsize for row, kind in layout(shape, reads).values())


def encode(vectors: Mapping[Reads, Vectors], live: Sequence[npt.NDArray[np.bool_]], shape: Shape, at: slice) -> Rows:
    """The rows of the tokens `at`, from lists over layers of [T, D or more] and [T, F]."""
    rows: Rows = {"live": np.stack([np.packbits(part[at], axis=1, bitorder="little") for part in live], axis=1)}
    for name, layers in vectors.items():
        x = np.stack([np.asarray(part[at, : shape.hidden], np.float32) for part in layers], axis=1)
        scale = np.sqrt((x.astype(np.float64) ** 2).mean(axis=2)).astype(np.float32) + np.float32(1e-30)
        rows |= {name: (x / scale[:, :, None]).astype(np.float16), f"{name}_scale": scale}
    return rows


def vectors_of(rows: Rows, reads: Reads, layer: int) -> npt.NDArray[np.float32]:
    """[T, D] float32, to 11 bits what was handed in."""
    return rows[reads][:, layer].astype(np.float32) * rows[f"{reads}_scale"][:, layer, None]


def live_of(rows: Rows, layer: int, ffn: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(rows["live"][:, layer], axis=1, count=ffn, bitorder="little").astype(bool)


class TokenBuffer:
    """At most `capacity` tokens, allocated once."""

    def __init__(self, capacity: int, layout: Mapping[str, tuple[tuple[int, ...], type]]):
        self.capacity, self.count = capacity, 0
        self._rows: Rows = {name: np.zeros((capacity, *row), kind) for name, (row, kind) in layout.items()}

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self._rows.values())

    @property
    def rows(self) -> Rows:
        """Those that are filled; views, valid until the next call that changes the buffer."""
        return {name: array[: self.count] for name, array in self._rows.items()}

    def put(self, rows: Rows) -> None:
        """Append; there must be room."""
        count = len(rows["live"])
        assert self.count + count <= self.capacity
        for name, array in self._rows.items():
            array[self.count : self.count + count] = rows[name]
        self.count += count

    def offer(self, rows: Rows, seen: int, seed: int) -> None:
        """Keep a uniform sample of all that was ever offered; these are numbers seen, seen + 1, ... of it."""
        for i in range(len(rows["live"])):
            if self.count < self.capacity:
                slot, self.count = self.count, self.count + 1
            else:
                slot = int(np.random.default_rng((seed, seen + i)).integers(seen + i + 1))
            if slot < self.capacity:
                for name, array in self._rows.items():
                    array[slot] = rows[name][i]

    def take(self, index: npt.NDArray[np.integer]) -> Rows:
        """Copies of the rows `index`."""
        return {name: array[index] for name, array in self._rows.items()}

    def drop(self, index: npt.NDArray[np.integer]) -> None:
        """Forget the rows `index`; the last ones move into the gaps."""
        stays = np.ones(self.count, bool)
        stays[index] = False
        left = int(stays.sum())
        gaps, movers = np.flatnonzero(~stays[:left]), left + np.flatnonzero(stays[left:])
        for array in self._rows.values():
            array[gaps] = array[movers]
        self.count = left

    def state(self) -> dict[str, npt.NDArray]:
        return {"count": np.array(self.count, np.int64), **{name: array.copy() for name, array in self._rows.items()}}

    def restore(self, state: Mapping[str, npt.NDArray]) -> None:
        self.count = int(state["count"])
        for name, array in self._rows.items():
            array[:] = state[name]
