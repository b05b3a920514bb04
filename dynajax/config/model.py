"""What a model is: its shape, read from config.json and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynajax.config.dtypes import DTypeName
from dynajax.config.experts import EncoderSpec, ExpertSpec, LatentSpec

ActivationKind = Literal["relu", "fatrelu", "silu", "drelu"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
NormKind = Literal["rms", "layer"]
Layout = Literal["llama", "opt", "falcon", "mixtral", "qwen_moe", "deepseek", "granitemoe", "switch"]

BIAS_COLUMNS = 32  # a whole cache line of any type, so that rows stay aligned


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
class ModelSpec:
    """The shape of a model, read from `config.json` and from nothing else.

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
    rope: Rope | None = Rope()  # None: learned positions, added to the embeddings, or with an encoder relative ones
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
    encoder: EncoderSpec | None = None  # None: all layers are the decoder's

    @property
    def stepped(self) -> range:
        """The layers that a token goes through while decoding: all but an encoder's."""
        return range(0 if self.encoder is None else self.encoder.layers, self.layers)

    @property
    def stepped_units(self) -> range:
        """The numbers, among the layers that have units, of those in `stepped`."""
        return range(sum(layer < self.stepped[0] for layer in self.unit_layers), len(self.unit_layers))

    @property
    def learned_positions(self) -> bool:
        """Whether positions are added to the embeddings."""
        return self.rope is None and self.encoder is None

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
        count = self.block_matrices + self.norm_parameters * (1 if self.shared_norm else 2)
        count += (q_dim + 2 * kv_dim) * self.qkv_bias + self.hidden * (self.o_bias + self.ffn_bias)
        count += self.relative_parameters
        return count + 2 * self.head_dim * self.qk_norm + (q_dim + kv_dim) * self.qk_norm_whole

    @property
    def block_matrices(self) -> int:
        """Of `block_parameters` those in matrices that a packed type packs: not those that heads own one by one."""
        if self.latent is None:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        down = self.hidden * (self.latent.kv_rank + self.latent.rotary + self.heads * self.latent.value)
        queries = self.heads * self.head_dim
        rank = self.latent.q_rank
        return down + (self.hidden * queries if rank is None else rank * (self.hidden + queries))

    @property
    def row_widths(self) -> frozenset[int]:
        """Columns of every matrix that a packed type packs."""
        out = self.heads * (self.head_dim if self.latent is None else self.latent.value)
        inner = () if self.latent is None or self.latent.q_rank is None else (self.latent.q_rank,)
        return frozenset({self.hidden, out, *inner})

    @property
    def relative_parameters(self) -> int:
        """Numbers of a layer's relative positions; every layer of a stack has the same."""
        return 0 if self.encoder is None else self.encoder.buckets * self.heads

    @property
    def cross_parameters(self) -> int:
        """What all layers of a decoder behind an encoder have besides, and the encoder's final norm."""
        if self.encoder is None:
            return 0
        return self.cross_matrices + (len(self.stepped) + 1) * self.norm_parameters

    @property
    def cross_matrices(self) -> int:
        """Of `cross_parameters` those in matrices."""
        return 0 if self.encoder is None else len(self.stepped) * self.block_matrices

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
        count = self.always_matrices(layer)
        if layer not in self.experts.layers:
            return count
        return count + self.router_parameters + self.hidden * (self.experts.shared == "gated")

    def always_matrices(self, layer: int) -> int:
        """Of `always_parameters` those in the matrices of an FFN."""
        return 0 if self.experts is None else self.ffn_parts * self.hidden * self.always_width(layer)

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
        return self.max_positions * self.hidden if self.learned_positions else 0

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

        if self.encoder is not None:
            self._check_encoder(self.encoder)
        elif self.experts is not None and self.experts.capacity is not None:
            raise ValueError("experts that take a limited number of tokens need an encoder")

    def _check_encoder(self, encoder: EncoderSpec) -> None:
        if not encoder.layers < self.layers or encoder.start_id >= self.vocab:
            raise ValueError(f"an encoder's layers must be < {self.layers} and start_id < {self.vocab}, got {encoder}")
        if self.experts is None or self.experts.router.top_k != 1 or self.experts.shared != "none":
            raise ValueError("a model with an encoder has experts, of which a token goes to one")
        if self.rope is not None or self.latent is not None or self.window is not None:
            raise ValueError("a model with an encoder has relative positions, no latents and no window")
        if self.qkv_bias or self.o_bias or self.qk_norm or self.qk_norm_whole:
            raise ValueError("a model with an encoder has no biases and no norms of queries and keys")

    def _check_latent(self, latent: LatentSpec) -> None:
        if self.head_dim != latent.plain + latent.rotary or self.kv_heads != self.heads:
            raise ValueError(f"latents need head_dim {latent.plain + latent.rotary} and as many kv_heads as heads")
        if self.rope is None or self.window is not None or self.qkv_bias or self.o_bias or self.qk_norm:
            raise ValueError("attention with latents rotates and has no window, biases or norms of queries and keys")
