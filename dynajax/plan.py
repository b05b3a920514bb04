"""What a policy decided: frozen records that others carry out. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which units start on the device: `buckets[layer][slot]` is a unit id, ascending; [] where none is."""

    buckets: tuple[npt.NDArray[np.int32], ...]  # L arrays [G]
    units: int  # units per layer (F neurons or E experts)

    @property
    def slots(self) -> tuple[int, ...]:
        """G of every layer."""
        return tuple(len(bucket) for bucket in self.buckets)

    @property
    def resident(self) -> int:
        """Units on the device, all layers together."""
        return sum(self.slots)

    def cold(self, layer: int) -> npt.NDArray[np.int32]:
        """The units of a layer that are not on the device, ascending."""
        absent = np.ones(self.units, np.bool_)
        absent[self.buckets[layer]] = False
        return np.flatnonzero(absent).astype(np.int32)

    def check(self) -> None:
        """The books: ids ascending, so every unit at most once, and in range."""
        for layer, bucket in enumerate(self.buckets):
            assert (np.diff(bucket) > 0).all(), f"layer {layer}: a unit sits in two slots, or ids do not ascend"
            assert len(bucket) == 0 or (bucket.min() >= 0 and bucket.max() < self.units), f"layer {layer}: id range"


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """What one layer does for one token: swaps to carry out, and from which score a unit is computed.

    `units[j]` is to come into `slots[j]`, whose unit then is on the host again. A unit is computed if its score
    reaches theta_g on the device, theta_c on the host. Both hold once the swaps are carried out; if a swap is late
    or fails, the layer goes by `theta` on both sides, which skips the same wherever a unit lives.
    """

    units: npt.NDArray[np.int32]  # [n]
    slots: npt.NDArray[np.int32]  # [n]
    theta: np.uint8
    theta_g: np.uint8
    theta_c: np.uint8
    n_gpu: int  # units that reach their threshold, the swaps carried out
    n_cpu: int

    def __post_init__(self) -> None:
        assert self.units.shape == self.slots.shape
        self.units.flags.writeable = self.slots.flags.writeable = False
