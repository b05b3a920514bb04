"""Tensors by name as float64, and the config whose words decide what is done with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Config = Mapping[str, Any]

HEAD_ROWS = 8192  # of the head that are float64 at a time


class Tensors(Mapping[str, Array]):
    """Tensors by name below a prefix, made float64 when they are asked for and not kept."""

    def __init__(self, inner: Mapping[str, npt.NDArray[Any]], prefix: str = ""):
        self._inner, self._prefix = inner, prefix

    def below(self, prefix: str) -> Tensors:
        return Tensors(self._inner, self._prefix + prefix)

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self._inner[self._prefix + name], np.float64)

    def rows(self, name: str, ids: npt.NDArray) -> Array:
        """Some rows of a table, which is large."""
        return np.asarray(self._inner[self._prefix + name])[ids].astype(np.float64)

    def each(self, name: str) -> Iterator[Array]:
        """The matrices of a tensor [E, ...], one after the other."""
        for matrix in np.asarray(self._inner[self._prefix + name]):
            yield matrix.astype(np.float64)

    def scores(self, name: str, x: Array) -> Array:
        """x [T, D] times every row of a table [V, D] -> [T, V]."""
        table = np.asarray(self._inner[self._prefix + name])
        blocks = (table[first : first + HEAD_ROWS] for first in range(0, len(table), HEAD_ROWS))
        return np.concatenate([x @ block.astype(np.float64).T for block in blocks], axis=1)

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._inner

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._inner if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def model_type(config: Config) -> str:
    """`model_type`; MiniCPM files exist that leave it out and are known by their architecture."""
    untyped = "minicpm" if config.get("architectures") == ["MiniCPMForCausalLM"] else ""
    return config.get("model_type", untyped)
