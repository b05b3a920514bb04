"""Policies of the engine on what a model did or is drawn to do, on a machine and at a budget. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from dynajax.budget import margin_bytes, pool_budget
from dynajax.config import (
    DTYPE_BYTES,
    ModelSpec,
    NeuronPolicy,
    PolicyConfig,
    check_number,
    check_share,
    policy_from_settings,
)
from dynajax.errors import FitError, UsageError
from dynajax.sim.activity import Activity
from dynajax.sim.compare import GATE_QUALITY, LEAST_CONTEXT, drawn
from dynajax.sim.decode import decode
from dynajax.sim.hardware import Hardware
from dynajax.sim.models import Weights
from dynajax.sim.published import PROMPT
from dynajax.sim.synthetic import Recipe, Scoring
from dynajax.sim.systems import bound_s, engine_system, gate_bytes, place

TOKENS = 64  # that are decoded of each drawn sequence
MOST_SETTINGS = 200
SCORED = ("dynamic", "macro+micro", "micro", "lru")  # policies that look at scores
UNSIMULATED = ("skip_lead", "density", "deadline_s", "sparse_prefill", "record_scores")  # constants that change nothing
BUSY = ("device", "host", "link")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """What stays the same while policies and their constants change."""

    name: str
    source: Activity | Recipe  # recorded; or drawn anew for every quality of scores
    weights: Weights
    hardware: Hardware
    budget_bytes: int
    context: int  # tokens that there is a cache for
    skips: bool  # neurons that score low are left out
    gate_first: bool  # the host reads up and down only where the gate is not zero

    @property
    def fixed(self) -> float:
        """Bytes on the device beside neurons and predictors."""
        return self.weights.dense + self.weights.cache(self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The constants of one run."""

    config: PolicyConfig
    rank: int | None = None  # of two-layer predictors, by which only their bytes change; None: low-bit gates
    quality: float | None = None  # of the scores, as correlation with the gate; None: that of low-bit gates
    swept: Mapping[str, Any] = field(default_factory=dict)  # those of a sweep, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was simulated of a policy."""

    policy: NeuronPolicy
    settings: Mapping[str, Any]  # those that were swept
    bound_tok_s: float  # that no policy can pass
    figures: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """A row of `simulate.py --trace ... --json`."""
        return {"policy": self.policy, "settings": dict(self.settings), **self.figures}


def weights_of(spec: ModelSpec, dtype: str, host_dtype: str) -> Weights:
    """The model at these precisions: auto as the engine has it, on the device the model's own, and on the host the
    device's, or the model's own where that is float32."""
    device = spec.dtype if dtype == "auto" else dtype
    host = host_dtype
    if host_dtype == "auto":
        host = spec.dtype if device == "float32" else device
    return Weights(spec=spec, dtype=device, host_dtype=host, kv_dtype=device if device in DTYPE_BYTES else "float16")


def budget_of(wanted: int | float | None, hardware: Hardware) -> int:
    """Bytes: all that a plan may use of the device, a share of it, or as many as wanted; FitError: there are fewer."""
    room = hardware.device_bytes - hardware.reserved_bytes
    if isinstance(wanted, int) and wanted > room:
        raise FitError(f"{hardware.name} has {room} bytes to plan with: lower --vram-budget {wanted}B")
    return room if wanted is None else wanted if isinstance(wanted, int) else int(wanted * room)


def context_of(source: Activity | Recipe, ctx: int | None) -> int:
    """Tokens of the cache; UsageError if the source has more."""
    runs = () if isinstance(source, Recipe) else source.runs
    needed = max((run.prompt_tokens + run.tokens for run in runs), default=PROMPT + TOKENS)
    if ctx is not None and ctx < needed:
        raise UsageError(f"--ctx must be at least the {needed} tokens of the trace, got {ctx}")
    return max(LEAST_CONTEXT, needed) if ctx is None else ctx


def sweep_of(config: PolicyConfig, text: str | None) -> list[Setting]:
    """Every combination of a sweep, the last name's values changing first. UsageError for what is no sweep.

    Example: "lam=0.3/1,lead=1/2" gives lam 0.3 with lead 1, lam 0.3 with lead 2, lam 1 with lead 1, ...
    """
    values = {name: [_typed(name, word) for word in words] for name, words in sweep_words(text).items()}
    count = math.prod(map(len, values.values()))
    if count > MOST_SETTINGS:
        raise UsageError(f"--sweep must have at most {MOST_SETTINGS} combinations, got {count}")
    return [_setting(config, dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]


def sweep_words(text: str | None) -> dict[str, list[str]]:
    """The values that a sweep names, by constant; UsageError for what is no sweep."""
    values: dict[str, list[str]] = {}
    for part in [] if text is None else text.split(","):
        name, equals, listed = (word.strip() for word in part.partition("="))
        words = [word.strip() for word in listed.split("/")]
        if not equals or not all(words) or name in values or len(set(words)) < len(words):
            raise UsageError(f"--sweep takes NAME=VALUE/VALUE/...,NAME=..., each name and value once, got {text!r}")
        values[name] = words
    return values


def _typed(name: str, word: str) -> Any:
    """A value of a sweep."""
    if name == "quality":
        check_share("quality", value := _number(name, word, float))
        return value
    if name == "rank":
        check_number("rank", value := _number(name, word, int), 1, 2**20, whole=True)
        return value
    if name not in (names := [entry.name for entry in fields(PolicyConfig) if entry.name not in UNSIMULATED]):
        raise UsageError(f"--sweep knows no {name!r}, only rank, quality, {', '.join(names)}")
    return getattr(policy_from_settings([f"{name}={word}"]), name)


def _number(name: str, word: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(word)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise UsageError(f"--sweep: {name} must be {what}, got {word!r}") from None


def _setting(config: PolicyConfig, swept: Mapping[str, Any]) -> Setting:
    own = dict(swept)
    rank, quality = own.pop("rank", None), own.pop("quality", None)
    return Setting(config=replace(config, **own), rank=rank, quality=quality, swept=swept)


def answers(setup: Setup, policies: Sequence[NeuronPolicy], settings: Sequence[Setting]) -> Iterator[Answer]:
    """Every policy at every setting. Before the first, FitError: the budget is too small for one of them."""
    _check(setup, settings)
    needed = max(setup.fixed + _Predictors.of(setup, policy, s).held for policy in policies for s in settings)
    pool_budget(setup.budget_bytes, math.ceil(needed), gpu=not setup.hardware.shared)
    bound = _bound_tok_s(setup, settings[0])
    for setting in settings:
        for policy in policies:
            yield _run(setup, policy, setting, bound)


def _check(setup: Setup, settings: Sequence[Setting]) -> None:
    """UsageError where scores of a quality are asked for that cannot be had."""
    for setting in settings:
        if not isinstance(setup.source, Recipe):
            if setting.quality is not None:
                raise UsageError("quality can be swept of synthetic traces only: recorded scores are as they are")
        elif setting.quality is None:
            for bits in (setting.config.skip_bits, setting.config.place_bits):
                if bits not in GATE_QUALITY:
                    known = ", ".join(map(str, GATE_QUALITY))
                    raise UsageError(f"how well gates of {bits} bits guess is not known, only of {known} bits")


def _bound_tok_s(setup: Setup, setting: Setting) -> float:
    """With perfect foresight, free moves, no overheads, and no memory for predictors."""
    weights, activity = setup.weights, _activity(setup, setting)
    slots = place(weights, activity, setup.budget_bytes - setup.fixed, "equal").slots
    return 1 / bound_s(weights.load(0.0, 0), setup.hardware, activity, slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictors:
    """Of a run: bytes of all layers that the device holds, bytes that a token reads, programs of a layer."""

    held: float
    read: float
    programs: int

    @classmethod
    def of(cls, setup: Setup, policy: NeuronPolicy, setting: Setting) -> _Predictors:
        """As the engine has them: one says what to skip, and one, `lead` layers ahead, what to bring in."""
        weights, config = setup.weights, setting.config
        known = isinstance(setup.source, Recipe) or any(run.place is not None for run in setup.source.runs)
        kinds = [config.skip_bits] if setup.skips else []
        if policy in SCORED and known and not (setup.skips and config.lead == 0):
            kinds.append(config.place_bits)
        if setting.rank is not None:
            size = weights.spec.layers * setting.rank * (weights.spec.hidden + weights.spec.ffn) * weights.bytes_of_one
            return cls(held=size * len(kinds), read=size * len(kinds), programs=len(kinds))
        sizes = {bits: gate_bytes(weights, bits) for bits in kinds}
        return cls(held=sum(sizes.values()), read=sum(sizes[bits] for bits in kinds), programs=len(kinds))


def _activity(setup: Setup, setting: Setting) -> Activity:
    """The recording, or what is drawn for scores of this quality, which fades with every layer that they look ahead."""
    if not isinstance(setup.source, Recipe):
        return setup.source
    recipe, config = setup.source, setting.config
    skip_rho = setting.quality or GATE_QUALITY[config.skip_bits]
    ahead = skip_rho if setup.skips and config.lead == 0 else setting.quality or GATE_QUALITY[config.place_bits]
    scoring = Scoring(place_rho=ahead * recipe.cosine**config.lead, skip_rho=skip_rho if setup.skips else None)
    return drawn(recipe, scoring, PROMPT, TOKENS)


def _run(setup: Setup, policy: NeuronPolicy, setting: Setting, bound: float) -> Answer:
    weights, activity = setup.weights, _activity(setup, setting)
    predictors = _Predictors.of(setup, policy, setting)
    system = engine_system(
        policy, setting.config, weights.spec.activation, skips=setup.skips, dense=not setup.gate_first
    )
    margin = margin_bytes(setup.budget_bytes, gpu=not setup.hardware.shared)
    room = 0.0 if policy == "none" else setup.budget_bytes - margin - setup.fixed - predictors.held
    planned = setup.skips or policy not in ("static", "none")
    placement = place(weights, activity, room, "equal" if planned else "static")
    load = weights.load(predictors.read / weights.spec.layers, predictors.programs)
    tally = decode(load, setup.hardware, system, activity, placement)
    found = tally.figures()
    figures = {
        "decode_tok_s": found["decode_tok_s"],
        "share_of_bound": found["decode_tok_s"] / bound,
        "pool_share": placement.resident / activity.frequency.size,
        **{name: found[name] for name in ("hot_share", "computed_hot_share", "cold_share", "recall")},
        "migrated_per_token": found["migrated_per_token"] * activity.stride,
        "late_plans": tally.late,
        **{f"busy_{lane}": found.get(f"busy_{lane}", 0.0) for lane in BUSY},
    }
    return Answer(policy=policy, settings=setting.swept, bound_tok_s=bound, figures=figures)
