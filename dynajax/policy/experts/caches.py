"""Which experts a layer keeps on the device. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.records import F64, I32, Bools, ExpertCosts, Ints

_NONE = np.empty(0, np.int32)


class ExpertCache(Protocol):
    """Replacement over the fixed slots of every layer: it is told what was used, and says who is to go.

    A bucket [G] names the expert in each slot, -1 where a transfer speaks for it. No argument is changed.
    """

    def begin(self, prior: F64 | None) -> None:
        """A new sequence; prior [L, E]: the share of its layer's traffic that is expected of each expert, if known."""

    def observe(self, layer: int, tokens: Ints) -> None:
        """The layer has run; tokens [E] of each expert."""

    def victims(self, layer: int, bucket: I32, tokens: Ints) -> I32:
        """Slots that may be given up to absent experts of this step, first to last; none whose expert is live now."""
        ...

    def stays(self, layer: int, units: I32, experts: I32, tokens: Ints) -> Bools:
        """[n] whether units[j], fetched, is to take the slot of experts[j] where it could also pass through."""
        ...

    def swaps(self, layer: int, bucket: I32, absent: Bools, limit: int, costs: ExpertCosts) -> tuple[I32, I32]:
        """(units, slots): at most `limit` of the experts that are absent [E], worth bringing in though nobody waits."""
        ...


class DecayedCache:
    """The default: an exponentially decayed share of the traffic, and a swap only if it pays.

    Differs from DALI's window in four things: the score forgets slowly instead of at once, a newcomer must be strictly
    better, the difference must be worth a transfer, and a sequence starts from what is known of it. What is fetched
    passes through unless it is better than what it would replace; without a transit slot every idle resident may be
    given up to it, worst first: measured, what a fetch saves at once is worth more than the hits it costs.
    """

    def __init__(self, layers: int, experts: int, config: ExpertConfig) -> None:
        self._keep, self._price = config.decay, config.move_price
        self._score = np.zeros((layers, experts))
        self._traffic = np.zeros(layers)  # decayed activations per step

    def begin(self, prior: F64 | None) -> None:
        if prior is not None:
            self._score = np.array(prior, np.float64)

    def observe(self, layer: int, tokens: Ints) -> None:
        total = int(tokens.sum())
        if total == 0:
            return
        score, before = self._score[layer], float(self._traffic[layer])
        score *= self._keep
        score += tokens * ((1 - self._keep) / total)
        self._traffic[layer] = total if before == 0 else self._keep * before + (1 - self._keep) * total

    def victims(self, layer: int, bucket: I32, tokens: Ints) -> I32:
        return given_up(bucket, tokens, self._score[layer])

    def stays(self, layer: int, units: I32, experts: I32, tokens: Ints) -> Bools:
        """By the scores as this step will have made them."""
        score = self._score[layer]
        gained = tokens[units] * ((1 - self._keep) / max(int(tokens.sum()), 1))
        return self._keep * score[units] + gained > self._keep * score[experts]

    def swaps(self, layer: int, bucket: I32, absent: Bools, limit: int, costs: ExpertCosts) -> tuple[I32, I32]:
        """The best absent experts for the worst residents while the score strictly rises, and while

            (saved(new) - saved(old)) / (1 - decay) > move_price * copy_s,

        where saved is what a step is expected to spend less if an expert with u expected tokens is here: those come
        from independent rows, so it is live with probability 1 - exp(-u).
        """
        score = self._score[layer]
        units, slots = best_pairs(bucket, absent, score, limit)
        new, old = score[units], score[bucket[slots]]
        rises = self._saved_s(layer, new, costs) - self._saved_s(layer, old, costs)
        pays = (new > old) & (rises > self._price * (1 - self._keep) * costs.copy_s)
        count = len(pays) if pays.all() else int(pays.argmin())
        return units[:count], slots[:count]

    def _saved_s(self, layer: int, share: F64, costs: ExpertCosts) -> F64:
        expected = share * self._traffic[layer]
        saved_s = -np.expm1(-expected) * (costs.cpu_s - costs.gpu_s)
        return saved_s + expected * (costs.cpu_token_s - costs.gpu_token_s)


class DaliCache:
    """DALI's window (arXiv 2602.03495, section 4.3, Algorithm 2, by its port): workloads are summed over w_size steps,
    then the u_size best absent experts replace the worst residents; the sums start anew, as with a new sequence.

    As ported, nothing checks that a newcomer is better. Within a window the least used go first if a fetch needs room.
    """

    def __init__(self, layers: int, experts: int, config: ExpertConfig) -> None:
        self._window, self._count = config.w_size, config.u_size
        self._sum = np.zeros((layers, experts), np.int64)
        self._steps = np.zeros(layers, np.int64)

    def begin(self, prior: F64 | None) -> None:
        self._sum[:] = 0
        self._steps[:] = 0

    def observe(self, layer: int, tokens: Ints) -> None:
        if self._steps[layer] == self._window:  # nobody asked at the window's end
            self._restart(layer)
        self._sum[layer] += tokens
        self._steps[layer] += 1

    def victims(self, layer: int, bucket: I32, tokens: Ints) -> I32:
        return given_up(bucket, tokens, self._sum[layer])

    def stays(self, layer: int, units: I32, experts: I32, tokens: Ints) -> Bools:
        return np.zeros(len(units), np.bool_)  # only windows change its cache

    def swaps(self, layer: int, bucket: I32, absent: Bools, limit: int, costs: ExpertCosts) -> tuple[I32, I32]:
        if self._steps[layer] < self._window:
            return _NONE, _NONE
        pairs = best_pairs(bucket, absent, self._sum[layer], min(limit, self._count))
        self._restart(layer)
        return pairs

    def _restart(self, layer: int) -> None:
        self._sum[layer] = 0
        self._steps[layer] = 0


class RankedCache:
    """Moves nothing unasked; gives up first what ranks lowest. `rank` updates a layer's row [E] after a step:
    (row, tokens [E], how many steps the layer has run)."""

    def __init__(self, layers: int, experts: int, rank: Callable[[F64, Ints, int], None]) -> None:
        self._row = np.zeros((layers, experts))
        self._steps = np.zeros(layers, np.int64)
        self._rank = rank

    def begin(self, prior: F64 | None) -> None:
        """What was ranked stays: the slots hold it."""

    def observe(self, layer: int, tokens: Ints) -> None:
        self._steps[layer] += 1
        self._rank(self._row[layer], tokens, int(self._steps[layer]))

    def victims(self, layer: int, bucket: I32, tokens: Ints) -> I32:
        return given_up(bucket, tokens, self._row[layer])

    def stays(self, layer: int, units: I32, experts: I32, tokens: Ints) -> Bools:
        return np.ones(len(units), np.bool_)

    def swaps(self, layer: int, bucket: I32, absent: Bools, limit: int, costs: ExpertCosts) -> tuple[I32, I32]:
        return _NONE, _NONE


class StaticCache:
    """Nothing comes and nothing goes: KTransformers' and llama.cpp's placement."""

    def begin(self, prior: F64 | None) -> None:
        """Nothing to do."""

    def observe(self, layer: int, tokens: Ints) -> None:
        """Nothing to do."""

    def victims(self, layer: int, bucket: I32, tokens: Ints) -> I32:
        return _NONE

    def stays(self, layer: int, units: I32, experts: I32, tokens: Ints) -> Bools:
        return np.zeros(len(units), np.bool_)

    def swaps(self, layer: int, bucket: I32, absent: Bools, limit: int, costs: ExpertCosts) -> tuple[I32, I32]:
        return _NONE, _NONE


def lru(layers: int, experts: int, config: ExpertConfig) -> RankedCache:
    """Least recently used goes first (mixtral-offloading, FreeToken)."""

    def rank(row: F64, tokens: Ints, step: int) -> None:
        row[tokens > 0] = step

    return RankedCache(layers, experts, rank)


def lfu(layers: int, experts: int, config: ExpertConfig) -> RankedCache:
    """Least often used goes first; a step counts once, however many tokens it has."""

    def rank(row: F64, tokens: Ints, step: int) -> None:
        row += tokens > 0

    return RankedCache(layers, experts, rank)


def ema(layers: int, experts: int, config: ExpertConfig) -> RankedCache:
    """Lowest moving average goes first: HybriMoE's (arXiv 2504.05897) is of gate scores, of which a planner knows
    nothing; here it is of the share of the traffic. Its constant was not found."""

    def rank(row: F64, tokens: Ints, step: int) -> None:
        row *= config.ema_decay
        row += tokens * ((1 - config.ema_decay) / max(int(tokens.sum()), 1))

    return RankedCache(layers, experts, rank)


def _static(layers: int, experts: int, config: ExpertConfig) -> StaticCache:
    return StaticCache()


CACHES: Mapping[str, Callable[[int, int, ExpertConfig], ExpertCache]] = MappingProxyType(
    {"decayed": DecayedCache, "dali": DaliCache, "lru": lru, "lfu": lfu, "ema": ema, "static": _static}
)


def given_up(bucket: I32, tokens: Ints, value: npt.NDArray[Any]) -> I32:
    """Slots whose expert is not live, by rising value [E] of the expert, equal ones by slot.

    Example: bucket [4, 7, 2], tokens only for 7, values 4: 0.3 and 2: 0.1: slots 2 and 0.
    """
    slots = ((bucket >= 0) & (tokens[bucket] == 0)).nonzero()[0]
    return slots[value[bucket[slots]].argsort(kind="stable")].astype(np.int32)


def best_pairs(bucket: I32, absent: Bools, value: npt.NDArray[Any], limit: int) -> tuple[I32, I32]:
    """(units, slots): the absent experts of highest value, equal ones by id, and the slots of lowest, equal ones by
    slot; at most `limit`. Example: bucket [4, 7], absent 1 and 2, values 1: 0.5, 2: 0.9, 4: 0, 7: 1, limit 1: (2, 0).
    """
    slots = np.flatnonzero(bucket >= 0)
    units = np.flatnonzero(absent)
    count = min(limit, len(slots), len(units))
    slots = slots[np.argsort(value[bucket[slots]], kind="stable")[:count]]
    units = units[np.argsort(-value[units], kind="stable")[:count]]
    return units.astype(np.int32), slots.astype(np.int32)
