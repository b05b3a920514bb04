"""Units from the host store into the pool: gather into a staging slot, one transfer, one donated update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore, allocate_arena
from dynajax.plan import Placement
from dynajax.pool import DevicePool
from dynajax.programs import Programs
from dynajax.staging import Staging

RING = 3  # staging slots: one being gathered, one being sent, one being consumed
PIECE_BYTES = 32 * 2**20  # of a unit of many rows that is sent at a time


class Gatherer(Protocol):
    """The host library's row gather."""

    def gather(self, bundle: np.ndarray, units: npt.NDArray[np.int32], out: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Units on their way: the staging slot that holds them, and the same on the device."""

    staging: np.ndarray  # [count, P, W, ...], the first of which are filled
    rows: np.ndarray | jax.Array  # [n, P, W, ...]
    gather_s: float
    transfer_s: float


class Transfer:
    """Moves at most `count` units at a time. Not thread-safe: one thread owns it.

    A staging slot is filled again only when the update that read it is ready: jax may read a NumPy argument
    without copying it, long after the call returned.
    """

    def __init__(
        self,
        store: HostStore,
        pool: DevicePool,
        programs: Programs,
        host: Gatherer,
        count: int,
        staging: Staging | None = None,  # how `load` sends; None: never asked to
    ):
        self._store, self._pool, self._programs, self._host = store, pool, programs, host
        shape = (count, *store.arenas[0].shape[1:])
        self._free = deque(allocate_arena(shape, store.dtype) for _ in range(RING))
        self._busy: deque[tuple[np.ndarray, jax.Array]] = deque()
        self._staging, self._epoch = staging, pool.epoch
        if staging is not None:
            staging.register(self._free)
        self.count = count

    def send(self, layer: int, units: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> None:
        """Bring units of a layer into `slots` [n]; returns when the update is dispatched."""
        staging = self._take()
        try:
            rows = staging[: len(units)]
            self._host.gather(self._store.arenas[layer], units, rows)
            self._update(layer, rows, units, slots, staging)
        except BaseException:
            self._free.append(staging)
            raise

    def load(self, layer: int, units: npt.NDArray[np.int32]) -> Block:
        """Bring units [n] of a layer to the device, beside the pool; returns when they are there, with the times."""
        assert self._staging is not None, "this transfer only fills pools"
        staging = self._take()
        try:
            begin = time.perf_counter()
            rows = staging[: len(units)]
            self._host.gather(self._store.arenas[layer], units, rows)
            gathered = time.perf_counter()
            sent = self._staging.send(rows)
            return Block(staging, sent, gathered - begin, time.perf_counter() - gathered)
        except BaseException:
            self._free.append(staging)
            raise

    def apply(self, layer: int, block: Block, units: npt.NDArray[np.int32], slots: npt.NDArray[np.int32]) -> None:
        """Put what was loaded into `slots` [n] of the pool; returns when the update is dispatched."""
        try:
            self._update(layer, block.rows, units, slots, block.staging)
        except BaseException:
            self._free.append(block.staging)
            raise

    def drain(self) -> None:
        """Wait until every update is done."""
        while self._busy:
            self._retire()

    def close(self) -> None:
        """Wait, and give registered memory back, whatever became of the updates."""
        try:
            self.drain()
        finally:
            if self._staging is not None:
                self._staging.close()

    def _update(self, layer: int, rows, units, slots, staging: np.ndarray) -> None:
        program = self._programs.get("write", self._pool.slots[layer], len(units), self._store.dtype.name)
        fence = self._pool.update(layer, slots, units, lambda parts: program(parts, rows, slots), self._epoch)
        self._busy.append((staging, fence))

    def _take(self) -> np.ndarray:
        if not self._free:
            self._retire()
        return self._free.popleft()

    def _retire(self) -> None:
        staging, fence = self._busy.popleft()
        fence.block_until_ready()
        self._free.append(staging)


def piece_sizes(most: int) -> tuple[int, ...]:
    """How many units a transfer carries while decoding: powers of two up to `most`, so that few programs do."""
    return tuple(2**power for power in range(most.bit_length())) if most else ()


def fill_piece(units: int, host_unit_bytes: int, device_unit_bytes: int, spare_bytes: int) -> int:
    """How many units the fill moves at a time: at most a twentieth of the smallest pool, whose update then needs no
    larger temporary, and so few that the pieces in flight and one converted piece fit the scratch memory, which
    nothing else uses at that time.
    """
    fitting = spare_bytes // (RING * host_unit_bytes + device_unit_bytes)
    return max(1, min(-(-units // 16) // 10, fitting))


def fill_pool(
    transfer: Transfer,
    pool: DevicePool,
    placement: Placement,
    on_layer: Callable[[int], None] | None = None,  # when a layer's units are on their way
    load: Callable[[int], None] | None = None,  # brings a layer's units into its arena, where one serves all layers
) -> None:
    """Put the initial placement into an empty pool, `transfer.count` slots at a time.

    A bucket that is no multiple of it ends with a piece that overlaps the one before, which writes the same
    units into the same slots again: no further program, no undefined slot.
    """
    for layer, bucket in enumerate(placement.buckets):
        if load is not None:
            load(layer)
        starts = list(range(0, len(bucket) - transfer.count + 1, transfer.count))
        if starts and starts[-1] + transfer.count < len(bucket):
            starts.append(len(bucket) - transfer.count)
        for start in starts:
            slots = np.arange(start, start + transfer.count, dtype=np.int32)
            transfer.send(layer, bucket[slots], slots)
        if on_layer is not None:
            on_layer(layer)
    transfer.drain()
    pool.check()


@dataclass(frozen=True, slots=True)
class Moved:
    """What bringing one unit took."""

    nbytes: int
    gather_s: float
    transfer_s: float


def piece_rows(width: int, row_bytes: int) -> int:
    """Rows of a part that are sent at a time: all W, or as many equal shares as keep a piece within 32 MiB."""
    return -(-width // -(-width * row_bytes // PIECE_BYTES))


class UnitTransfer:
    """Moves units of many rows, one at a time, part by part and in pieces: no update needs a temporary, and the pool
    names a unit only once all of it is there. Not thread-safe: one thread owns it.
    """

    def __init__(
        self,
        store: HostStore,
        programs: Programs,
        staging: Staging | None = None,  # None: programs read the store itself
    ):
        self._store, self._programs, self._staging = store, programs, staging
        _, self._parts, self._width, *row = store.arenas[0].shape
        self.rows = piece_rows(self._width, store.arenas[0][0, 0, 0].nbytes)
        self._busy: deque[jax.Array] = deque()
        self._ring: deque[np.ndarray] = deque()
        if staging is not None and staging.copies:
            self._ring.extend(allocate_arena((self.rows, *row), store.dtype) for _ in range(RING))
            staging.register(self._ring)

    def bring(self, pool: DevicePool, arena: int, unit: int, layer: int, slot: int) -> Moved:
        """Unit `unit` of an arena into a slot of the pool's `layer`; returns when the last update is dispatched."""
        epoch, gather_s, transfer_s = pool.epoch, 0.0, 0.0
        program = self._programs.get("write_rows", pool.slots[layer], self.rows, self._store.dtype.name)
        source = self._store.arenas[arena][unit]
        pool.vacate(layer, slot)
        for part in range(self._parts):
            for start in _starts(self._width, self.rows):
                begin = time.perf_counter()
                rows = self._gathered(source[part, start : start + self.rows])
                gathered = time.perf_counter()
                sent = rows if self._staging is None else self._staging.send(rows)
                gather_s, transfer_s = gather_s + gathered - begin, transfer_s + time.perf_counter() - gathered
                at = np.int32(slot * self._width + start)
                fence = pool.write(layer, part, lambda array, sent=sent, at=at: program(array, sent, at), epoch)
                self._busy.append(fence)
                while len(self._busy) >= RING:
                    self._busy.popleft().block_until_ready()
        pool.name(layer, slot, unit, epoch)
        return Moved(source.nbytes, gather_s, transfer_s)

    def drain(self) -> None:
        """Wait until every update is done."""
        while self._busy:
            self._busy.popleft().block_until_ready()

    def close(self) -> None:
        """Wait, and give registered memory back, whatever became of the updates."""
        try:
            self.drain()
        finally:
            if self._staging is not None:
                self._staging.close()

    def _gathered(self, rows: np.ndarray) -> np.ndarray:
        """The rows where they can be sent from: the oldest block of the ring, whose update is done."""
        if not self._ring:
            return rows
        block = self._ring[0]
        self._ring.rotate(-1)
        block[:] = rows
        return block


def _starts(width: int, rows: int) -> list[int]:
    """Where pieces of so many rows begin; the last one may overlap the one before, which writes the same again."""
    return [min(start, width - rows) for start in range(0, width, rows)]


def fill_units(
    transfer: UnitTransfer,
    pool: DevicePool,
    placement: Placement,
    on_layer: Callable[[int], None] | None = None,
    load: Callable[[int], None] | None = None,
) -> None:
    """`fill_pool` for units of many rows."""
    for layer, bucket in enumerate(placement.buckets):
        if load is not None:
            load(layer)
        for slot, unit in enumerate(bucket):
            transfer.bring(pool, layer, int(unit), layer, slot)
        if load is not None:
            transfer.drain()  # the arena is about to be overwritten
        if on_layer is not None:
            on_layer(layer)
    transfer.drain()
    pool.check()
