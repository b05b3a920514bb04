"""The device pool: per layer a tuple of parts and the bucket that says which unit sits in which slot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.hugepages import on_huge_pages
from dynajax.programs import Shapes

Parts = tuple[jax.Array, ...]  # P arrays [G*W, D], or packed [G*W, groups, n]


class DevicePool:
    """Preallocated for good; contents change only by `update`, a donated program that keeps the buffers.

    Whoever reads parts and dispatches with them, or updates them, does so inside `lock`: a handle read before
    a donation and used after it is a deleted array. No NumPy view of a part may be kept: it turns every later
    update into a copy of the whole pool.
    """

    def __init__(
        self,
        slots: tuple[int, ...],  # G of every layer
        parts: int,
        width: int,
        row: tuple[int, ...],  # shape of a row: (D,), packed (groups, n)
        dtype: jnp.dtype,
        units: int,
    ):
        self.lock = threading.Lock()
        self.epoch = 0  # how often it was cleared
        self._units = units
        self._shapes = [((count * width, *row), dtype, parts if count else 0) for count in slots]
        self._buckets = [np.full(count, -1, np.int32) for count in slots]
        self._cold: list[npt.NDArray[np.int32] | None] = [None] * len(slots)
        self._parts: list[Parts] = []
        self._allocate()

    def _allocate(self) -> None:
        self._parts = [
            tuple(on_huge_pages(jnp.zeros(shape, dtype)) for _ in range(count)) for shape, dtype, count in self._shapes
        ]

    def clear(self) -> None:
        """Give every buffer back and start over with empty ones; who still means the old ones is refused."""
        with self.lock:
            self.epoch += 1
            for part in (part for parts in self._parts for part in parts if not part.is_deleted()):
                part.delete()
            self._allocate()
            for layer, bucket in enumerate(self._buckets):
                bucket[:], self._cold[layer] = -1, None

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

    def cold(self, layer: int) -> npt.NDArray[np.int32]:
        """The units that are in no slot, ascending; not to be changed."""
        if (known := self._cold[layer]) is None:
            absent = np.ones(self._units, np.bool_)
            bucket = self._buckets[layer]
            absent[bucket[bucket >= 0]] = False
            known = self._cold[layer] = np.flatnonzero(absent).astype(np.int32)
        return known

    def update(
        self,
        layer: int,
        slots: npt.NDArray[np.int32],  # [n] distinct
        units: npt.NDArray[np.int32],  # [n] what they will hold
        program: Callable[[Parts], tuple[Parts, jax.Array]],  # donates the parts it is given
        epoch: int | None = None,  # of the pool that is meant; None: whichever
    ) -> jax.Array:
        """Run the update and change the bucket in one critical section; -> the fence, ready with the new parts."""
        if len(slots) and not (0 <= slots.min() and slots.max() < len(self._buckets[layer])):
            raise ValueError(f"slots of layer {layer} must be in [0, {len(self._buckets[layer])}), got {slots}")
        assert len(np.unique(slots)) == len(slots), f"slots of layer {layer} are not distinct: {slots}"
        with self.lock:
            self._check_epoch(epoch)
            self._parts[layer], fence = program(self._parts[layer])
            self._buckets[layer][slots] = units
            self._cold[layer] = None
        return fence

    def vacate(self, layer: int, slot: int) -> None:
        """From now on nobody finds a unit in this slot: parts of another one are about to be written there."""
        with self.lock:
            self._buckets[layer][slot], self._cold[layer] = -1, None

    def write(
        self,
        layer: int,
        part: int,
        program: Callable[[jax.Array], tuple[jax.Array, jax.Array]],  # donates the part it is given
        epoch: int | None = None,  # see `update`
    ) -> jax.Array:
        """Run a program that changes some rows of one part, all of them in a slot that was vacated; -> its fence."""
        with self.lock:
            self._check_epoch(epoch)
            parts = list(self._parts[layer])
            parts[part], fence = program(parts[part])
            self._parts[layer] = tuple(parts)
        return fence

    def name(self, layer: int, slot: int, unit: int, epoch: int | None = None) -> None:
        """A vacated slot holds a whole unit again."""
        with self.lock:
            self._check_epoch(epoch)
            assert self._buckets[layer][slot] == -1, f"slot {slot} of layer {layer} was not vacated"
            self._buckets[layer][slot], self._cold[layer] = unit, None

    def _check_epoch(self, epoch: int | None) -> None:
        if epoch not in (None, self.epoch):
            raise RuntimeError("the pool was cleared since")

    def check(self) -> None:
        """The books: every slot filled, no unit twice, every id in range, no buffer lost."""
        for layer, bucket in enumerate(self._buckets):
            assert len(bucket) == 0 or 0 <= bucket.min(), f"layer {layer}: a slot was never filled"
            assert len(bucket) == 0 or bucket.max() < self._units, f"layer {layer}: a unit id out of range"
            assert len(np.unique(bucket)) == len(bucket), f"layer {layer}: a unit sits in two slots"
            assert not any(part.is_deleted() for part in self._parts[layer]), f"layer {layer}: parts were donated away"


def make_pool(shapes: Shapes, slots: tuple[int, ...]) -> DevicePool:
    """An empty pool of an engine's units, G slots in every layer."""
    spec = shapes.spec
    return DevicePool(slots, spec.ffn_parts, spec.unit_rows, shapes.rows_shape(), shapes.pool_type, spec.units)
