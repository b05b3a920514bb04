"""The device pool: per layer a tuple of parts and the bucket that says which unit sits in which slot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Parts = tuple[jax.Array, ...]  # P arrays [G*W, D]


class DevicePool:
    """Preallocated for good; contents change only by `update`, a donated program that keeps the buffers.

    Whoever reads parts and dispatches with them, or updates them, does so inside `lock`: a handle read before
    a donation and used after it is a deleted array. No NumPy view of a part may be kept: it turns every later
    update into a copy of the whole pool.
    """

    def __init__(self, slots: tuple[int, ...], parts: int, width: int, hidden: int, dtype: jnp.dtype, units: int):
        self.lock = threading.Lock()
        self._units = units
        self._parts: list[Parts] = [
            tuple(jnp.zeros((count * width, hidden), dtype) for _ in range(parts)) if count else () for count in slots
        ]
        self._buckets = [np.full(count, -1, np.int32) for count in slots]

    @property
    def slots(self) -> tuple[int, ...]:
        """G of every layer."""
        return tuple(len(bucket) for bucket in self._buckets)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._parts for part in parts)

    def parts(self, layer: int) -> Parts:
        """The layer's current parts; hold `lock` from this call until the program that reads them is dispatched."""
        return self._parts[layer]

    def bucket(self, layer: int) -> npt.NDArray[np.int32]:
        """A copy of slot -> unit id; -1 for a slot that was never filled."""
        return self._buckets[layer].copy()

    def update(
        self,
        layer: int,
        slots: npt.NDArray[np.int32],  # [n] distinct
        units: npt.NDArray[np.int32],  # [n] what they will hold
        program: Callable[[Parts], tuple[Parts, jax.Array]],  # donates the parts it is given
    ) -> jax.Array:
        """Run the update and change the bucket in one critical section; -> the fence, ready with the new parts."""
        if len(slots) and not (0 <= slots.min() and slots.max() < len(self._buckets[layer])):
            raise ValueError(f"slots of layer {layer} must be in [0, {len(self._buckets[layer])}), got {slots}")
        assert len(np.unique(slots)) == len(slots), f"slots of layer {layer} are not distinct: {slots}"
        with self.lock:
            self._parts[layer], fence = program(self._parts[layer])
            self._buckets[layer][slots] = units
        return fence

    def check(self) -> None:
        """The books: every slot filled, no unit twice, every id in range, no buffer lost."""
        for layer, bucket in enumerate(self._buckets):
            assert len(bucket) == 0 or 0 <= bucket.min(), f"layer {layer}: a slot was never filled"
            assert len(bucket) == 0 or bucket.max() < self._units, f"layer {layer}: a unit id out of range"
            assert len(np.unique(bucket)) == len(bucket), f"layer {layer}: a unit sits in two slots"
            assert not any(part.is_deleted() for part in self._parts[layer]), f"layer {layer}: parts were donated away"
