"""Every constant of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from dynajax.config.checks import check_number
from dynajax.errors import UsageError

SwapRule = Literal["gain", "paper"]
Ranking = Literal["score", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Every constant of a neuron policy; `--set NAME=VALUE` sets one. Paper symbols where the paper has them.

    Where the paper gives no value, the default is what `benchmarks/placement.py` found best on tiny-relullama.
    """

    lam: float = 0.7  # importance v = a + lam * f
    decay: float = 0.98  # of f per token, which so remembers 1 / (1 - decay) tokens
    lead: int = 1  # layers between a prediction and its use; the time a transfer hides behind; 0: none
    skip_lead: int = 0  # the same for the scores that decide which neurons are skipped
    skip_bits: int = 4  # of the low-bit gates that decide it where no predictors were trained
    place_bits: int = 4  # of those that steer placement; equal ones are the same copies
    window_s: float | None = None  # transfer time of a layer; None: the compute time of `lead` layers
    window_units: int | None = None  # at most so many swaps a layer
    keep_share: float = 0.1  # of the slots, which hold the residents of highest f and are not given up
    theta: float = 0.2  # probability from which a neuron counts as live
    density: float | None = None  # instead of theta: the share of neurons that counts as live
    err_scale: float = 1.0  # activation mass that thresholds may skip, in units of what theta skips
    ranking: Ranking = "score"  # a: the probability itself, or whether it reaches theta
    swap_rule: SwapRule = "gain"  # gain: a swap must save more time than it costs; paper: it must raise the total v
    safety: float = 0.8  # percentile of recent transfer costs that planning goes by
    deadline_s: float | None = None  # how long a layer waits for its plan; None: a quarter of its time
    sparse_prefill: bool = False  # skip neurons in the prompt too
    record_scores: bool = False
    # of experts; where no source is named, chosen with benchmarks/expert_cache.py
    expert_decay: float = 0.96  # of an expert's share of the traffic per step
    move_price: float = 0.2  # a swap must save so many times what moving an expert takes, while its score holds
    prefetch_price: float = 0.1  # what a prefetch must be expected to save, in times of moving an expert
    w_size: int = 4  # dali: steps of a window
    u_size: int = 1  # dali: swaps at its end
    ema_decay: float = 0.7  # ema: of the scores per step
    count_decay: float = 0.5  # of the workload that `count` predicts
    confidence: float = 0.5  # that a predicted expert is live, until it has been seen how often it is
    confidence_decay: float = 0.95  # of what was seen, per prediction

    def __post_init__(self) -> None:
        check_number("lam", self.lam, 0, 1e6)
        check_number("decay", self.decay, 0, 0.9999)
        check_number("lead", self.lead, 0, 1000, whole=True)
        check_number("skip_lead", self.skip_lead, 0, self.lead, whole=True)
        for name in ("skip_bits", "place_bits"):
            if getattr(self, name) not in (1, 2, 4, 8) or isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be 1, 2, 4 or 8, got {getattr(self, name)!r}")
        for name in ("window_s", "deadline_s"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, 1000)
        if self.window_units is not None:
            check_number("window_units", self.window_units, 0, 2**31, whole=True)
        if self.density is not None:
            check_number("density", self.density, 0, 1)
            if self.density == 0:
                raise UsageError("density must be > 0, got 0: policies that compute nothing have no use")
        for name in ("keep_share", "theta", "safety"):
            check_number(name, getattr(self, name), 0, 1)
        for name in ("expert_decay", "ema_decay", "count_decay", "confidence_decay"):
            check_number(name, getattr(self, name), 0, 0.9999)
        for name in ("move_price", "prefetch_price"):
            check_number(name, getattr(self, name), 0, 1e6)
        for name in ("w_size", "u_size"):
            check_number(name, getattr(self, name), 1, 2**31, whole=True)
        check_number("confidence", self.confidence, 0, 1)
        check_number("err_scale", self.err_scale, 0, 1000)
        for name, allowed in (("ranking", get_args(Ranking)), ("swap_rule", get_args(SwapRule))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("sparse_prefill", "record_scores"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, got {getattr(self, name)!r}")


def policy_from_settings(settings: Iterable[str]) -> PolicyConfig:
    """The PolicyConfig of `--set NAME=VALUE` arguments; of two for one name the last one holds.

    Example: ["lam=2", "window_units=none", "sparse_prefill=true"].
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise UsageError(f"--set takes NAME=VALUE, got {setting!r}")
        values[name] = _typed(text, isinstance(_DEFAULTS.get(name), str))
    return policy_from_values(values)


def policy_from_values(values: Mapping[str, Any]) -> PolicyConfig:
    """The PolicyConfig with these constants; UsageError for a name that it does not have."""
    if unknown := [name for name in values if name not in _DEFAULTS]:
        raise UsageError(f"--set knows no {unknown[0]!r}, only {', '.join(_DEFAULTS)}")
    return PolicyConfig(**values)


_DEFAULTS = {field.name: field.default for field in fields(PolicyConfig)}


def _typed(text: str, is_word: bool) -> Any:
    """A setting's value as the number, truth value, None or word that its text spells."""
    words = {"true": True, "false": False, "none": None}
    if is_word or text.lower() in words:
        return text if is_word else words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
