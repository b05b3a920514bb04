"""The measured peak of device memory, by means that share nothing with the accountant."""

from __future__ import annotations

import gc
import weakref

import jax


class PeakMeter:
    """Peak bytes of one engine. On CUDA the allocator's own peak, which is the whole process's; elsewhere what is seen
    alive.

    `sample()` adds up the live arrays of the device at a step boundary, leaving out those that were alive before
    the meter was made. `peak_bytes` adds the largest temporary of the compiled programs, which no array shows.
    """

    def __init__(self, device: jax.Device):
        gc.collect()
        self._device = device
        self._before = {id(array): weakref.ref(array) for array in jax.live_arrays(device.platform)}
        self._arrays_bytes = 0

    def sample(self) -> int:
        """Bytes alive now, of arrays made since the meter was; remembers the largest. 0 where the allocator knows."""
        if "peak_bytes_in_use" in (self._device.memory_stats() or {}):
            return 0
        alive = 0
        for array in jax.live_arrays(self._device.platform):
            before = self._before.get(id(array))
            if before is None or before() is not array:
                alive += array.nbytes
        self._arrays_bytes = max(self._arrays_bytes, alive)
        return alive

    def in_use(self) -> int:
        """Bytes in use now: of the whole process where the allocator knows, else of the arrays that `sample` sees."""
        stats = self._device.memory_stats() or {}
        return int(stats["bytes_in_use"]) if "bytes_in_use" in stats else self.sample()

    def peak_bytes(self, max_temp_bytes: int) -> int:
        """The peak so far."""
        stats = self._device.memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            return int(stats["peak_bytes_in_use"])
        return self._arrays_bytes + max_temp_bytes
