"""From logits to a token, in NumPy on the host: the same choice on every device for the same seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynajax.config import check_number
from dynajax.errors import NumericalError, UsageError

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
BOUNDS = (("top_k", 0, 2**31), ("top_p", 1e-9, 1), ("min_p", 0, 1), ("repetition_penalty", 1e-3, 1e3))


class Rules(NamedTuple):
    """How the next token is chosen; the defaults switch everything off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 switch that
    off. None: off when greedy; when sampling what the model's generation_config.json advises, or off."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def rules(self, advice: Mapping[str, Any] | None = None) -> Rules:
        """These settings with every None filled; `advice`: values of generation_config.json."""
        mine = {name: value for name in Rules._fields if (value := getattr(self, name)) is not None}
        theirs = {k: v for k, v in (advice or {}).items() if k in Rules._fields} if self.temperature > 0 else {}
        return Rules(**theirs | mine)

    def __post_init__(self) -> None:
        check_number("max_new_tokens", self.max_new_tokens, 0, 2**31, whole=True)
        check_number("temperature", self.temperature, 0, 1e4)
        for name, low, high in (
            ("top_k", 0, 2**31),
            ("top_p", 1e-9, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 1e-3, 1e3),
        ):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, low, high, whole=name == "top_k")
        if self.seed is not None:
            check_number("seed", self.seed, 0, 2**63, whole=True)
        if isinstance(self.stop, str) or len(self.stop) > MAX_STOPS or not all(map(_may_stop, self.stop)):
            raise UsageError(f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")


def _may_stop(stop: object) -> bool:
    return isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH


class Sampler:
    """Chooses the tokens of one sequence; owns its random state, so rows never disturb each other.

    known: bool [V], ids that may be chosen; None: all.
    """

    def __init__(
        self,
        rules: Rules,
        seed: int,
        prompt: npt.NDArray[np.int32],
        known: npt.NDArray[np.bool_] | None = None,
    ):
        self._rules = rules
        self._unknown = None if known is None or known.all() else np.flatnonzero(~known)
        self._rng = np.random.default_rng(seed)
        self._seen = list(dict.fromkeys(prompt.tolist()))

    def __call__(self, logits: npt.NDArray[np.float32]) -> int:
        """logits [V] -> token id; remembers it for the repetition penalty."""
        if not np.isfinite(logits).all():
            raise NumericalError("logits are not finite: the weights hold NaN or the chosen dtype overflows")
        rules = self._rules
        if self._unknown is not None:
            logits = logits.copy()
            logits[self._unknown] = -np.inf
        if rules.repetition_penalty != 1.0:
            logits = penalise(logits, self._seen, rules.repetition_penalty)
        if rules.temperature == 0:
            token = int(logits.argmax())
        else:
            probs = filtered_probs(logits, rules)
            token = int(np.searchsorted(np.cumsum(probs), self._rng.random() * probs.sum(), side="right"))
            token = min(token, int(np.flatnonzero(probs)[-1]))  # a rounded-up cumulative sum must not pick a zero
        if rules.repetition_penalty != 1.0 and token not in self._seen:
            self._seen.append(token)
        return token


def penalise(logits: npt.NDArray[np.float32], seen: list[int], penalty: float) -> npt.NDArray[np.float32]:
    """Divide positive and multiply negative logits of seen tokens by `penalty` (CTRL, Keskar et al. 2019)."""
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def filtered_probs(logits: npt.NDArray[np.float32], rules: Rules) -> npt.NDArray[np.float64]:
    """Probabilities [V] after temperature, then top-k, top-p and min-p; each keeps the most likely token.

    top-p keeps the smallest set whose probability reaches p; min-p what has at least min_p times the
    largest probability. The result is not renormalised after the filters.
    """
    below = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # next to no temperature: everything but the largest goes to exp(-inf) = 0
        probs = np.exp(below / rules.temperature)
    probs /= probs.sum()
    if 0 < rules.top_k < len(probs):
        keep = np.argpartition(-probs, rules.top_k - 1)[: rules.top_k]
        probs = _only(probs, keep)
    if rules.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        total = np.cumsum(probs[order])
        probs = _only(probs, order[: int(np.searchsorted(total, rules.top_p * total[-1])) + 1])
    if rules.min_p > 0:
        probs = np.where(probs >= rules.min_p * probs.max(), probs, 0.0)
    return probs


def _only(probs: npt.NDArray[np.float64], keep: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    kept = np.zeros_like(probs)
    kept[keep] = probs[keep]
    return kept
