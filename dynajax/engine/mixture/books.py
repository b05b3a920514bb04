"""What the layers of a mixture did while decoding, counted by layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]  # [M], of the layers that have experts
Seconds = npt.NDArray[np.float64]  # [M]


@dataclass(slots=True)
class Books:
    """Sums over decode steps. A pair is a token and one of its experts; live experts are those with any token."""

    steps: Counts
    rows: Counts
    pairs: Counts
    hit_pairs: Counts  # whose expert was on the device when it was asked for
    hot_pairs: Counts  # computed on the device
    live: Counts  # experts
    hits: Counts  # live experts that were on the device when they were asked for
    fetched: Counts  # experts brought in because this step needed them
    passed: Counts  # for this step alone, through a buffer
    swapped: Counts  # in the background, for later steps
    prefetched: Counts  # because the next step of the layer was predicted to need them
    useful: Counts  # prefetched ones that it needed
    late: Counts  # prefetched ones that it needed and that were still on their way
    foretold: Counts  # pairs that were predicted
    foretold_hits: Counts  # and came
    top1: Counts  # steps with an absent expert of which the predicted busiest is known
    top1_hits: Counts  # and no other absent one was busier
    moved_bytes: Counts
    host_s: Seconds  # measured
    judged: Counts  # steps of which the next four are known, by the cost model
    device_s: Seconds  # busy
    cold_s: Seconds  # the host's
    makespan_s: Seconds  # of both sides, as assigned
    best_s: Seconds  # the same of the best assignment

    @classmethod
    def empty(cls, layers: int) -> Books:
        made: dict[str, Any] = {
            f.name: np.zeros(layers, np.float64 if f.name.endswith("_s") else np.int64) for f in fields(cls)
        }
        return cls(**made)

    @property
    def loads(self) -> Counts:
        """Experts that came to the device, for whatever reason."""
        return self.fetched + self.passed + self.swapped + self.prefetched
