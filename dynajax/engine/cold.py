"""The host's half of an FFN: every unit that is not in the pool, by the compiled library."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore
from dynajax.config import Activation
from dynajax.pool import DevicePool
from hostcompute import HostPool, NumpyPool
from hostcompute.ffi import HostTable

BLOCK_BYTES = 2**20  # of h per call: it stays in a core's cache while the units stream past


@dataclass(slots=True)
class ColdCounters:
    """Sums since the last reset, over all layers."""

    seconds: float = 0.0
    bytes_read: int = 0
    live: int = 0
    live_first_layer: int = 0
    computed: int = 0


class ColdSide:
    """Computes y_cold of a layer; knows which units are absent from the device."""

    def __init__(
        self,
        store: HostStore,
        pool: DevicePool,
        host: HostPool | NumpyPool,
        activation: Activation,
        *,
        skip_zeros: bool,
    ):
        self._store, self._pool, self._host, self._activation = store, pool, host, activation
        self._skip_zeros = skip_zeros
        self._table: HostTable | None = None
        self._counters = ColdCounters()

    @property
    def counters(self) -> ColdCounters:
        """Sums since the last reset, those of programs that call the library themselves included."""
        mine = self._counters
        if self._table is None:
            return mine
        theirs = self._table.counters()
        computed = sum(int(rows) * len(self.units(layer)) for layer, rows in enumerate(theirs.rows))
        return ColdCounters(
            seconds=mine.seconds + float(theirs.seconds.sum()),
            bytes_read=mine.bytes_read + int(theirs.bytes_read.sum()),
            live=mine.live + int(theirs.live.sum()),
            live_first_layer=mine.live_first_layer + int(theirs.live[0]),
            computed=mine.computed + computed,
        )

    def share(self, table: HostTable) -> None:
        """Let programs compute the same through `table`."""
        assert isinstance(self._host, HostPool), "only the compiled library can be called from a program"
        kind, threshold = self._activation.kind, self._activation.threshold
        arenas, skip = self._store.arenas, self._skip_zeros
        units = [self.units(layer) for layer in range(len(self._pool.slots))]
        table.attach(self._host, arenas, units, activation=kind, threshold=threshold, skip_zeros=skip)
        self._table = table

    def has(self, layer: int) -> bool:
        """Whether the layer has any unit on the host."""
        return len(self.units(layer)) > 0

    def units(self, layer: int) -> npt.NDArray[np.int32]:
        """The layer's units on the host [C], ascending; not to be changed."""
        return self._pool.cold(layer)

    def run(
        self,
        layer: int,
        h: npt.NDArray[np.float32],  # [T, W]
        live: npt.NDArray[np.uint8] | None = None,  # [T, C], filled if given: which units were live
        values: npt.NDArray[np.float32]
        | None = None,  # [T, C], filled if given: what the down rows are multiplied with
    ) -> npt.NDArray[np.float32]:
        """y_cold [T, W] of all units on the host, a fresh array: jax may still be reading the last one."""
        return self.run_chosen(layer, h, self.units(layer), live=live, values=values)

    def run_chosen(
        self,
        layer: int,
        h: npt.NDArray[np.float32],  # [T, W]
        units: npt.NDArray[np.int32],  # [C], on the host
        admit: npt.NDArray[np.uint8] | None = None,  # [T, C]: 0 where a row does without a unit; None: nowhere
        live: npt.NDArray[np.uint8] | None = None,  # [T, C], filled if given: which were live and admitted
        values: npt.NDArray[np.float32] | None = None,  # [T, C], filled if given
    ) -> npt.NDArray[np.float32]:
        """The same of chosen units."""
        counters = self._counters
        y = np.empty(h.shape, np.float32)
        start = time.perf_counter()
        block = max(8, BLOCK_BYTES // (4 * h.shape[1]))
        for first in range(0, len(h), block):
            rows = slice(first, first + block)
            result = self._host.ffn(
                h[rows],
                self._store.arenas[layer],
                units,
                activation=self._activation.kind,
                threshold=self._activation.threshold,
                skip_zeros=self._skip_zeros,
                out=y[rows],
                live=None if live is None else live[rows],
                admit=None if admit is None else admit[rows],
                values=None if values is None else values[rows],
            )
            found = int(result.live_count.sum())
            counters.bytes_read += result.bytes_read
            counters.live += found
            counters.live_first_layer += found if layer == 0 else 0
        counters.seconds += time.perf_counter() - start
        counters.computed += len(units) * len(h) if admit is None else int(admit.sum())
        return y

    def run_active(self, layer: int, h: npt.NDArray[np.float32], active: npt.NDArray[np.bool_]) -> npt.NDArray:
        """The same for the active rows [T]; the others get zeros without being computed."""
        if active.all():
            return self.run(layer, h)
        y = np.zeros_like(h)
        y[active] = self.run(layer, h[active])
        return y

    def reset(self) -> None:
        """Start counting anew."""
        self._counters = ColdCounters()
        if self._table is not None:
            self._table.reset()

    def close(self) -> None:
        """Ends the worker threads."""
        if self._table is not None:
            self._table.detach()
        self._host.close()
