"""The host's copy of the FFN weights: one unit-contiguous arena per layer that has units.

[F, P, 1, D] where a unit is a neuron, [E, P, W, D] where it is an expert of W neurons; of a packed type (`quant`) with
[groups, n] in the place of D.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.quantised import PackedCheckpoint
from dynajax.checkpoint.reading import numpy_dtype
from dynajax.config import ModelSpec
from dynajax.errors import FitError
from dynajax.quant import stored_as


def allocate_arena(shape: tuple[int, ...], dtype: str | npt.DTypeLike) -> npt.NDArray:
    """A page-aligned array of zeros, private to this process, on huge pages where the system grants them.

    Its memory goes back to the system when the last view of it is gone. FitError if there is none.
    """
    kind = numpy_dtype(dtype) if isinstance(dtype, str) and dtype != "uint8" else np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < 1:
        raise ValueError(f"an arena must hold at least one element, got the shape {shape}")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise FitError(f"the host has no {nbytes / 2**30:.1f} GiB to spare: use a 16-bit --host-dtype") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Python built against old kernel headers lacks it
        with contextlib.suppress(OSError):  # a kernel without huge pages; small ones work too
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=kind).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class HostStore:
    """The units of every layer that has any. `arenas[i][unit]` is one unit of layer `spec.unit_layers[i]`, [P, W, D] or
    packed [P, W, groups, n], contiguous. Empty: all on the device."""

    arenas: Sequence[npt.NDArray]  # [units, P, W, ...] each

    @property
    def dtype(self) -> np.dtype:
        return self.arenas[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def unit_bytes(self) -> int:
        """What one unit takes: P x W rows."""
        return self.arenas[0][0].nbytes

    def check(self) -> None:
        """Assert what the gather and the transfer rely on: equal shapes, one type, contiguous and page-aligned."""
        for layer, arena in enumerate(self.arenas):
            first = self.arenas[0]
            assert arena.ndim == (5 if arena.dtype == np.uint8 else 4), (layer, arena.shape)
            assert arena.shape == first.shape and arena.dtype == first.dtype, (layer, arena.shape, arena.dtype)
            assert arena.flags.c_contiguous, layer
            assert arena.ctypes.data % mmap.PAGESIZE == 0, layer


def one_arena(spec: ModelSpec, dtype: str) -> HostStore:
    """A store whose layers share one arena: each is read, sent to the device and overwritten by the next."""
    return HostStore((_arena_of(spec, dtype),) * len(spec.unit_layers))


def arena_shape(spec: ModelSpec) -> tuple[int, int, int, int]:
    """[units, P, W, D] of one layer, in values."""
    return spec.units, spec.ffn_parts, spec.unit_rows, spec.unit_width


def _arena_of(spec: ModelSpec, dtype: str) -> npt.NDArray:
    """An empty arena of one layer."""
    return allocate_arena(*stored_as(arena_shape(spec), dtype))


def load_store(
    checkpoint: Checkpoint | PackedCheckpoint,
    dtype: str,
    on_layer: Callable[[int], None] | None = None,  # called with each layer's number when it is loaded
) -> HostStore:
    """Read every layer's units from the shards straight into its arena, one layer at a time."""
    arenas = []
    for layer in checkpoint.spec.unit_layers:
        arena = _arena_of(checkpoint.spec, dtype)
        checkpoint.fill_bundle(layer, arena)
        arenas.append(arena)
        if on_layer is not None:
            on_layer(layer)
    return HostStore(arenas)
