"""What is added to a layer's input before a later layer's router reads it: constants, and what training finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """h + shift + up (down h) stands in for the later layer's own input."""

    kind: str
    shift: F32  # [D]
    down: F32  # [r, D]
    up: F32  # [D, r]

    @classmethod
    def none(cls, hidden: int) -> Correction:
        """The input as it is: gate reuse."""
        empty = np.zeros((0, hidden), np.float32)
        return cls("gate", np.zeros(hidden, np.float32), empty, empty.T)

    @property
    def arrays(self) -> tuple[F32, F32, F32]:
        return self.shift, self.down, self.up


def load_corrections(folder: Path | None, kind: str, lead: int, layers: int, hidden: int) -> dict[int, Correction]:
    """Those of a folder for one lead, by the layer that is asked; {} for `gate`, which needs none."""
    return {}
