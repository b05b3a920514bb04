"""Sums over a simulated run of a mixture of experts, and the figures that are told of it. NumPy only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dynajax.policy.experts.planner import StepPlan
from dynajax.policy.experts.records import Bools, ExpertCosts, Ints, makespan
from dynajax.policy.experts.scan import scan

JUDGED_EVERY = 8  # layer-steps from one comparison with the best assignment to the next
LANES = ("device", "host", "link")
Why = Literal["fetched", "streamed", "prefetched", "swapped"]  # a step needs it, with or without a slot; or may later


@dataclass(slots=True)
class MixtureTally:
    """Sums over layer-steps of decoding; seconds are simulated."""

    steps: int = 0
    rows: int = 0  # tokens decoded
    seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    layer_steps: int = 0
    live: int = 0  # experts
    hits: int = 0  # of them on the device when the layer's plan was made
    pairs: int = 0  # tokens at live experts
    hit_pairs: int = 0
    hot_pairs: int = 0  # computed on the device
    moved: Counter[Why] = field(default_factory=Counter)  # experts that were brought to the device, by reason
    useful: int = 0  # prefetched ones that were there when their layer's next step needed them
    late: int = 0  # needed, and still on their way
    foretold_pairs: float = 0.0  # of steps that were foretold
    foretold_hits: float = 0.0
    top1: int = 0  # steps with a live absent expert of which a busiest one was foretold
    top1_hits: int = 0  # and no absent one was busier
    host_s: float = 0.0  # of experts alone
    device_s: float = 0.0
    judged_s: float = 0.0  # of the assignments that were compared, by the costs they were made with
    best_s: float = 0.0  # of the best ones
    step_s: list[float] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)  # by lane, while decoding

    @property
    def loads(self) -> int:
        """Experts that were brought to the device while decoding."""
        return self.moved.total()

    def found(self, tokens: Ints, resident: Bools) -> None:
        """A layer-step begins: tokens [E], and who is on the device [E]."""
        live = tokens > 0
        self.layer_steps += 1
        self.live += int(np.count_nonzero(live))
        self.hits += int(np.count_nonzero(live & resident))
        self.pairs += int(tokens.sum())
        self.hit_pairs += int(tokens[resident].sum())

    def judge(self, plan: StepPlan, costs: ExpertCosts) -> None:
        """Now and then: how far the assignment is from the best."""
        if self.layer_steps % JUDGED_EVERY == 1:
            here = float(makespan(plan.work, plan.on_gpu, costs))
            self.judged_s += here
            self.best_s += min(here, float(makespan(plan.work, scan(plan.work, costs).on_gpu, costs)))

    def foretell(self, tokens: Ints, resident: Bools, counts: Ints, expected: Ints) -> None:
        """What came of a prediction of a layer-step: tokens [E], those foretold [E], and what plans went by [E]."""
        self.foretold_pairs += float(tokens.sum())
        self.foretold_hits += float(np.minimum(tokens, counts).sum())
        absent = ~resident
        if (tokens[absent] > 0).any() and (expected[absent] > 0).any():
            self.top1 += 1
            self.top1_hits += int(tokens[absent][np.argmax(expected[absent])] == tokens[absent].max())

    def figures(self, unit_bytes: float) -> dict[str, float | None]:
        """By the names of `simulate.py --json`; None where a figure does not apply."""
        seconds, steps = max(self.seconds, 1e-30), max(1, self.layer_steps)
        busy = {lane: self.busy_s.get(lane, 0.0) / seconds for lane in LANES}
        return {
            "decode_tok_s": self.rows / seconds,
            "decode_tok_s_row": self.steps / seconds,
            "prefill_tok_s": ratio(self.prompt_tokens, self.prompt_s),
            "hits": self.hits / max(1, self.live),
            "weighted_hits": self.hit_pairs / max(1, self.pairs),
            "computed_hot_share": self.hot_pairs / max(1, self.pairs),
            "loads_per_layer_step": self.loads / steps,
            "fetched_per_layer_step": (self.moved["fetched"] + self.moved["streamed"]) / steps,
            "prefetched_per_layer_step": self.moved["prefetched"] / steps,
            "swapped_per_layer_step": self.moved["swapped"] / steps,
            "moved_gb": self.loads * unit_bytes / 1e9,
            **{f"busy_{lane}": share for lane, share in busy.items()},
            **{f"idle_{lane}": max(0.0, 1 - share) for lane, share in busy.items()},
            "host_share": ratio(self.host_s, self.host_s + self.device_s),
            "over_best": ratio(self.judged_s, self.best_s),
            "prefetch_useful": ratio(self.useful, self.moved["prefetched"]),
            "prefetch_late": ratio(self.late, self.moved["prefetched"]),
            "foretold_recall": ratio(self.foretold_hits, self.foretold_pairs),
            "foretold_top1": ratio(self.top1_hits, self.top1),
        }


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where there is nothing to divide by."""
    return part / whole if whole else None
