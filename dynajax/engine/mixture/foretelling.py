"""Where tokens will go in a later layer, asked of that layer's own router while this one runs.

gate: the router reads this layer's input as if it were its own. residual: plus a constant vector, the mean of the
difference of the two (DALI, arXiv 2602.03495: gate(h + r)). residual-mean: minus the mean of this layer's input, as the
press summary of DALI words it. corrected: plus a vector and a low-rank map of h, trained with optax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from dynajax.engine.mixture.layers import MixtureLayers
from predictors.routing import Correction, load_corrections


@dataclass(frozen=True, slots=True, eq=False)
class Foretellers:
    """One for every layer that has another one `lead` further on; numbers count the layers that have experts."""

    layers: MixtureLayers
    lead: int
    corrections: Mapping[int, tuple[jax.Array, jax.Array, jax.Array]]  # by the layer that is asked: shift, down, up
    kinds: Mapping[int, str]  # what each of them is

    @classmethod
    def load(cls, layers: MixtureLayers, kind: str, lead: int, folder: Path | None) -> Foretellers:
        """Those of a predictor folder; `gate` needs none."""
        count, hidden = len(layers.spec.unit_layers), layers.spec.hidden
        lead = max(1, lead)
        found = load_corrections(folder, kind, lead, count, hidden)
        plain = Correction.none(hidden)
        arrays = {m: tuple(jax.device_put(array) for array in found.get(m, plain).arrays) for m in range(count - lead)}
        return cls(layers, lead, arrays, {m: found[m].kind if m in found else "gate" for m in arrays})

    def target(self, m: int) -> int | None:
        """The layer whose experts layer m foretells; None for the last ones."""
        return m + self.lead if m in self.corrections else None

    def ids(self, m: int, h: jax.Array) -> jax.Array:
        """h [B, D], the input of layer m's experts -> experts of the target that its tokens may go to [B, K]."""
        shift, down, up = self.corrections[m]
        layer = self.layers.spec.unit_layers[m + self.lead]
        program = self.layers.programs.get("foretell", down.shape[0])
        return program(self.layers.weights.routing[layer], h, shift, down, up)

    @property
    def nbytes(self) -> int:
        return sum(np.asarray(array).nbytes for arrays in self.corrections.values() for array in arrays)
