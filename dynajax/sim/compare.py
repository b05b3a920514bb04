"""A published model on a described machine, by every system that is compared. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from dynajax.config import PolicyConfig
from dynajax.sim.activity import Activity
from dynajax.sim.decode import decode
from dynajax.sim.hardware import Hardware
from dynajax.sim.models import SPECS, Weights
from dynajax.sim.published import PROMPT
from dynajax.sim.records import System, Tally
from dynajax.sim.rivals import llama_cpp_s, transformers_s
from dynajax.sim.synthetic import RECIPES, Recipe, Scoring, make_activity, mlp_quality
from dynajax.sim.systems import DYNAMICINFER, OURS, POWERINFER, bound_s, gate_bytes, mlp_bytes, place, pool_bytes

SystemName = Literal["transformers", "llama.cpp", "powerinfer", "powerinfer-repaired", "dynamicinfer", "ours", "bound"]
SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)
WIDTH = 2000  # neurons of a layer that are drawn, about
SEQUENCES = 2
THETA = PolicyConfig().theta  # stands for: the threshold that gives the published recall
LEAST_CONTEXT = 512  # tokens that a cache is made for
# How well low-bit gates know who is live, as correlations with the gate: those that give the recalls of
# docs/predictors.md (layers 2 to 7, as many predicted as are live: 68, 84 and 96 %) at a density of 0.1.
GATE_QUALITY = {1: 0.894, 2: 0.974, 4: 0.998}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is simulated: a model at a precision on a machine, some tokens of it."""

    model: str
    dtype: str
    hardware: Hardware
    prompt: int = PROMPT
    tokens: int = 64
    assumed: Recipe | None = None  # instead of the model's own

    @property
    def recipe(self) -> Recipe:
        return self.assumed or RECIPES[self.model]

    @property
    def weights(self) -> Weights:
        return Weights(spec=SPECS[self.model], dtype=self.dtype, host_dtype=self.dtype)

    @property
    def context(self) -> int:
        return max(LEAST_CONTEXT, self.prompt + self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One system's; None where a figure does not apply."""

    tok_s: float
    tally: Tally | None = None
    pool_share: float | None = None  # of all neurons, those that the device holds
    device_bytes: float | None = None
    host_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What a system that places neurons is made of."""

    system: System
    bits: int | None = None  # of low-bit gates; None: trained predictors of the paper's kind
    placement: Literal["static", "equal", "shipped"] = "static"


def simulate(job: Job, name: SystemName, *, steps: int = 4, **changes: Any) -> Outcome:
    """A system on a job.

    changes: constants of its policy, its policy, `placement` or `copies`, for sweeps and ablations. steps: of `ours`,
    how many of the differences to PowerInfer repaired are there: one hand-over, gate first, low-bit gates, policy.
    """
    weights, middle = job.weights, job.prompt + job.tokens // 2
    if name == "transformers":
        return Outcome(tok_s=1 / transformers_s(weights, job.hardware.for_system(name), middle))
    if name == "llama.cpp":
        return Outcome(tok_s=1 / llama_cpp_s(weights, job.hardware.for_system(name), middle))
    if name == "bound":
        return _bound(job)
    designs = _ours(job, steps) if name == "ours" else [_published(name)]
    return max((_run(job, _changed(design, changes)) for design in designs), key=lambda outcome: outcome.tok_s)


def _published(name: SystemName) -> Design:
    """PowerInfer as released and with its placement repaired, and DynamicInfer as described."""
    if name == "dynamicinfer":
        return Design(system=DYNAMICINFER)
    return Design(system=POWERINFER, placement="shipped" if name == "powerinfer" else "static")


def _ours(job: Job, steps: int) -> list[Design]:
    """The engine's predictors are chosen by what they are worth, as its `auto` would: of 4-bit weights a 4-bit copy of
    the gates would be a third of all."""
    system = replace(POWERINFER, merges=OURS.merges)
    if steps >= 2:
        system = replace(system, gate_first=OURS.gate_first)
    if steps == 4:
        system = OURS
    bits = (None, 1, 2) if job.dtype == "int4" else (4,)
    designs = [Design(system=system, bits=count) for count in (bits if steps >= 3 else (None,))]
    if steps == 4:  # and where moving loses, the guard leaves neurons where they are
        designs += [replace(design, system=replace(OURS, policy="static")) for design in designs]
    return designs


def _changed(design: Design, changes: Mapping[str, Any]) -> Design:
    """The design with other constants."""
    own, system = dict(changes), design.system
    parts = {name: own.pop(name) for name in ("policy", "copies") if name in own}
    placement = own.pop("placement", design.placement)
    system = replace(system, config=replace(system.config, **own), **parts)
    return replace(design, system=system, placement=placement)


def _run(job: Job, design: Design) -> Outcome:
    """Decode with what the device has room for."""
    weights, hardware, system, recipe = job.weights, job.hardware.for_system("powerinfer"), design.system, job.recipe
    if design.bits is None:
        rho, theta = quality(recipe)
        place_rho, predictors, programs = rho, mlp_bytes(weights), 1
        if system.config.theta == THETA:
            system = replace(system, config=replace(system.config, theta=theta))
    else:  # skips at lead 0, places at the lead
        rho, predictors, programs = GATE_QUALITY[design.bits], gate_bytes(weights, design.bits), 2
        place_rho = rho * recipe.cosine**system.config.lead
    pool = pool_bytes(weights, hardware, job.context, predictors)
    activity = drawn(recipe, Scoring(place_rho=place_rho, skip_rho=rho), job.prompt, job.tokens)
    load = weights.load(programs * predictors / weights.spec.layers, programs)
    placement = place(weights, activity, pool, design.placement)
    tally = decode(load, hardware, system, activity, placement)
    held = placement.resident * activity.stride * weights.unit
    fixed = hardware.reserved_bytes + weights.dense + weights.cache(job.context) + predictors
    return Outcome(
        tok_s=tally.tokens / tally.seconds,
        tally=tally,
        pool_share=held / weights.neurons,
        device_bytes=fixed + held,
        host_bytes=weights.neurons + weights.head,
    )


def _bound(job: Job) -> Outcome:
    """Perfect foresight, free moves, no overheads, and no memory for predictors."""
    weights, hardware = job.weights, job.hardware.for_system("powerinfer")
    rho, _ = quality(job.recipe)  # whatever is predicted, the text is the same
    activity = drawn(job.recipe, Scoring(place_rho=rho, skip_rho=rho), job.prompt, job.tokens)
    pool = pool_bytes(weights, hardware, job.context, 0.0)
    slots = place(weights, activity, pool, "equal").slots
    load = weights.load(0.0, 0)
    return Outcome(tok_s=1 / bound_s(load, hardware, activity, slots), pool_share=pool / weights.neurons)


@lru_cache
def quality(recipe: Recipe) -> tuple[float, float]:
    """See synthetic.mlp_quality."""
    return mlp_quality(recipe)


@lru_cache(maxsize=6)
def drawn(recipe: Recipe, scoring: Scoring, prompt: int, tokens: int) -> Activity:
    """The activity of a job: every system meets the same text."""
    stride = max(1, round(recipe.ffn / WIDTH))
    return make_activity(recipe, scoring, stride=stride, sequences=SEQUENCES, prompt=prompt, tokens=tokens)
