"""What an engine is given instead of making it itself: weights that several share, and other ways, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynajax.bundles import HostStore
from dynajax.engine.cold import ColdSide
from dynajax.staging import Staging


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Nothing, unless said otherwise."""

    store: HostStore | None = None  # the units, if they are in host memory already; nobody changes them
    cold: Callable[..., ColdSide] = ColdSide  # makes what computes the neurons that are not in the pool
    around: Callable[[Staging], Staging] | None = None  # what the way that moving neurons take is put into
