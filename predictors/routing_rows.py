"""Tokens of routed layers as rows of a `buffer.TokenBuffer`: vectors in half precision, a bit an expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from predictors.buffer import Rows
from predictors.routing_fitting import RoutingShape


def layout(shape: RoutingShape) -> dict[str, tuple[tuple[int, ...], type]]:
    """{name: (shape of one token's row, type)}."""
    count = len(shape.layers)
    return {
        "live": ((count, -(-shape.experts // 8)), np.uint8),
        "h": ((count, shape.hidden), np.float16),
        "scale": ((count,), np.float32),
    }


def token_bytes(shape: RoutingShape) -> int:
    return sum(int(np.prod(row)) * np.dtype(kind).itemsize for row, kind in layout(shape).values())


def encode(h: npt.NDArray[np.float32], live: npt.NDArray[np.bool_]) -> Rows:
    """A buffer's rows of h [T, M, D] and live [T, M, E]."""
    scale = np.sqrt((h.astype(np.float64) ** 2).mean(axis=2)).astype(np.float32) + np.float32(1e-30)
    bits = np.packbits(live, axis=2, bitorder="little")
    return {"live": bits, "h": (h / scale[:, :, None]).astype(np.float16), "scale": scale}


def vectors_of(rows: Rows, number: int) -> npt.NDArray[np.float32]:
    """[T, D] of a layer, to 11 bits what was handed in."""
    return rows["h"][:, number].astype(np.float32) * rows["scale"][:, number, None]


def live_of(rows: Rows, number: int, experts: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(rows["live"][:, number], axis=1, count=experts, bitorder="little").astype(bool)
