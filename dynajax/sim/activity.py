"""What a simulated model does: who is live in every token, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.errors import MismatchError
from dynajax.trace import DECODE, PREFILL, Trace

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A prompt, as far as placement cares, and T tokens that were decoded after it."""

    prompt_tokens: int
    prompt_counts: npt.NDArray[np.int32]  # [L, F] tokens of the prompt for which each neuron was live
    live: Bools  # [T, L, F]
    place: U8 | None  # [T, L, F] what the layer's plan goes by that is asked for in this token; None: nothing is known
    placed: Bools  # [T, L] where there is such a score
    skip: U8 | None  # [T, L, F] what the layer itself says of its own neurons; None: none is skipped

    @property
    def tokens(self) -> int:
        return len(self.live)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activity:
    """Runs of one model, one after the other. A neuron here stands for `stride` of the model's."""

    name: str
    synthetic: bool
    frequency: F32  # [L, F] share of tokens of other text for which each neuron is live
    mass: F32 | None  # [L, F] mean contribution where it is live; None: unknown
    runs: tuple[Run, ...]
    stride: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """L and F."""
        layers, units = self.frequency.shape
        return layers, units


def from_trace(trace: Trace, name: str) -> Activity:
    """A recording as it was, its decoded tokens by generation; only row 0 of a batch.

    Frequencies are those of the recording itself, half a token added either way. MismatchError if nothing was decoded.
    """
    layers, units = trace.head.layers, trace.head.width
    live = np.unpackbits(trace.live, axis=2, count=units).view(np.bool_)
    runs = []
    for generation in np.unique(trace.generation):
        mine = (trace.generation == generation) & (trace.row == 0)
        prompt, decoded = mine & (trace.phase == PREFILL), mine & (trace.phase == DECODE)
        if not decoded.any():
            continue
        scores = None if trace.score is None else trace.score[decoded]
        placed = np.zeros((int(decoded.sum()), layers), np.bool_) if trace.scored is None else trace.scored[decoded]
        counts = live[prompt].sum(axis=0, dtype=np.int32)
        runs.append(
            Run(
                prompt_tokens=int(prompt.sum()),
                prompt_counts=counts,
                live=live[decoded],
                place=scores,
                placed=placed,
                skip=None if trace.skip is None else trace.skip[decoded],
            )
        )
    if not runs:
        raise MismatchError(f"{name} holds no decoded token: record a run of generate")
    frequency = ((live.sum(axis=0) + 0.5) / (len(live) + 1)).astype(np.float32)
    return Activity(name=name, synthetic=False, frequency=frequency, mass=None, runs=tuple(runs))
