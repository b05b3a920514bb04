"""Shapes of published mixtures of experts, and the bytes and operations that a step meets in them. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dynajax.config import Activation, ExpertSpec, LatentSpec, ModelSpec, RouterSpec
from dynajax.sim.models import Weights

_SILU = Activation(kind="silu")


def _mixtral() -> ModelSpec:
    router = RouterSpec(experts=8, top_k=2, renormalise=True)
    return ModelSpec(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=32000,
        max_positions=32768,
        activation=_SILU,
        dtype="bfloat16",
        layout="mixtral",
        experts=ExpertSpec(router=router, width=14336, layers=tuple(range(32))),
    )


def _qwen3() -> ModelSpec:
    router = RouterSpec(experts=128, top_k=8, renormalise=True)
    return ModelSpec(
        layers=48,
        hidden=2048,
        ffn=6144,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        max_positions=40960,
        qk_norm=True,
        activation=_SILU,
        dtype="bfloat16",
        layout="qwen_moe",
        experts=ExpertSpec(router=router, width=768, layers=tuple(range(48))),
    )


def _deepseek() -> ModelSpec:
    """Two shared experts are one FFN of twice the width; the first layer has an FFN of its own and no experts."""
    router = RouterSpec(experts=64, top_k=6, float32=True)
    return ModelSpec(
        layers=27,
        hidden=2048,
        ffn=10944,
        heads=16,
        kv_heads=16,
        head_dim=192,
        vocab=102400,
        max_positions=163840,
        activation=_SILU,
        dtype="bfloat16",
        layout="deepseek",
        experts=ExpertSpec(router=router, width=1408, layers=tuple(range(1, 27)), shared="plain", shared_width=2816),
        latent=LatentSpec(kv_rank=512, q_rank=None, plain=128, rotary=64, value=128),
    )


def _tiny() -> ModelSpec:
    """The mixture that this project trains itself."""
    router = RouterSpec(experts=16, top_k=4, renormalise=True)
    return ModelSpec(
        layers=6,
        hidden=192,
        ffn=96,
        heads=3,
        kv_heads=3,
        head_dim=64,
        vocab=4096,
        max_positions=512,
        qk_norm=True,
        tied=True,
        activation=_SILU,
        dtype="bfloat16",
        layout="qwen_moe",
        experts=ExpertSpec(router=router, width=96, layers=tuple(range(6))),
    )


# config.json of the releases named; DALI's three (arXiv 2602.03495), and ours.
MIXTURES: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "deepseek-v2-lite": _deepseek(),
        "qwen3-30b-a3b": _qwen3(),
        "mixtral-8x7b": _mixtral(),
        "tiny-moe": _tiny(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLoad:
    """What a step meets: bytes, and floating point operations of one token."""

    unit_layers: tuple[int, ...]  # numbers of the M layers that have experts
    units: int  # E
    top_k: int
    unit: float  # bytes of an expert on the device
    host_unit: float  # in host memory
    host_dtype: str
    unit_flops: float
    attend: float  # bytes of a layer's attention, norms and router
    attend_flops: float
    always: tuple[float, ...]  # by layer: bytes of what every token computes beside its experts
    always_flops: tuple[float, ...]
    router: float  # bytes, which foretelling reads once more
    kv_token: float  # a layer, a token of context
    head: float  # bytes of the table that gives logits
    head_flops: float

    @property
    def layers(self) -> int:
        """All of the model's."""
        return len(self.always)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights(Weights):
    """See Weights; a unit is an expert."""

    @property
    def experts(self) -> float:
        """Bytes of all routed experts on the device."""
        return self.unit * len(self.spec.unit_layers) * self.spec.units

    def mixture_load(self) -> MixtureLoad:
        """What a step meets."""
        spec, one = self.spec, self.bytes_of_one
        assert spec.experts is not None, "a dense model has neurons"
        width = [spec.ffn_parts * spec.hidden * spec.always_width(layer) for layer in range(spec.layers)]
        read = spec.block_parameters + spec.router_parameters
        return MixtureLoad(
            unit_layers=spec.unit_layers,
            units=spec.units,
            top_k=spec.experts.router.top_k,
            unit=self.unit,
            host_unit=self.host_unit,
            host_dtype=self.host_dtype,
            unit_flops=2.0 * spec.ffn_parts * spec.unit_rows * spec.hidden,
            attend=read * one,
            attend_flops=2.0 * read,
            always=tuple(count * one for count in width),
            always_flops=tuple(2.0 * count for count in width),
            router=spec.router_parameters * one,
            kv_token=self.cache(1) / spec.layers,
            head=self.head,
            head_flops=2.0 * spec.hidden * spec.vocab,
        )
