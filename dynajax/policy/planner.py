"""What the neurons of every layer do for one token: the state of DynamicInfer's decisions. NumPy only."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from dynajax.config import NeuronPolicy, PolicyConfig
from dynajax.plan import LayerPlan, Placement
from dynajax.policy.costs import Costs
from dynajax.policy.frequency import FLOOR, seed_frequency, update_frequency, update_recency
from dynajax.policy.swaps import Gain, keep_slots, plan_swaps, rung_below, swap_ladder
from dynajax.policy.thresholds import Thresholds, balance, sides, theta_of_density, whole_masses

RESIDENT, ABSENT, COMING, LEAVING = range(4)  # where a unit is; the last two until its transfer is reported
_ON_HOST = np.uint8(1)  # the bit of those that are on the host once every pending plan is carried out
_NONE = np.empty(0, np.int32)
_PROBABILITY = (np.arange(256) / 255).astype(np.float32)

U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


class NeuronPlanner:
    """Which neurons of each layer are where, how often they were live, and what should move next.

    What of the paper each policy uses: `dynamic` prediction (micro), frequencies of this sequence (macro) and
    thresholds; `macro+micro` and `macro` as they say; `micro` prediction beside the frequencies of the statistics;
    `lru` brings in what is predicted for what was used longest ago; `static` and `none` move nothing.

    Every plan ends with `applied` or `dropped`, in any order and however late. Until then its slots are spoken for,
    and later plans neither fetch nor evict the units that come and go. One thread calls all methods.
    """

    def __init__(
        self,
        placement: Placement,
        frequency: npt.NDArray[np.float32],  # [L, F] of the statistics
        policy: NeuronPolicy,
        config: PolicyConfig,
        mass: npt.NDArray[np.float32] | None = None,  # [L, F] E|act| * |down row|, see thresholds.py
    ) -> None:
        if policy not in get_args(NeuronPolicy):
            raise ValueError(f"policy must be one of {', '.join(get_args(NeuronPolicy))}, got {policy!r}")
        shape = (len(placement.buckets), placement.units)
        for name, array in (("frequency", frequency), ("mass", mass)):
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        self.policy: NeuronPolicy = policy
        self.config = config
        layers, units = shape
        self._offline = np.array(frequency, np.float32)
        self._mass = [whole_masses(None if mass is None else mass[i], units) for i in range(layers)]
        self._bucket = [np.array(bucket, np.int32) for bucket in placement.buckets]
        self._slot_of = np.full(shape, -1, np.int32)
        self._where = np.full(shape, ABSENT, np.uint8)
        for i, bucket in enumerate(self._bucket):
            self._slot_of[i, bucket] = np.arange(len(bucket))
            self._where[i, bucket] = RESIDENT
        self._keep = [int(config.keep_share * len(bucket)) for bucket in self._bucket]
        self._pending: list[list[LayerPlan]] = [[] for _ in range(layers)]
        self._f = np.maximum(self._offline, FLOOR)
        self._scratch = np.empty(units, np.float32)
        self._theta = int(np.rint(config.theta * 255))

    # --- what is known ---

    def bucket(self, layer: int) -> npt.NDArray[np.int32]:
        """[G] slot -> unit, a copy."""
        return self._bucket[layer].copy()

    def frequency(self, layer: int) -> npt.NDArray[np.float32]:
        """f [F], a copy; under `lru` the recency."""
        return self._f[layer].copy()

    def start_sequence(self, prompt_live_counts: npt.NDArray | None = None, prompt_tokens: int = 0) -> None:
        """Seed f from the statistics and from how often [L, F] each neuron was live in the prompt. Moves nothing."""
        if prompt_live_counts is not None and prompt_live_counts.shape != self._f.shape:
            raise ValueError(f"prompt_live_counts must have shape {self._f.shape}, got {prompt_live_counts.shape}")
        if self._tracks:
            self._f = seed_frequency(self._offline, prompt_live_counts, prompt_tokens, self.config.decay)

    def observe(self, layer: int, live: Bools) -> None:
        """The layer has run for a token: live [F], or [B, F] for the rows of a batch, whose union counts."""
        if live.ndim == 2:
            live = np.logical_or.reduce(live, axis=0)
        if self.policy == "lru":
            update_recency(self._f[layer], live, self.config.decay)
        elif self._tracks:
            update_frequency(self._f[layer], live, self.config.decay, self._scratch)

    # --- deciding ---

    def plan(self, layer: int, scores: U8 | None, window_units: int | None, costs: Costs) -> LayerPlan:
        """Swaps and thresholds of one layer for one token, from scores [F] (or [B, F]: the highest of the rows).

        scores None: nothing is predicted for this layer; only frequencies move units, and every unit is computed.
        window_units: swaps that hide behind compute, less where the config says less; None: by the costs.
        The plan is pending afterwards; one without swaps need not be reported.
        """
        if scores is not None and scores.ndim == 2:
            scores = scores.max(axis=0)
        theta = self._threshold(scores)
        units, slots = self._swaps(layer, scores, theta, window_units, costs)
        if len(units):
            self._where[layer, units] = COMING
            self._where[layer, self._bucket[layer][slots]] = LEAVING
        found = self._thresholds(layer, scores, theta, costs)
        plan = LayerPlan(
            units, slots, np.uint8(theta), np.uint8(found.theta_g), np.uint8(found.theta_c), found.n_gpu, found.n_cpu
        )
        if len(units):
            self._pending[layer].append(plan)
        return plan

    def _threshold(self, scores: U8 | None) -> int:
        if scores is None:
            return 0
        if self.config.density is not None:
            return theta_of_density(scores, self.config.density)
        return self._theta

    def _swaps(
        self, layer: int, scores: U8 | None, theta: int, window_units: int | None, costs: Costs
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        bucket, f, where = self._bucket[layer], self._f[layer], self._where[layer]
        if self.policy in ("static", "none") or not len(bucket):
            return _NONE, _NONE
        most = self._window(layer, scores, theta, window_units, costs)
        if most < 1:
            return _NONE, _NONE
        most = rung_below(most, swap_ladder(min(most, len(bucket))))
        evictable = where.take(bucket) == RESIDENT
        absent = where == ABSENT
        if self.policy == "lru":
            if scores is None:
                return _NONE, _NONE
            wanted = scores >= theta
            a = wanted * np.float32(2)  # above every recency
            return plan_swaps(a.astype(np.float32), f, 1.0, bucket, absent & wanted, evictable, most, None)
        evictable &= ~keep_slots(f, bucket, self._keep[layer])
        gain = None
        if self.config.swap_rule == "gain":
            fixed = costs.uses_to_pay * costs.t0_s / (costs.t_gather_s + costs.t_trans_s)
            gain = Gain(horizon=1 / (1 - self.config.decay), pays_at=costs.uses_to_pay, fixed=fixed)
        a = None if scores is None or self.policy == "macro" else self._predicted(scores, theta)
        lam = 1.0 if a is None else self.config.lam
        return plan_swaps(a, f, lam, bucket, absent, evictable, most, gain)

    def _predicted(self, scores: U8, theta: int) -> npt.NDArray[np.float32]:
        """a [F]: the probability of being live, or 1 where it reaches theta."""
        if self.config.ranking == "flag":
            return (scores >= theta).astype(np.float32)
        return _PROBABILITY.take(scores)

    def _window(self, layer: int, scores: U8 | None, theta: int, window_units: int | None, costs: Costs) -> int:
        """Swaps that fit: the smallest of the limits given, or else what `lead` layers' FFNs hide."""
        limits = [limit for limit in (window_units, self.config.window_units) if limit is not None]
        if self.config.window_s is not None:
            limits.append(costs.units_in(self.config.window_s))
        if not limits:
            counts = self._counts(layer, scores, theta)
            limits.append(costs.units_in(self.config.lead * costs.layer_s(counts.n_gpu, counts.n_cpu)))
        return min(limits)

    def _thresholds(self, layer: int, scores: U8 | None, theta: int, costs: Costs) -> Thresholds:
        """For the layer as it will be once every pending plan is carried out."""
        if self.policy != "dynamic" or scores is None:
            return self._counts(layer, scores, theta)
        device, host = sides(scores, (self._where[layer] & _ON_HOST).view(np.bool_), self._mass[layer])
        return balance(device, host, theta, costs, self.config.err_scale)

    def _counts(self, layer: int, scores: U8 | None, theta: int) -> Thresholds:
        """One threshold on both sides, and how many reach it."""
        on_host = (self._where[layer] & _ON_HOST).view(np.bool_)
        reaching = np.ones_like(on_host) if scores is None else scores >= theta
        n_cpu = int(np.count_nonzero(reaching & on_host))
        return Thresholds(theta, theta, int(np.count_nonzero(reaching)) - n_cpu, n_cpu)

    @property
    def _tracks(self) -> bool:
        return self.policy in ("dynamic", "macro+micro", "macro", "lru")

    # --- what became of a plan ---

    def applied(self, layer: int, plan: LayerPlan) -> None:
        """The plan's units are in their slots, those that were there on the host."""
        if self._settle(layer, plan):
            bucket, where, slot_of = self._bucket[layer], self._where[layer], self._slot_of[layer]
            gone = bucket[plan.slots]
            where[gone], where[plan.units] = ABSENT, RESIDENT
            slot_of[gone], slot_of[plan.units] = -1, plan.slots
            bucket[plan.slots] = plan.units

    def dropped(self, layer: int, plan: LayerPlan) -> None:
        """The plan's transfer was not and will not be carried out: everything is where it was."""
        if self._settle(layer, plan):
            self._where[layer, plan.units] = ABSENT
            self._where[layer, self._bucket[layer][plan.slots]] = RESIDENT

    def _settle(self, layer: int, plan: LayerPlan) -> bool:
        """Take the plan off the pending ones; False if it moves nothing. AssertionError: it is not pending."""
        if not len(plan.units):
            return False
        kept = [other for other in self._pending[layer] if other is not plan]
        assert len(kept) + 1 == len(self._pending[layer]), f"layer {layer}: this plan is not pending"
        self._pending[layer] = kept
        return True

    def check(self) -> None:
        """The books: every unit in at most one slot, and only pending plans speak for slots and units."""
        for i, (bucket, pending) in enumerate(zip(self._bucket, self._pending, strict=True)):
            where, slot_of = self._where[i], self._slot_of[i]
            assert len(np.unique(bucket)) == len(bucket), f"layer {i}: a unit sits in two slots"
            assert np.array_equal(slot_of[bucket], np.arange(len(bucket))), f"layer {i}: slot_of and bucket disagree"
            assert np.count_nonzero(slot_of >= 0) == len(bucket), f"layer {i}: slot_of knows units that are not there"
            coming = np.concatenate([_NONE, *(plan.units for plan in pending)])
            slots = np.concatenate([_NONE, *(plan.slots for plan in pending)])
            expected = np.full(len(where), ABSENT, np.uint8)
            expected[bucket] = RESIDENT
            expected[coming], expected[bucket[slots]] = COMING, LEAVING
            assert len(np.unique(coming)) == len(coming) and (slot_of[coming] < 0).all(), (
                f"layer {i}: a unit comes twice"
            )
            assert len(np.unique(slots)) == len(slots), f"layer {i}: two plans speak for one slot"
            assert np.array_equal(where, expected), f"layer {i}: the pending plans and the books disagree"
