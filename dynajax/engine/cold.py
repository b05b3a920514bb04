"""The host's half of an FFN: every unit that is not in the pool, by the compiled library."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore
from dynajax.config import Activation
from dynajax.plan import Placement
from hostcompute import HostPool, NumpyPool

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
        placement: Placement,
        host: HostPool | NumpyPool,
        activation: Activation,
        *,
        skip_zeros: bool,
    ):
        self._store, self._host, self._activation = store, host, activation
        self._skip_zeros = skip_zeros
        self._units = [placement.cold(layer) for layer in range(len(placement.buckets))]
        hidden = store.arenas[0].shape[-1]
        self._block = max(8, BLOCK_BYTES // (4 * hidden))
        self.counters = ColdCounters()

    def has(self, layer: int) -> bool:
        """Whether the layer has any unit on the host."""
        return len(self._units[layer]) > 0

    def run(
        self,
        layer: int,
        h: npt.NDArray[np.float32],  # [T, D]
    ) -> npt.NDArray[np.float32]:
        """y_cold [T, D], a fresh array: jax may still be reading the last one."""
        units, counters = self._units[layer], self.counters
        y = np.empty(h.shape, np.float32)
        start = time.perf_counter()
        for first in range(0, len(h), self._block):
            rows = slice(first, first + self._block)
            result = self._host.ffn(
                h[rows],
                self._store.arenas[layer],
                units,
                activation=self._activation.kind,
                threshold=self._activation.threshold,
                skip_zeros=self._skip_zeros,
                out=y[rows],
            )
            live = int(result.live_count.sum())
            counters.bytes_read += result.bytes_read
            counters.live += live
            counters.live_first_layer += live if layer == 0 else 0
        counters.seconds += time.perf_counter() - start
        counters.computed += len(units) * len(h)
        return y

    def reset(self) -> None:
        self.counters = ColdCounters()

    def close(self) -> None:
        """Ends the worker threads."""
        self._host.close()
