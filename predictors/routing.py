"""What is added to a layer's input before a later layer's router reads it: constants, and what training finds.

With h the input of a layer's experts and r the mean difference between that of a later layer and h:

    gate           h                           the later router asked early (AdapMoE, mixtral-offloading)
    residual       h + r                       DALI (arXiv 2602.03495): gate(h + r)
    residual-mean  h - mean(h)                 DALI as its press summary words it
    corrected      h + s + up relu(down h)     ours: s and the two matrices are trained against the frozen later router
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.wording import located
from dynajax.errors import UsageError
from dynajax.ops.linear import contract
from predictors.routing_folder import RoutingManifest, read_routing

F32 = npt.NDArray[np.float32]
KINDS = ("corrected", "residual", "residual-mean", "gate")
LAST = 0.7


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """h + shift + up relu(down h) stands in for the later layer's own input."""

    kind: str
    shift: F32  # [D]
    down: F32  # [r, D]
    up: F32  # [D, r]

    @classmethod
    def none(cls, hidden: int) -> Correction:
        """The input as it is: gate reuse."""
        return cls.shifted("gate", np.zeros(hidden, np.float32))

    @classmethod
    def shifted(cls, kind: str, shift: F32) -> Correction:
        """A constant vector alone."""
        empty = np.zeros((0, len(shift)), np.float32)
        return cls(kind, shift, empty, empty.T)

    @property
    def arrays(self) -> tuple[F32, F32, F32]:
        return self.shift, self.down, self.up


def corrected(h: jax.Array, shift: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
    """h [T, D] with a correction (shift [D], down [r, D], up [D, r]) -> [T, D] float32; training uses it, too."""
    guess = h.astype(jnp.float32) + shift[None, :]
    if not down.shape[0]:
        return guess
    return guess + contract("TR,DR->TD", jax.nn.relu(contract("TD,RD->TR", h, down)), up)


def choice_weights(places: int) -> npt.NDArray[np.float64]:
    """What a token counts at each of the experts that it is expected to go to [K], best first: 1 at the first, LAST at
    the last, for routers that are asked early err in their last choices."""
    return np.linspace(1.0, LAST, places)


def expected_tokens(ids: npt.NDArray[np.integer], experts: int) -> npt.NDArray[np.float64]:
    """Tokens that every expert may expect [E], given those that each token's router may choose, ids [T, K], best first.

    Whole counts would leave a single token without a busiest expert. Example: ids [[3, 1]] of 4 -> 0, 0.7, 0, 1.
    """
    weights = np.broadcast_to(choice_weights(ids.shape[1]), ids.shape)
    return np.bincount(ids.ravel(), weights.ravel(), minlength=experts).astype(np.float64)


def load_corrections(
    folder: Path | None, kind: str, lead: int, layers: int, hidden: int, fingerprint: str | None = None
) -> dict[int, Correction]:
    """Those of a folder for one lead, by the layer that is asked; numbers count the layers that have experts.

    `corrected` is what was best on held-out tokens, whichever kind that is (`Correction.kind`). {} for `gate`, which
    needs no folder, and without one. MismatchError: another model's. UsageError: no such lead was trained.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if folder is None or kind == "gate":
        return {}
    manifest, tree = read_routing(folder, fingerprint=fingerprint, layers=layers, hidden=hidden)
    if not 1 <= lead <= manifest.lead:
        raise UsageError(
            f"{located(folder)} looks 1 to {manifest.lead} layers ahead, not {lead}: run scripts/train_predictors.py "
            f"with --lead {lead}, or give --set lead={manifest.lead}"
        )
    return corrections_of(manifest, tree, kind, lead)


def corrections_of(manifest: RoutingManifest, tree: dict[str, Any], kind: str, lead: int) -> dict[int, Correction]:
    """The same of a folder's arrays."""
    means, found = tree["means"]["hidden"], {}
    for entry in manifest.entries:
        if entry.lead != lead:
            continue
        asked, chosen = entry.asked, entry.kind if kind == "corrected" else kind
        if chosen == "corrected":
            arrays = (np.asarray(tree[entry.key][name], np.float32) for name in ("shift", "down", "up"))
            found[asked] = Correction(chosen, *arrays)
        else:
            found[asked] = Correction.shifted(chosen, shift_of(chosen, means, asked, lead))
    return found


def shift_of(kind: str, means: npt.NDArray, asked: int, lead: int) -> F32:
    """The constant of a kind that has nothing else [D]; means [M, D] of every layer's input."""
    if kind == "residual":
        return (means[asked + lead] - means[asked]).astype(np.float32)
    return -means[asked].astype(np.float32) if kind == "residual-mean" else np.zeros(means.shape[1], np.float32)
