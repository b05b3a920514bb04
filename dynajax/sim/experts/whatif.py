"""Expert policies of the engine on what a mixture did or is drawn to do, on a machine and at a budget. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import numpy as np

from dynajax.budget import margin_bytes, pool_budget
from dynajax.config import ModelSpec, PolicyConfig, check_number, policy_from_settings
from dynajax.errors import MismatchError, UsageError
from dynajax.policy.experts.config import ExpertConfig, expert_config
from dynajax.policy.experts.presets import PRESETS, ExpertPolicy, place_experts
from dynajax.sim.experts.activity import MixtureActivity
from dynajax.sim.experts.bound import MixtureBound, bound_of
from dynajax.sim.experts.decode import simulate
from dynajax.sim.experts.shapes import MixtureWeights
from dynajax.sim.experts.systems import MixtureSystem, as_engine
from dynajax.sim.hardware import Hardware
from dynajax.sim.whatif import MOST_SETTINGS, sweep_words

BUFFERS = 2  # experts on their way through the device
BATCH = 128  # at most, of drawn rows
CONSTANTS = ("expert_decay", "lead", *(entry.name for entry in fields(ExpertConfig) if entry.name != "decay"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureSetup:
    """What stays the same while policies and their constants change."""

    name: str
    activity: MixtureActivity
    weights: MixtureWeights
    hardware: Hardware
    budget_bytes: int
    context: int  # tokens that there is a cache for, of each row
    engine: bool = False  # decisions are carried out in the order that the engine has today

    @property
    def fixed(self) -> float:
        """Bytes on the device beside the pool."""
        cache = self.weights.cache(self.context) * self.activity.batch
        return self.weights.dense + cache + BUFFERS * self.weights.unit

    @property
    def pool_bytes(self) -> int:
        """For experts; FitError if there is no room for the rest."""
        gpu = not self.hardware.shared
        pool_budget(self.budget_bytes, math.ceil(self.fixed), gpu=gpu)
        return max(0, int(self.budget_bytes - margin_bytes(self.budget_bytes, gpu=gpu) - self.fixed))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSetting:
    """The constants of one run."""

    config: PolicyConfig
    recall: float | None = None  # of what is foretold; None: as recorded, or the kind's usual one
    swept: Mapping[str, Any] = field(default_factory=dict)  # those of a sweep, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureAnswer:
    """What was simulated of a policy."""

    policy: str
    settings: Mapping[str, Any]  # those that were swept
    figures: Mapping[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """A row of `simulate.py --trace ... --json`."""
        return {"policy": self.policy, "settings": dict(self.settings), **self.figures}


def fitted(activity: MixtureActivity, spec: ModelSpec) -> MixtureActivity:
    """The activity of a model of that shape: where it has another number of layers, those of the same relative depth.

    MismatchError: its experts are others.
    """
    assert spec.experts is not None
    layers, units = activity.frequency.shape
    if (units, activity.top_k) != (spec.units, spec.experts.router.top_k):
        raise MismatchError(
            f"{activity.name} has {units} experts a layer, {activity.top_k} for a token, the model {spec.units} and "
            f"{spec.experts.router.top_k}: name with --model the one that it is of"
        )
    wanted = len(spec.unit_layers)
    if layers == wanted:
        return activity
    depth = np.arange(wanted) * layers // wanted
    runs = tuple(
        replace(
            run,
            steps=run.steps[:, depth],
            prompts=tuple(replace(prompt, counts=prompt.counts[depth]) for prompt in run.prompts),
            foretold=None if run.foretold is None else run.foretold[:, depth],
            expected=None if run.expected is None else run.expected[:, depth],
        )
        for run in activity.runs
    )
    return replace(activity, frequency=activity.frequency[depth], runs=runs)


def mixture_sweep(config: PolicyConfig, recall: float | None, text: str | None) -> list[MixtureSetting]:
    """Every combination of a sweep of constants, or of recall; the last name's values change first."""
    values = {name: [_typed(name, word) for word in words] for name, words in sweep_words(text).items()}
    if (count := math.prod(map(len, values.values()))) > MOST_SETTINGS:
        raise UsageError(f"--sweep must have at most {MOST_SETTINGS} combinations, got {count}")
    return [_setting(config, recall, dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]


def _typed(name: str, word: str) -> Any:
    if name == "recall":
        try:
            value = float(word)
        except ValueError:
            raise UsageError(f"--sweep: recall must be a number, got {word!r}") from None
        check_number("recall", value, 0, 1)
        return value
    if name not in CONSTANTS:
        raise UsageError(f"--sweep knows no {name!r} of experts, only recall, {', '.join(CONSTANTS)}")
    value = getattr(policy_from_settings([f"{name}={word}"]), name)
    if name == "lead":
        check_number("lead", value, 1, 1000, whole=True)
    return value


def _setting(config: PolicyConfig, recall: float | None, swept: dict[str, Any]) -> MixtureSetting:
    own = dict(swept)
    recall = own.pop("recall", recall)
    return MixtureSetting(config=replace(config, **own), recall=recall, swept=swept)


def mixture_bound(setup: MixtureSetup) -> MixtureBound:
    """What no policy can exceed with such a pool."""
    weights, activity = setup.weights, setup.activity
    slots = place_experts("equal", activity.frequency, int(weights.unit), setup.pool_bytes).slots
    return bound_of(weights.mixture_load(), setup.hardware, activity, slots)


def mixture_answers(
    setup: MixtureSetup,
    policies: Mapping[str, ExpertPolicy],
    settings: Sequence[MixtureSetting],
    bound: MixtureBound,
) -> Iterator[MixtureAnswer]:
    """Every policy at every setting."""
    for setting in settings:
        for name, policy in policies.items():
            yield _run(setup, name, policy, setting, bound)


def _run(
    setup: MixtureSetup, name: str, policy: ExpertPolicy, setting: MixtureSetting, bound: MixtureBound
) -> MixtureAnswer:
    """Under `auto` the engine's guard leaves experts where they are if that is faster; prompts are streamed anyway."""
    found = _figures(setup, policy, setting)
    if name == "auto":
        still = _figures(setup, PRESETS["static"], setting)
        if (still["decode_tok_s"] or 0.0) > (found["decode_tok_s"] or 0.0):
            found = still | {"prefill_tok_s": found["prefill_tok_s"]}
    speed = found.pop("decode_tok_s")
    assert speed is not None
    figures = {"decode_tok_s": speed, "share_of_bound": speed / bound.decode_tok_s, **found}
    return MixtureAnswer(policy=name, settings=setting.swept, figures=figures)


def _figures(setup: MixtureSetup, policy: ExpertPolicy, setting: MixtureSetting) -> dict[str, float | None]:
    """Of one policy."""
    weights, activity = setup.weights, setup.activity
    system = MixtureSystem(policy=policy, config=expert_config(setting.config), lead=max(1, setting.config.lead))
    if setup.engine:
        system = as_engine(system, weights.spec)
    placement = place_experts(policy.placement, activity.frequency, int(weights.unit), setup.pool_bytes)
    load = weights.mixture_load()
    tally = simulate(load, setup.hardware, system, activity, placement, recall=setting.recall)
    return tally.figures(weights.host_unit) | {"pool_share": placement.resident / activity.frequency.size}
