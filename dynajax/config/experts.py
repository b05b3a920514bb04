"""What a mixture of experts, or attention with latents, has beside what every model has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RouterScore = Literal["softmax", "sigmoid", "chosen"]
GroupRank = Literal["max", "top2"]
SharedKind = Literal["none", "plain", "gated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a token chooses K of E experts, and how much each of them counts.

    logits = router h (+ a bias); scores: their softmax, or each one's sigmoid; chosen: the logits themselves. The K
    largest scores choose, those of all experts or of the `top_groups` best of `groups` equal groups; weights are their
    scores, or the softmax over the chosen logits, over their sum if `renormalise`, times `scale`.
    """

    experts: int
    top_k: int
    score: RouterScore = "softmax"
    logits_bias: bool = False
    selection_bias: bool = False  # a bias that helps to choose and does not weigh (DeepSeek-V3, section 2.1.2)
    groups: int = 1
    top_groups: int = 1
    group_rank: GroupRank = "max"  # a group's rank: its best score, or the sum of its best two
    renormalise: bool = False
    epsilon: float = 0.0  # added to the sum
    scale: float = 1.0
    float32: bool = False  # logits in float32, whatever the weights are

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be in [1, {self.experts}], got {self.top_k}")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups cannot be had of {self.experts} experts")
        if self.top_groups * (self.experts // self.groups) < self.top_k:
            raise ValueError(f"{self.top_groups} groups hold fewer than top_k {self.top_k} experts")
        if self.group_rank == "top2" and self.experts // self.groups < 2:
            raise ValueError("group_rank top2 needs groups of at least two experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The routed FFNs of a mixture of experts, each of `width` neurons, and what every token computes beside them."""

    router: RouterSpec
    width: int
    layers: tuple[int, ...]  # that have experts, ascending; the others have one FFN of the model's `ffn` neurons
    shared: SharedKind = "none"  # gated: times the sigmoid of a projection of h
    shared_width: int = 0
    capacity: int | None = None  # tokens of a sequence that an expert takes, the first ones; the rest go without it

    def __post_init__(self) -> None:
        if self.width < 1 or (self.shared == "none") != (self.shared_width == 0):
            raise ValueError(f"widths must be >= 1, got {self.width}, shared ({self.shared}) {self.shared_width}")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers with experts must be distinct and ascending, got {self.layers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder (Raffel et al. 2020): the first `layers` layers of the model. They read a prompt, every token of it
    seeing all others; the decoder behind them writes, and looks at what came out of them in every layer.

    Positions are relative, in both: a distance between two tokens falls into one of `buckets`, those of
    `max_distance` and more into the last, and a bucket's number is added to the scores of attention, one for each head.
    """

    layers: int
    start_id: int  # what the decoder begins with
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.layers < 1 or self.start_id < 0:
            raise ValueError(f"layers must be >= 1 and start_id >= 0, got {self.layers} and {self.start_id}")
        if self.buckets < 4 or self.buckets % 2 or self.max_distance <= self.buckets:
            raise ValueError(
                f"buckets must be even and >= 4, max_distance larger, got {self.buckets} and {self.max_distance}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention that keeps one small vector a token for all heads (DeepSeek-V2, section 2.1).

    Cached are a token's latent [kv_rank] and one rotated key [rotary]. A head's key is a projection of the latent
    [plain] with the rotated one behind, its value [value] another projection. Queries come through a latent of their
    own [q_rank], or straight from the hidden state.
    """

    kv_rank: int
    q_rank: int | None
    plain: int
    rotary: int
    value: int
    norm_eps: float = 1e-6  # of the latents' norms, in every file of such models

    def __post_init__(self) -> None:
        for name in ("kv_rank", "q_rank", "plain", "rotary", "value"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.rotary % 2:
            raise ValueError(f"rotary must be even, got {self.rotary}")
