"""A mixture on a described machine, by every system: equal kernels, rates, pools and text. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dynajax.config import ModelSpec
from dynajax.plan import Placement
from dynajax.policy.experts.presets import place_experts
from dynajax.policy.experts.synthetic import RECIPES
from dynajax.sim.experts.activity import MixtureActivity, draw_mixture
from dynajax.sim.experts.bound import MixtureBound, bound_of
from dynajax.sim.experts.decode import simulate
from dynajax.sim.experts.shapes import MIXTURES, MixtureWeights
from dynajax.sim.experts.systems import RIVALS, MixtureSystem, as_engine
from dynajax.sim.hardware import Hardware

SHARE = 0.25  # of the experts on the device, or as many as fit
RECIPE = "repeating"  # of policy/experts/synthetic.py
BUFFERS = 2  # experts on their way through the device


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureJob:
    """What is simulated: a model at a precision on a machine, so many rows of drawn text."""

    model: str
    batch: int
    hardware: Hardware
    dtype: str = "bfloat16"
    share: float = SHARE
    recipe: str = RECIPE
    prompt: int = 64
    tokens: int = 64

    @property
    def spec(self) -> ModelSpec:
        return MIXTURES[self.model]

    @property
    def weights(self) -> MixtureWeights:
        return MixtureWeights(spec=self.spec, dtype=self.dtype, host_dtype=self.dtype, kv_dtype="bfloat16")

    @property
    def pool_bytes(self) -> int:
        """For experts: the share that is wanted, or what the card has left."""
        weights, hardware = self.weights, self.hardware
        cache = weights.cache(self.prompt + self.tokens) * self.batch
        room = hardware.device_bytes - hardware.reserved_bytes - weights.dense - cache - BUFFERS * weights.unit
        return max(0, int(min(self.share * weights.experts, room)))

    @property
    def activity(self) -> MixtureActivity:
        """Every system meets the same text."""
        return _drawn(self.model, self.recipe, self.batch, self.prompt, self.tokens)

    def place(self, kind: str) -> Placement:
        """Where experts start."""
        return place_experts(kind, self.activity.frequency, int(self.weights.unit), self.pool_bytes)


@lru_cache(maxsize=4)
def _drawn(model: str, recipe: str, batch: int, prompt: int, tokens: int) -> MixtureActivity:
    return draw_mixture(MIXTURES[model], RECIPES[recipe], model, batch=batch, prompt=prompt, steps=tokens)


STATIC = "ktransformers"  # what the guard of ours goes back to


def outcomes(job: MixtureJob, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Figures of systems by their names, which must hold STATIC where ours is among them.

    Of ours the guard leaves experts where they are if moving loses; prompts are streamed all the same.
    """
    found = {name: figures_of(job, system_of(job, name)) for name in names}
    for name in names:
        if name.startswith("ours") and speed(found[STATIC]) > speed(found[name]):
            found[name] = found[STATIC] | {"prefill_tok_s": found[name]["prefill_tok_s"]}
    return found


def system_of(job: MixtureJob, name: str) -> MixtureSystem:
    """One of RIVALS, or ours as the engine carries it out today."""
    return as_engine(RIVALS["ours"], job.spec) if name == "ours-engine" else RIVALS[name]


def figures_of(job: MixtureJob, system: MixtureSystem) -> dict[str, float | None]:
    """A system on a job."""
    load, placement = job.weights.mixture_load(), job.place(system.policy.placement)
    return simulate(load, job.hardware, system, job.activity, placement).figures(job.weights.host_unit)


def speed(figures: Mapping[str, Any]) -> float:
    """Tokens decoded a second, all rows together."""
    return float(figures["decode_tok_s"])


def bound(job: MixtureJob) -> MixtureBound:
    """What no system can exceed with such a pool."""
    return bound_of(job.weights.mixture_load(), job.hardware, job.activity, job.place("equal").slots)
