"""What is loaded once a model is open, and what computes with it."""

from __future__ import annotations

from dataclasses import dataclass

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
