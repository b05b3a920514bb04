"""Ways of dealing with absent neurons that the engine does not have, to compare it with; and a slower link.

Both take the place of the engine's `ColdSide` while decoding; prompts are computed on the host as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.gpu_stages.device import place, the_device
from dynajax.bundles import HostStore
from dynajax.config import Activation
from dynajax.engine.cold import ColdSide
from dynajax.ops.ffn import pool_ffn
from dynajax.staging import Staging, open_staging

LEAST_ROWS = 16  # that one program slices out of pinned memory
WAKING_S = 2e-4  # before the end a throttled send only yields: sleeping longer than asked for would be a slower link
PROBE_UNITS = 64  # in the block with which the fastest way is found
Around = Callable[[Staging], Staging]


class Throttled:
    """A way of sending units over a link of at most so many bytes a second: it waits until that time has passed."""

    def __init__(self, way: Staging, bytes_s: float):
        self.name, self.copies = way.name, way.copies
        self._way, self._bytes_s = way, bytes_s
        self.fastest_bytes_s = 0.0  # that was seen

    def register(self, blocks: Iterable[np.ndarray]) -> None:
        self._way.register(blocks)

    def send(self, block: np.ndarray) -> jax.Array:
        begin = time.perf_counter()
        sent = self._way.send(block)
        while (left := begin + block.nbytes / self._bytes_s - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - WAKING_S))
        spent = time.perf_counter() - begin
        self.fastest_bytes_s = max(self.fastest_bytes_s, block.nbytes / spent)
        return sent

    def close(self) -> None:
        self._way.close()


class StreamedCold(ColdSide):
    """Sends every layer that is not on the device there, whole, each time it is needed; the next one is on its way
    while this one is computed. Layers are either all on the device or not at all."""

    def __init__(self, store: HostStore, *rest: Any, around: Around | None = None, **settings: Any):
        super().__init__(store, *rest, **settings)
        way = open_staging("auto", the_device(), store.arenas[0][:PROBE_UNITS])
        self._way = way if around is None else around(way)
        absent = [layer for layer in range(len(store.arenas)) if self.has(layer)]
        assert all(len(self.units(layer)) == len(store.arenas[layer]) for layer in absent), "a layer is split"
        self._way.register(store.arenas[layer] for layer in absent)
        self._after = dict(zip(absent, [*absent[1:], *absent[:1]], strict=True))
        self._sender = ThreadPoolExecutor(1, "sender")
        self._coming: dict[int, Future[jax.Array]] = {}

    def run_chosen(self, layer, h, units, admit=None, live=None, values=None) -> npt.NDArray[np.float32]:
        """See `ColdSide`."""
        if len(h) > 1:
            return super().run_chosen(layer, h, units, admit, live, values)
        begin = time.perf_counter()
        rows = (self._coming.pop(layer, None) or self._send(layer)).result()
        self._coming[self._after[layer]] = self._send(self._after[layer])
        y = np.array(whole_ffn(h, rows, self._activation))
        self._counters.seconds += time.perf_counter() - begin
        self._counters.computed += len(units)
        return y

    def _send(self, layer: int) -> Future[jax.Array]:
        return self._sender.submit(self._way.send, self._store.arenas[layer])

    def close(self) -> None:
        self._sender.shutdown()
        self._coming.clear()
        self._way.close()
        super().close()


class PinnedCold(ColdSide):
    """Has a copy of every arena as an array of kind `pinned_host`: one program slices the wanted neurons out of it and
    computes them, so that no host thread gathers anything."""

    def __init__(self, store: HostStore, *rest: Any, **settings: Any):
        super().__init__(store, *rest, **settings)
        self._pinned = [jax.device_put(arena, place("pinned_host")).block_until_ready() for arena in store.arenas]

    def run_chosen(self, layer, h, units, admit=None, live=None, values=None) -> npt.NDArray[np.float32]:
        """See `ColdSide`."""
        if len(h) > 1 or not len(units):
            return super().run_chosen(layer, h, units, admit, live, values)
        begin = time.perf_counter()
        rows = np.resize(units, max(LEAST_ROWS, 1 << (len(units) - 1).bit_length()))
        y, lives = sliced_ffn(h, self._pinned[layer], rows, np.int32(len(units)), self._activation)
        if live is not None:
            live[:] = np.asarray(lives)[:, : len(units)]
        y = np.array(y)
        self._counters.seconds += time.perf_counter() - begin
        self._counters.computed += len(units)
        return y


def parts_of(rows: jax.Array) -> tuple[jax.Array, ...]:
    """Units [n, P, 1, ...] as the parts of a pool."""
    return tuple(rows[:, part, 0] for part in range(rows.shape[1]))


@partial(jax.jit, static_argnums=2)
def whole_ffn(h: jax.Array, rows: jax.Array, activation: Activation) -> jax.Array:
    """The FFN of all units [F, P, 1, D]."""
    return pool_ffn(h, parts_of(rows), activation)[0]


@partial(jax.jit, static_argnums=4)
def sliced_ffn(
    h: jax.Array, arena: jax.Array, units: jax.Array, count: jax.Array, activation: Activation
) -> tuple[jax.Array, jax.Array]:
    """The FFN of the first `count` of those units of an arena in pinned memory, and which of them are live [1, n]."""

    def slice_out(unit: jax.Array) -> jax.Array:
        return jax.device_put(jax.lax.dynamic_index_in_dim(arena, unit, keepdims=False), place())

    rows = jax.lax.map(slice_out, units)
    admit = (jnp.arange(len(units)) < count)[None]
    return pool_ffn(h, parts_of(rows), activation, admit)
