"""Where tokens will go in a later layer, asked of that layer's own router while this one runs.

What it reads instead of its own input: see `predictors.routing`. Trained corrections come from a predictor folder;
without one the router reads this layer's input as it is, which is kind `gate`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.prediction import find_folder
from dynajax.errors import UsageError
from predictors.routing import Correction, load_corrections

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Foretellers:
    """One for every layer that has another one `lead` further on; numbers count the layers that have experts."""

    layers: MixtureLayers
    lead: int
    corrections: Mapping[int, tuple[jax.Array, jax.Array, jax.Array]]  # by the layer that is asked: shift, down, up
    kinds: Mapping[int, str]  # what each of them is

    @classmethod
    def load(
        cls,
        layers: MixtureLayers,
        kind: str,
        lead: int,
        folder: Path,  # the model's
        *,
        predictor: str = "auto",  # as `EngineConfig.predictor`
        fingerprint: str | None = None,
        asked: bool = False,
    ) -> Foretellers:
        """Those of a kind; see `corrections_folder`. UsageError: the folder has none of this lead."""
        count, hidden = len(layers.spec.unit_layers), layers.spec.hidden
        trained = corrections_folder(kind, folder, predictor, fingerprint, asked=asked)
        lead = max(1, lead)
        found = load_corrections(trained, kind, lead, count, hidden, fingerprint)
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
        """On the device."""
        return sum(array.nbytes for arrays in self.corrections.values() for array in arrays)


def corrections_folder(kind: str, folder: Path, predictor: str, fingerprint: str | None, *, asked: bool) -> Path | None:
    """The trained predictors that a kind of prefetch reads: --predictor PATH, those in the model's folder, or the
    cache's; None for `gate`, and where there are none: then routers are asked early, and one log line says so.

    UsageError: there are none, and the user asked for what cannot be had without (`asked`: --prefetch was given).
    """
    if predictor == "mlp":
        raise UsageError(
            "--predictor mlp is for neurons, and this model has experts: give auto, gate, none or a folder"
        )
    if kind == "gate":
        return None
    found = find_folder(predictor, folder, fingerprint)
    if found is None and asked and kind != "corrected":
        raise UsageError(
            f"--prefetch {kind} needs trained predictors, and this model has none: run scripts/train_predictors.py, or "
            "give --prefetch gate"
        )
    if found is None and predictor == "auto":
        log.warning("no predictors were trained for this model: its routers are asked early instead, which finds less "
                    "(scripts/train_predictors.py trains them)")  # fmt: skip
    return found
