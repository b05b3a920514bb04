"""What a model is and what a user asked for: frozen records, no behaviour beyond checking themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args

from dynajax.errors import UsageError

ActivationKind = Literal["relu", "fatrelu", "silu", "drelu"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
NormKind = Literal["rms", "layer"]
RouterScore = Literal["softmax", "sigmoid", "chosen"]
GroupRank = Literal["max", "top2"]
SharedKind = Literal["none", "plain", "gated"]
Layout = Literal["llama", "opt", "falcon", "mixtral", "qwen_moe", "deepseek", "granitemoe"]
Sparsity = Literal["auto", "dense", "exact", "predicted"]
HostMode = Literal["auto", "threads", "callback", "ffi"]
DTypeName = Literal["float32", "float16", "bfloat16"]
NeuronPolicy = Literal["dynamic", "macro+micro", "macro", "micro", "static", "lru", "none"]
ExpertPolicyName = Literal[
    "scan", "dali", "hybrimoe", "bandwidth-split", "fiddler", "lru", "lfu", "static", "layer-split", "none"
]
PolicyName = Literal["auto", NeuronPolicy, ExpertPolicyName]
AssignName = Literal[
    "auto", "scan", "dali", "resident", "fetch-all", "per-expert", "two-ended", "two-ended-shipped", "bandwidth-split"
]
CacheName = Literal["auto", "decayed", "dali", "lru", "lfu", "ema", "static"]
PrefetchName = Literal["auto", "corrected", "residual", "residual-mean", "gate", "count", "none"]
StagingName = Literal["auto", "pinned_host", "registered", "plain"]
SwapRule = Literal["gain", "paper"]
Ranking = Literal["score", "flag"]

BIAS_COLUMNS = 32  # a whole cache line of any type, so that rows stay aligned
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """UsageError that names the setting unless value is a number (no bool) in [low, high], an integer if `whole`."""
    kind = Integral if whole else Real
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if whole else "a number"
        bounds = f">= {low:g}" if high >= 2**31 else f"between {low:g} and {high:g}"
        raise UsageError(f"{name} must be {what} {bounds}, got {value!r}")


def check_share(name: str, value: Any) -> None:
    """UsageError that names the setting unless value is a number in (0, 1]."""
    check_number(name, value, 0, 1)
    if value == 0:
        raise UsageError(f"{name} must be above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The FFN's non-linearity, on the gate (on up where there is no gate).

    fatrelu: x where x >= threshold, else 0 (not shifted; ProSparse). drelu: relu on the gate and on up (TurboSparse).
    """

    kind: ActivationKind = "relu"
    threshold: float = 0.0

    @property
    def has_zeros(self) -> bool:
        """True if the activation gives exact zeros that can be skipped without changing the answer."""
        return self.kind != "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions: the base, and how a longer context than the trained one stretches them.

    linear: every angle / factor. llama3: slow frequencies / factor, fast ones kept, a ramp between (`low_freq`,
    `high_freq`, in turns per original context). yarn: the same idea with `beta_slow` and `beta_fast` turns, and
    cosine and sine scaled by `attention_factor` (Peng et al. 2023, section 3).
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0  # trained context, for llama3 and yarn
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: the ramp's ends rounded to whole frequencies
    interleaved: bool = False  # a pair's two numbers lie side by side, and not half a head apart

    def __post_init__(self) -> None:
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"rope theta and factor must be > 0, got {self.theta} and {self.factor}")
        if self.kind in ("llama3", "yarn") and self.original_positions < 1:
            raise ValueError(f"{self.kind} needs original_positions >= 1, got {self.original_positions}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only model, read from `config.json` and from nothing else.

    Letters as everywhere: L layers, D hidden, F FFN neurons, N heads, H head size, V vocabulary. What differs from
    family to family is a field here, and one decoder computes them all.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layout: Layout = "llama"  # how the checkpoint names and fuses its tensors
    activation: Activation = Activation()
    gated: bool = True  # down(act(gate h) * up h); without a gate down(act(up h))
    norm: NormKind = "rms"  # layer: mean removed, and a bias
    norm_eps: float = 1e-5
    rope: Rope | None = Rope()  # None: learned positions, added to the embeddings
    window: int | None = None  # a query sees this many tokens, itself included; None: all before it
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False  # RMS norm of every head's query and key before they are rotated
    qk_norm_whole: bool = False  # of all heads' together
    attention_scale: float | None = None  # of query times key; None: H ** -0.5
    parallel: bool = False  # attention and FFN read the same residual stream
    shared_norm: bool = False  # parallel: through the same norm
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of attention's and the FFN's output
    logit_scale: float = 1.0
    tied: bool = False
    max_positions: int = 2048
    dtype: DTypeName = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    experts: ExpertSpec | None = None  # None: every neuron of the FFN is a unit
    latent: LatentSpec | None = None  # None: every head's key and value is cached; head_dim: a query's numbers

    @property
    def cache_heads(self) -> int:
        """Heads of the KV cache."""
        return self.kv_heads if self.latent is None else 1

    @property
    def key_width(self) -> int:
        """Numbers of a cached key, per token and head of the cache."""
        return self.head_dim if self.latent is None else self.latent.kv_rank + self.latent.rotary

    @property
    def value_width(self) -> int:
        """Numbers of a cached value, per token and head; 0 with latents, where values are the front of the keys."""
        return self.head_dim if self.latent is None else 0

    @property
    def ffn_parts(self) -> int:
        """P: rows per neuron; gate, up and down, or up and down."""
        return 3 if self.gated else 2

    @property
    def units(self) -> int:
        """Units of a layer: F neurons, or E experts."""
        return self.ffn if self.experts is None else self.experts.router.experts

    @property
    def unit_rows(self) -> int:
        """Rows a unit has of each part: 1, or an expert's neurons."""
        return 1 if self.experts is None else self.experts.width

    @property
    def unit_layers(self) -> tuple[int, ...]:
        """The layers that have units, ascending."""
        return tuple(range(self.layers)) if self.experts is None else self.experts.layers

    def always_width(self, layer: int) -> int:
        """Neurons that a layer of a mixture of experts computes for every token: its shared expert's, or all it has."""
        assert self.experts is not None, "every neuron is a unit"
        return self.experts.shared_width if layer in self.experts.layers else self.ffn

    @property
    def unit_width(self) -> int:
        """Elements in a row of a unit: D; with biases, a column for the neuron's bias at D, and zeros behind it.

        A bias travels with its unit that way, and no kernel knows of it: h has a one in that column.
        """
        return self.hidden + (BIAS_COLUMNS if self.ffn_bias else 0)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over D."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def block_parameters(self) -> int:
        """Parameters of one layer outside its units: norms, attention, and the FFN's output bias."""
        if self.latent is not None:
            return 2 * self.norm_parameters + self._latent_parameters(self.latent)
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = 2 * self.hidden * (q_dim + kv_dim) + self.norm_parameters * (1 if self.shared_norm else 2)
        count += (q_dim + 2 * kv_dim) * self.qkv_bias + self.hidden * (self.o_bias + self.ffn_bias)
        return count + 2 * self.head_dim * self.qk_norm + (q_dim + kv_dim) * self.qk_norm_whole

    def _latent_parameters(self, latent: LatentSpec) -> int:
        """Parameters of one layer's attention with latents."""
        queries = self.heads * self.head_dim
        count = self.hidden * (latent.kv_rank + latent.rotary + self.heads * latent.value) + latent.kv_rank
        count += self.heads * (latent.plain + latent.value) * latent.kv_rank
        if latent.q_rank is None:
            return count + self.hidden * queries
        return count + latent.q_rank * (self.hidden + 1 + queries)

    def always_parameters(self, layer: int) -> int:
        """Parameters of one layer that a mixture of experts has on the device besides `block_parameters`."""
        if self.experts is None:
            return 0
        count = self.ffn_parts * self.hidden * self.always_width(layer)
        if layer not in self.experts.layers:
            return count
        return count + self.router_parameters + self.hidden * (self.experts.shared == "gated")

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        if self.experts is None:
            return 0
        router = self.experts.router
        return router.experts * (self.hidden + router.logits_bias + router.selection_bias)

    def routing_dtype(self, part: str, dtype: str) -> str:
        """The type on the device of a part of `RoutingBlock`: `dtype`, but float32 for routers that say so."""
        exact = self.experts is not None and self.experts.router.float32
        return "float32" if exact and part in ("router", "router_bias", "selection_bias") else dtype

    @property
    def position_parameters(self) -> int:
        """Parameters of learned positions."""
        return self.max_positions * self.hidden if self.rope is None else 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.head_dim % 2 and self.rope is not None:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be > 0, got {self.norm_eps}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be >= 1, got {self.window}")
        if self.activation.kind == "drelu" and not self.gated:
            raise ValueError("drelu needs a gate")
        if self.shared_norm and not self.parallel:
            raise ValueError("shared_norm needs parallel")
        if self.experts is not None and (self.ffn_bias or self.parallel or self.norm != "rms"):
            raise ValueError("a mixture of experts has RMS norms, no biases in its FFNs and one branch after the other")
        if self.experts is not None and self.experts.layers[-1] >= self.layers:
            raise ValueError(f"layer {self.experts.layers[-1]} cannot have experts: there are {self.layers}")

    def _check_latent(self, latent: LatentSpec) -> None:
        if self.head_dim != latent.plain + latent.rotary or self.kv_heads != self.heads:
            raise ValueError(f"latents need head_dim {latent.plain + latent.rotary} and as many kv_heads as heads")
        if self.rope is None or self.window is not None or self.qkv_bias or self.o_bias or self.qk_norm:
            raise ValueError("attention with latents rotates and has no window, biases or norms of queries and keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for; `auto` and None are filled from model and machine when the engine opens.

    vram_budget: "auto", a size ("8GiB"), a share of free device memory ("0.85"), or bytes as an int.
    ctx: KV cache length in tokens. batch: rows decoded together. threads: host compute threads.
    stats: "auto", "none" or an activation statistics file, from which neurons are placed.
    predictor: "auto", "mlp", "gate", "none" or the folder of trained ones. staging: how units are sent to the device.
    set: constants of the policy, as a mapping or as NAME=VALUE (see PolicyConfig).
    deterministic: plans go by fixed costs and are always waited for, so that for the same `threads` two runs are equal
    bit for bit; without plans that always holds.
    offline: never touch the network; models come from folders and the cache.
    """

    vram_budget: str | int | float = "auto"
    ctx: int | None = None
    batch: int = 1
    sparsity: str = "auto"
    policy: str = "auto"
    assign: str = "auto"
    cache: str = "auto"
    prefetch: str = "auto"
    stats: str = "auto"
    dtype: str = "auto"
    host_dtype: str = "auto"
    host_mode: str = "auto"
    threads: int | None = None
    predictor: str = "auto"
    staging: str = "auto"
    set: Mapping[str, Any] | Sequence[str] = ()
    deterministic: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        choices = {
            "sparsity": get_args(Sparsity),
            "policy": tuple(dict.fromkeys(get_args(PolicyName))),
            "assign": get_args(AssignName),
            "cache": get_args(CacheName),
            "prefetch": get_args(PrefetchName),
            "dtype": ("auto", *get_args(DTypeName)),
            "host_dtype": ("auto", *get_args(DTypeName)),
            "host_mode": get_args(HostMode),
            "staging": get_args(StagingName),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not self.predictor or not isinstance(self.predictor, str):
            raise UsageError(f"--predictor must be auto, mlp, gate, none or a folder, got {self.predictor!r}")
        _ = self.knobs  # checked
        for name, value in (("ctx", self.ctx), ("batch", self.batch), ("threads", self.threads)):
            if value is not None:
                check_number(f"--{name}", value, 1, 2**31, whole=True)

    @property
    def knobs(self) -> PolicyConfig:
        """The policy's constants."""
        if isinstance(self.set, Mapping):
            return policy_from_values(self.set)
        return policy_from_settings(self.set)


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
    move_price: float = 0.7  # a swap must save so many times what moving an expert takes, while its score holds
    fetch_price: float = 0.2  # what a fetch must save in its own step, in times of moving an expert
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
        for name in ("move_price", "fetch_price", "prefetch_price"):
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


_SUFFIXES = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SUFFIXES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_budget(text: str | int | float) -> int | float | None:
    """Bytes (int) from "8GiB", a share of free memory (float) from "0.85", None from "auto".

    An int is bytes, a float a share. A bare number above 1 in text has no unit and is refused: nobody can
    tell 8 bytes from 8 GiB.
    """
    if not isinstance(text, str):
        if isinstance(text, bool) or (isinstance(text, float) and not 0 < text <= 1) or text <= 0:
            raise UsageError(f"vram_budget must be > 0 bytes or a share in (0, 1], got {text!r}")
        return text
    word = text.strip()
    if word.lower() == "auto":
        return None
    number = word.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    suffix = word[len(number) :].strip().upper()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value < 2**60:
        raise UsageError(f"--vram-budget must be auto, a size such as 8GiB or a share such as 0.85, got {text!r}")
    if suffix in _SUFFIXES and value * _SUFFIXES[suffix] >= 1:
        return int(value * _SUFFIXES[suffix])
    if suffix or value > 1:
        raise UsageError(f"--vram-budget {text!r} has no unit this program knows: write 8GiB, 600MiB, 900KiB or 0.85")
    return value
