"""The host's half of a layer with experts: those that are not on the device, by the compiled library."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore
from dynajax.config import Activation
from dynajax.engine.cold import ColdCounters
from dynajax.engine.mixture.groups import Routed
from dynajax.pool import DevicePool
from hostcompute import HostPool, NumpyPool
from hostcompute.ffi import HostTable

Rows = npt.NDArray[np.float32]


class ColdExperts:
    """Computes the share of some experts from the host's store."""

    def __init__(
        self, store: HostStore, pool: DevicePool, host: HostPool | NumpyPool, activation: Activation, first: int = 0
    ):
        """first: the number of the first layer that decodes, among those that have experts."""
        self._store, self._pool, self._host, self._activation = store, pool, host, activation
        self._first, self._counters = first, ColdCounters()
        self._table: HostTable | None = None

    @property
    def counters(self) -> ColdCounters:
        """Sums since the last reset, those of programs that call the library themselves included; live and computed
        count pairs of a token and an expert."""
        mine = self._counters
        if self._table is None:
            return mine
        theirs = self._table.counters()
        live = int(theirs.live.sum())
        return ColdCounters(
            seconds=mine.seconds + float(theirs.seconds.sum()),
            bytes_read=mine.bytes_read + int(theirs.bytes_read.sum()),
            live=mine.live + live,
            live_first_layer=mine.live_first_layer + int(theirs.live[self._first : self._first + 1].sum()),
            computed=mine.computed + live,
        )

    def has(self, layer: int) -> bool:
        """Whether the layer has any expert on the host alone."""
        return len(self._pool.cold(layer)) > 0

    def run(self, layer: int, h: Rows, routed: Routed, experts: npt.NDArray[np.int32]) -> Rows:
        """The share of `experts` [C] in the output of h [R, D] -> [R, D], a fresh array. layer: of the store."""
        y = np.zeros(h.shape, np.float32)
        if not len(experts):
            return y
        begin = time.perf_counter()
        some, weights = routed.spread(experts)
        rows = h if some.all() else h[some]
        result = self._host.ffn(
            rows,
            self._store.arenas[layer],
            experts,
            activation=self._activation.kind,
            threshold=self._activation.threshold,
            skip_zeros=self._activation.has_zeros,
            weights=weights,
        )
        y[some] = result.y
        counters, pairs = self._counters, int(np.count_nonzero(weights))
        counters.seconds += time.perf_counter() - begin
        counters.bytes_read += result.bytes_read
        counters.live += pairs
        counters.live_first_layer += pairs if layer == self._first else 0
        counters.computed += pairs
        return y

    def run_absent(self, layer: int, h: Rows, routed: Routed, active: npt.NDArray[np.bool_]) -> Rows:
        """The share of all experts that are not in the pool, in the rows that count; the others get zeros."""
        mine = Routed(routed.ids[active], routed.weights[active])
        absent = self._pool.cold(layer)
        y = np.zeros_like(h)
        y[active] = self.run(layer, h[active], mine, absent[np.isin(absent, mine.ids)])
        return y

    def share(self, table: HostTable) -> None:
        """Let programs compute the same through `table`: all experts that are not in the pool now."""
        assert isinstance(self._host, HostPool), "only the compiled library can be called from a program"
        kind, threshold = self._activation.kind, self._activation.threshold
        units = [self._pool.cold(layer) for layer in range(len(self._pool.slots))]
        skip = self._activation.has_zeros
        table.attach(self._host, self._store.arenas, units, activation=kind, threshold=threshold, skip_zeros=skip)
        self._table = table

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
