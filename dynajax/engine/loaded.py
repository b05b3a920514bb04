"""What is loaded once a model is open, and what computes with it."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.bundles import HostStore
from dynajax.engine.cold import ColdSide
from dynajax.engine.mixture.cold import ColdExperts
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.threads import ThreadsRunner
from dynajax.engine.weights import DenseWeights
from dynajax.pool import DevicePool
from dynajax.programs import Programs
from hostcompute import HostPool, NumpyPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """Weights on both sides, and the two halves of every layer."""

    programs: Programs
    weights: DenseWeights
    store: HostStore
    pool: DevicePool
    host: HostPool | NumpyPool
    cold: ColdSide | ColdExperts
    layers: ThreadsRunner | MixtureLayers

    def units(self, layer: int) -> npt.NDArray:
        """A layer's neurons [F, P, 1, W]: the host's own, or a copy of the pool's where it has all of them."""
        if self.store.arenas:
            return self.store.arenas[layer]
        with self.pool.lock:
            bucket, parts = self.pool.bucket(layer), [np.asarray(part) for part in self.pool.parts(layer)]
        assert np.array_equal(bucket, np.arange(self.programs.shapes.spec.ffn)), "the pool has all, in order"
        units = np.stack(parts, axis=1)[:, :, None]
        return units.view(ml_dtypes.bfloat16) if self.programs.shapes.dtype == "bfloat16" else units
