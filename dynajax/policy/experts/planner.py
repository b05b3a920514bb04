"""What the experts of every layer do in one step: the state that engine and simulator drive. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.policy.experts.assign import ASSIGN
from dynajax.policy.experts.caches import CACHES
from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.prefetch import choose_prefetch, heaviest_absent, predicted_tokens
from dynajax.policy.experts.presets import ExpertPolicy
from dynajax.policy.experts.records import F64, I32, Bools, ExpertCosts, Ints, Work

PATIENCE, RARELY = 8, 32  # see `ExpertPlanner.asks`
RESIDENT, ABSENT, COMING, LEAVING = range(4)  # where an expert is; the last two until its transfer is reported
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LayerSwaps:
    """`units[j]` is to come into `slots[j]`, whose expert is given up at once."""

    units: I32  # [n]
    slots: I32  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Who computes a layer's live experts: every one of them stands in exactly one of `hot`, `cold` and `units`.

    `units[j]` comes into `slots[j]`, in this order, and is computed on the device as soon as it is there; slot -1: it
    passes through a transit slot, which is free again once it has been computed, and nothing is pending for it.
    """

    hot: I32  # computed on the device, where they are
    cold: I32  # computed on the host
    units: I32  # [n] fetched, and computed on the device
    slots: I32  # [n]
    work: Work  # what was decided on: the live experts that are not on their way
    on_gpu: Bools  # [A] how


class ExpertPlanner:
    """Which experts of each layer are where, and what should move next.

    Every transfer ends with `applied` or `dropped`, all of a plan or a part, in any order and however late. Until then
    the expert that comes and the one whose slot it takes are neither resident nor to be fetched: the host computes
    them. One thread calls all methods; `observe` follows `plan_step`, layer by layer.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        policy: ExpertPolicy,
        config: ExpertConfig,
        buckets: Sequence[npt.NDArray[np.integer]],  # L arrays [G]: the expert in each slot
        frequency: npt.NDArray[np.floating] | None = None,  # [L, E] share of tokens that choose it, from statistics
    ) -> None:
        if len(buckets) != layers:
            raise ValueError(f"buckets must be {layers} arrays, one for each layer, got {len(buckets)}")
        if frequency is not None and frequency.shape != (layers, experts):
            raise ValueError(f"frequency must have shape {(layers, experts)}, got {frequency.shape}")
        self.policy, self.config = policy, config
        self._assign, self._cache = ASSIGN[policy.assign], CACHES[policy.cache](layers, experts, config)
        self._offline = None if frequency is None else np.array(frequency, np.float64)
        self._bucket = [np.array(bucket, np.int32) for bucket in buckets]
        self._where = np.full((layers, experts), ABSENT, np.uint8)
        for layer, bucket in enumerate(self._bucket):
            self._where[layer, bucket] = RESIDENT
        self._pending: list[dict[int, int]] = [{} for _ in range(layers)]  # {unit: slot}
        self._last_used = np.zeros((layers, experts), np.int64)
        self._steps = np.zeros(layers, np.int64)
        self._guess: list[int | None] = [None] * layers  # the expert last thought worth a prefetch
        self._confidence = config.confidence
        self._in_vain = np.zeros(layers, np.int64)  # answers in a row that were no prefetch, and asks left out since
        self.check()
        self.start_sequence()

    # --- what is known ---

    def bucket(self, layer: int) -> I32:
        """[G] slot -> expert, a copy; of a slot that is spoken for the expert that was there."""
        return self._bucket[layer].copy()

    def resident(self, layer: int) -> Bools:
        """[E] on the device and there to be used, a copy."""
        return self._where[layer] == RESIDENT

    @property
    def confidence(self) -> float:
        """How often, of late, the expert that was worth a prefetch was live."""
        return self._confidence

    def start_sequence(self, counts: npt.NDArray[np.integer] | None = None) -> None:
        """A new sequence; counts [L, E]: its prompt's tokens at each expert. Moves nothing.

        Statistics count as many tokens as a score remembers, 1 / (1 - decay), the prompt its own number.
        """
        prior: F64 | None = None
        shape = self._where.shape
        if counts is not None and counts.shape != shape:
            raise ValueError(f"counts must have shape {shape}, got {counts.shape}")
        weight = np.zeros(shape)
        if self._offline is not None:
            weight += self._offline / (1 - self.config.decay)
        if counts is not None:
            weight += counts
        if weight.any():
            prior = weight / np.maximum(weight.sum(axis=1, keepdims=True), 1e-30)
        self._cache.begin(prior)

    def observe(self, layer: int, tokens: Ints) -> None:
        """The layer has run; tokens [E] of each expert."""
        self._steps[layer] += 1
        self._last_used[layer, tokens > 0] = self._steps[layer]
        self._cache.observe(layer, tokens)

    # --- deciding ---

    def plan_step(
        self,
        layer: int,
        tokens: Ints,
        costs: ExpertCosts,
        *,
        room: int | None = None,  # fetches that staging allows
        transit: int = 0,  # slots beside the layer's own, for experts that are fetched and not kept
        copy_busy_s: float = 0.0,  # the link is busy that long with transfers planned earlier
    ) -> StepPlan:
        """Who computes what, for tokens [E]. Fetches into the layer's slots are pending afterwards.

        No more is fetched than there are slots in transit and idle residents to be given up.
        """
        self._learn(layer, tokens)
        live = tokens.nonzero()[0].astype(np.int32)
        where = self._where[layer, live]
        experts, waiting = live, _NONE
        if self._pending[layer]:
            free = where <= ABSENT
            experts, waiting, where = live[free], live[~free], where[free]
        resident = where == RESIDENT
        victims = _NONE
        if not resident.all():
            victims = self._cache.victims(layer, self._open_bucket(layer), tokens)
        most = len(victims) + transit
        work = Work(
            experts=experts,
            tokens=tokens[experts],
            resident=resident,
            room=most if room is None else min(room, most),
            copy_busy_s=copy_busy_s,
            host_busy_s=float(costs.cpu(tokens[waiting]).sum()) if len(waiting) else 0.0,
            last_used=self._last_used[layer, experts],
        )
        assignment = self._assign(work, costs)
        on_gpu, units = assignment.on_gpu, experts[assignment.fetch]
        slots = _NONE
        if len(units):
            slots = self._slots(layer, units, victims, tokens, transit)
            kept = slots >= 0
            self._send(layer, units[kept], slots[kept])
        cold = experts[~on_gpu]
        if len(waiting):
            cold = np.concatenate((cold, waiting))
        return StepPlan(experts[on_gpu & resident], cold, units, slots, work, on_gpu)

    def _slots(self, layer: int, units: I32, victims: I32, tokens: Ints, transit: int) -> I32:
        """[n] where fetched units go: those that the cache wants kept, and as many more as transit has no room for."""
        slots = np.full(len(units), -1, np.int32)
        could = min(len(units), len(victims))
        stays = np.ones(could, np.bool_)
        if transit:
            stays = self._cache.stays(layer, units[:could], self._bucket[layer][victims[:could]], tokens)
            surplus = len(units) - int(np.count_nonzero(stays)) - transit
            if surplus > 0:
                stays[np.flatnonzero(~stays)[:surplus]] = True
        kept = np.flatnonzero(stays)
        slots[kept] = victims[: len(kept)]
        return slots

    def background(self, layer: int, costs: ExpertCosts, window_s: float) -> LayerSwaps:
        """Replacements that pay and whose transfers fit in `window_s` of idle link; pending afterwards."""
        limit = min(costs.transfers_in(window_s), len(self._bucket[layer]))
        if limit < 1:
            return LayerSwaps(_NONE, _NONE)
        absent = self._where[layer] == ABSENT
        units, slots = self._cache.swaps(layer, self._open_bucket(layer), absent, limit, costs)
        if len(units):
            self._send(layer, units, slots)
        return LayerSwaps(units, slots)

    def asks(self, layer: int) -> bool:
        """Whether to foretell the layer's next step: always, or after `PATIENCE` answers in vain one step in `RARELY`.
        What foretells costs time too, and where the link is slow or experts are small nothing ever pays. Call it once a
        step."""
        vain = self._in_vain[layer]
        if vain < PATIENCE:
            return True
        self._in_vain[layer] = vain + 1
        return (vain - PATIENCE) % RARELY == RARELY - 1

    def prefetch(
        self, layer: int, predicted: F64, costs: ExpertCosts, *, transit: int = 0, copy_busy_s: float = 0.0
    ) -> LayerSwaps | None:
        """The one expert of a later layer worth bringing in now, given its predicted workload [E]; pending afterwards.

        None: nothing is, or the link is busy. Call it only if the transfer can arrive before the layer starts.
        """
        tokens = predicted_tokens(predicted)
        live = np.flatnonzero(tokens).astype(np.int32)
        victims = self._cache.victims(layer, self._open_bucket(layer), tokens)
        work = Work(
            experts=live,
            tokens=tokens[live],
            resident=self._where[layer, live] != ABSENT,  # what comes will be there; what leaves cannot be had
            room=len(victims) + transit,
            copy_busy_s=copy_busy_s,
            last_used=self._last_used[layer, live],
        )
        place = heaviest_absent(work, predicted[live])
        self._guess[layer] = None if place is None else int(live[place])
        price_s = self.config.prefetch_price * costs.copy_s
        chosen = choose_prefetch(work, place, victims, self._confidence, price_s, self._assign, costs)
        if chosen is None:
            self._in_vain[layer] += self._in_vain[layer] < PATIENCE
            return None
        self._in_vain[layer] = 0
        units, slots = (np.array([value], np.int32) for value in chosen)
        self._send(layer, units, slots)
        return LayerSwaps(units, slots)

    def _learn(self, layer: int, tokens: Ints) -> None:
        """How much the last guess for the layer was worth."""
        guess, keep = self._guess[layer], self.config.confidence_decay
        if guess is not None:
            self._confidence = keep * self._confidence + (1 - keep) * float(tokens[guess] > 0)
            self._guess[layer] = None

    def _open_bucket(self, layer: int) -> I32:
        """[G] slot -> expert, -1 where a transfer speaks for the slot; not to be written to."""
        bucket = self._bucket[layer]
        if not self._pending[layer]:
            return bucket
        return np.where(self._where[layer, bucket] == RESIDENT, bucket, np.int32(-1))

    # --- what became of a transfer ---

    def _send(self, layer: int, units: I32, slots: I32) -> None:
        self._where[layer, units] = COMING
        self._where[layer, self._bucket[layer][slots]] = LEAVING
        self._pending[layer].update(zip(units.tolist(), slots.tolist(), strict=True))

    def applied(self, layer: int, units: I32, slots: I32) -> None:
        """The units are in their slots, those that were there on the host."""
        self._settle(layer, units, slots)
        self._where[layer, self._bucket[layer][slots]] = ABSENT
        self._where[layer, units] = RESIDENT
        self._bucket[layer][slots] = units

    def dropped(self, layer: int, units: I32, slots: I32) -> None:
        """The transfers were not and will not be carried out: everything is where it was."""
        self._settle(layer, units, slots)
        self._where[layer, units] = ABSENT
        self._where[layer, self._bucket[layer][slots]] = RESIDENT

    def _settle(self, layer: int, units: I32, slots: I32) -> None:
        """Take the moves off the pending ones. AssertionError: one is not pending."""
        for unit, slot in zip(units.tolist(), slots.tolist(), strict=True):
            assert self._pending[layer].pop(unit, None) == slot, f"layer {layer}: expert {unit} is not on its way"

    def check(self) -> None:
        """The books: every expert in at most one slot, and only pending transfers speak for experts and slots."""
        for layer, (bucket, pending) in enumerate(zip(self._bucket, self._pending, strict=True)):
            expected = np.full(self._where.shape[1], ABSENT, np.uint8)
            assert len(np.unique(bucket)) == len(bucket), f"layer {layer}: an expert sits in two slots"
            assert ((bucket >= 0) & (bucket < len(expected))).all(), f"layer {layer}: no such expert"
            expected[bucket] = RESIDENT
            units, slots = list(pending), list(pending.values())
            assert len(set(slots)) == len(slots), f"layer {layer}: two transfers speak for one slot"
            assert (expected[units] == ABSENT).all(), f"layer {layer}: an expert comes twice"
            expected[units], expected[bucket[slots]] = COMING, LEAVING
            assert np.array_equal(self._where[layer], expected), f"layer {layer}: the books disagree"
