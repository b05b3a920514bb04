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

from dynajax.config import ModelSpec
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
        trained = corrections_folder(kind, folder, predictor, fingerprint, asked=asked)
        found = corrections_of(layers.spec, kind, lead, trained, fingerprint)
        arrays = {m: tuple(jax.device_put(array) for array in each.arrays) for m, each in found.items()}
        return cls(layers, max(1, lead), arrays, {m: each.kind for m, each in found.items()})

    def target(self, m: int) -> int | None:
        """The layer whose experts layer m foretells; None for the last ones."""
        return m + self.lead if m in self.corrections else None

    def ids(self, m: int, h: jax.Array) -> jax.Array:
        """h [B, D], the input of layer m's experts -> experts of the target that its tokens may go to [B, K]."""
        shift, down, up = self.corrections[m]
        layer = self.layers.spec.unit_layers[m + self.lead]
        program = self.layers.programs.get("foretell", down.shape[0])
        return program(self.layers.weights.routing[layer], h, shift, down, up)


def corrections_of(
    spec: ModelSpec, kind: str, lead: int, trained: Path | None, fingerprint: str | None
) -> dict[int, Correction]:
    """Of every layer that has another one `lead` further on; without a trained one nothing is corrected."""
    count, lead = len(spec.unit_layers), max(1, lead)
    found = load_corrections(trained, kind, lead, count, spec.hidden, fingerprint)
    plain = Correction.none(spec.hidden)
    return {m: found.get(m, plain) for m in range(count - lead)}


def foretelling_bytes(spec: ModelSpec, kind: str, lead: int, trained: Path | None, fingerprint: str | None) -> int:
    """What they take on the device."""
    found = corrections_of(spec, kind, lead, trained, fingerprint)
    return sum(array.nbytes for each in found.values() for array in each.arrays)


def corrections_folder(
    kind: str, folder: Path, predictor: str, fingerprint: str | None, *, asked: bool, says: bool = True
) -> Path | None:
    """The trained predictors that a kind of prefetch reads: --predictor PATH, those in the model's folder, or the
    cache's; None for `gate`, and where there are none: then routers are asked early, and one log line says so.

    says: in the log. UsageError: there are none, and the user asked for what cannot be had without (`asked`:
    --prefetch was given).
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
    if found is None and predictor == "auto" and says:
        log.warning("no predictors were trained for this model: its routers are asked early instead, which finds less "
                    "(scripts/train_predictors.py trains them)")  # fmt: skip
    return found
