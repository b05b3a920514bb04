"""How a block of host memory gets onto the device: plainly, by way of pinned memory, or from registered memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dynajax.errors import UsageError

log = logging.getLogger(__name__)

KINDS = ("pinned_host", "registered", "plain")
REPEATS = 5  # of each kind's transfer when the fastest is looked for


class Staging(Protocol):
    """One way. `send` returns when the device has the block."""

    name: str
    copies: bool  # only registered memory can be sent from

    def register(self, blocks: Iterable[np.ndarray]) -> None:
        """The memory that will be sent from; before the first `send`."""

    def send(self, block: np.ndarray) -> jax.Array:
        """The block's values on the device. The block must not change while the result is in use."""

    def close(self) -> None:
        """Give back what was registered."""


class Plain:
    """Straight from NumPy's memory; the runtime copies it into pinned memory of its own where it needs to."""

    name = "plain"
    copies = False

    def __init__(self, device: jax.Device):
        self._device = device

    def register(self, blocks: Iterable[np.ndarray]) -> None:
        """Nothing to do."""

    def send(self, block: np.ndarray) -> jax.Array:
        return jax.device_put(block, self._device).block_until_ready()

    def close(self) -> None:
        """Nothing was registered."""


class PinnedHost:
    """Copied into an array of memory kind pinned_host, and from there by DMA."""

    name = "pinned_host"
    copies = False

    def __init__(self, device: jax.Device):
        self._host = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._there = SingleDeviceSharding(device, memory_kind="device")

    def register(self, blocks: Iterable[np.ndarray]) -> None:
        """Nothing to do."""

    def send(self, block: np.ndarray) -> jax.Array:
        return jax.device_put(jax.device_put(block, self._host), self._there).block_until_ready()

    def close(self) -> None:
        """Nothing was registered."""


class Registered(Plain):
    """The staging memory itself is pinned (`dma_map`), so that the runtime sends from it without a copy. CUDA only."""

    name = "registered"
    copies = True

    def __init__(self, device: jax.Device):
        super().__init__(device)
        self._mapped: list[int] = []

    def register(self, blocks: Iterable[np.ndarray]) -> None:
        for block in blocks:
            address = block.__array_interface__["data"][0]
            self._device.client.dma_map(address, block.nbytes)
            self._mapped.append(address)

    def close(self) -> None:
        while self._mapped:
            self._device.client.dma_unmap(self._mapped.pop())


_MAKERS: dict[str, Callable[[jax.Device], Staging]] = {
    "pinned_host": PinnedHost,
    "registered": Registered,
    "plain": Plain,
}


def open_staging(wanted: str, device: jax.Device, block: np.ndarray) -> Staging:
    """The way `wanted`; `auto`: the one that sends `block` fastest, measured now. UsageError: not on this device."""
    if wanted != "auto":
        staging = _MAKERS[wanted](device)
        if (reason := _refusal(staging, block)) is not None:
            raise UsageError(f"--staging {wanted} cannot be used here: {reason}; use auto or plain")
        return _MAKERS[wanted](device)
    ways = [_MAKERS[name](device) for name in KINDS]
    times = {way.name: _seconds(way, block) for way in ways if _refusal(way, block) is None}
    order = sorted(times, key=lambda name: times[name])
    told = ", ".join(f"{name} {block.nbytes / times[name] / 1e9:.2g} GB/s" for name in order)
    log.info("units are sent by way of %s, the fastest for %d KiB: %s", order[0], block.nbytes // 1024, told)
    return _MAKERS[order[0]](device)


def _refusal(staging: Staging, block: np.ndarray) -> str | None:
    """Why this device cannot send that way."""
    try:
        staging.register([block])
        staging.send(block)
    except (jax.errors.JaxRuntimeError, ValueError, AttributeError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        staging.close()
    return None


def _seconds(staging: Staging, block: np.ndarray) -> float:
    """The quickest of some transfers."""
    staging.register([block])
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        staging.send(block)
        times.append(time.perf_counter() - begin)
    staging.close()
    return min(times)
