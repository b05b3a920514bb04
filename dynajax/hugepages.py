"""Arrays of the CPU backend on huge pages, which XLA does not ask for."""

from __future__ import annotations

import jax
import numpy.typing as npt

from dynajax.bundles import allocate_arena
from hostcompute.pages import HUGE, gather_pages


def put(array: npt.NDArray, device: jax.Device) -> jax.Array:
    """The array on the device. On the CPU backend a large one is copied to huge pages, which jax then takes as they
    are: what is sent must not be looked up by its address, since jax counts such an array twice."""
    if device.platform == "cpu" and array.nbytes >= HUGE:
        own = allocate_arena(array.shape, array.dtype)
        own[...] = array
        array = own
    return jax.device_put(array, device).block_until_ready()


def on_huge_pages(array: jax.Array) -> jax.Array:
    """The same array, which a program made; on the CPU backend its memory lies on huge pages from now on, where the
    system has them."""
    if array.nbytes >= HUGE and next(iter(array.devices())).platform == "cpu":
        gather_pages(array.block_until_ready().unsafe_buffer_pointer(), array.nbytes)
    return array
