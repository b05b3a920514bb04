"""The placement an engine starts with: how many units each layer holds on the device, and which."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynajax.plan import Placement

MOST_STAGED = 64
LEVELS = 8  # distinct pool sizes, so that at most 8 shapes of every pool program are compiled


def block_units(units: int) -> int:
    """Units that a pool grows by: a multiple of ceil(units/16), coarse enough for at most 8 pool sizes.

    Example: 768 neurons -> 96, so pools hold 0, 96, ..., 768.
    """
    return min(units, 2 * -(-units // (2 * LEVELS)))


def staged_units(units: int) -> int:
    """Units sent at a time while decoding: a power of two, at most 64 and a twentieth of a block of the pool, so that
    no update needs a temporary above 5 % of it. Example: 768 neurons -> 4."""
    return 1 << (min(MOST_STAGED, max(1, block_units(units) // 20)).bit_length() - 1)


def layer_slots(
    frequency: npt.NDArray[np.float32],  # [L, F] share of tokens for which the unit is live
    unit_bytes: int,  # on the device
    pool_bytes: int,  # for all layers together
) -> tuple[int, ...]:
    """G of every layer: whole blocks of a layer's most frequent units, best blocks first, until one does not fit.

    Within a layer the blocks' masses never rise, so the sorted order is also a valid order of growth, and with
    equal blocks (every width that is a multiple of 16) it is the optimum of the knapsack: it ties with HiGHS, which is
    therefore only the tests' oracle (PowerInfer section 6.3 ships such an ILP). A short last block may cost up to one
    block. More bytes only lengthen the prefix: no budget holds fewer units than a smaller one. Ties go round layers.
    """
    if pool_bytes < 0 or unit_bytes < 1:
        raise ValueError(f"pool_bytes must be >= 0 and unit_bytes >= 1, got {pool_bytes} and {unit_bytes}")
    layers, units = frequency.shape
    block = block_units(units)
    starts = np.arange(0, units, block)
    descending = -np.sort(-frequency.astype(np.float64), axis=1)
    mass = np.add.reduceat(descending, starts, axis=1)  # [L, blocks]
    sizes = np.minimum(block, units - starts)  # the last block may be short
    index, layer = np.meshgrid(np.arange(len(starts)), np.arange(layers))
    order = np.lexsort((layer.ravel(), index.ravel(), -mass.ravel()))
    total = np.cumsum(sizes[index.ravel()[order]] * unit_bytes)
    taken = order[total <= pool_bytes]
    slots = np.zeros(layers, np.int64)
    np.add.at(slots, layer.ravel()[taken], sizes[index.ravel()[taken]])
    return tuple(int(count) for count in slots)


def equal_slots(
    frequency: npt.NDArray[np.float32],  # [L, F] share of tokens for which the unit is live
    unit_bytes: int,  # on the device
    pool_bytes: int,  # for all layers together
) -> tuple[int, ...]:
    """As many slots for every layer, up to one block of ceil(units/16); blocks that remain go where most use is.

    What a layer can use then depends on the text, which dynamic placement follows; measured, this places better for it
    than slots by frequency, which give the first layer far too many. Two pool sizes at most.
    Example: 2 layers of 16 units, 3 bytes a unit, 15 bytes: 2 slots each, and a third for the layer that uses it more.
    """
    layers, units = frequency.shape
    block = -(-units // (2 * LEVELS))
    each, more = divmod(pool_bytes // (unit_bytes * block), layers)
    descending = -np.sort(-frequency.astype(np.float64), axis=1)
    brought = descending[:, each * block : (each + 1) * block].sum(axis=1)  # by one more block
    slots = np.full(layers, each * block)
    slots[np.argsort(-brought, kind="stable")[:more]] += block
    return tuple(int(count) for count in np.minimum(slots, units))


def place_equal(frequency: npt.NDArray[np.float32], unit_bytes: int, pool_bytes: int) -> Placement:
    """The most frequent units of every layer, as many as `equal_slots` grants; equal frequencies by id."""
    return _place(frequency, equal_slots(frequency, unit_bytes, pool_bytes))


def place_static(frequency: npt.NDArray[np.float32], unit_bytes: int, pool_bytes: int) -> Placement:
    """The most frequent units of every layer, as many as `layer_slots` grants; equal frequencies by id."""
    return _place(frequency, layer_slots(frequency, unit_bytes, pool_bytes))


def _place(frequency: npt.NDArray[np.float32], slots: tuple[int, ...]) -> Placement:
    order = np.argsort(-frequency, axis=1, kind="stable")
    buckets = tuple(np.sort(order[i, :count]).astype(np.int32) for i, count in enumerate(slots))
    return Placement(buckets, frequency.shape[1])
