"""Shapes of the published models, and the bytes that a token meets in them. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynajax.budget import dense_bytes, kv_bytes, unit_bytes
from dynajax.config import DTYPE_BYTES, GROUP, PACKED_BITS, Activation, ModelSpec, group_bytes
from dynajax.errors import UsageError
from dynajax.policy.placement import staged_units
from dynajax.sim.records import Load

# A weight, in bytes; those of few bits in groups with a 16-bit scale.
WEIGHT_BYTES: Mapping[str, float] = {
    **DTYPE_BYTES,
    **{name: group_bytes(bits) / GROUP for name, bits in PACKED_BITS.items()},
}
_RELU, _FATRELU = Activation(kind="relu"), Activation(kind="fatrelu", threshold=0.01)


def _llama(layers: int, hidden: int, ffn: int, heads: int, activation: Activation, kv_heads: int | None = None):
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        vocab=32000,
        max_positions=4096,
        activation=activation,
        dtype="float16",
    )


SPECS: Mapping[str, ModelSpec] = {
    "relullama-7b": _llama(32, 4096, 11008, 32, _RELU),
    "relullama-13b": _llama(40, 5120, 13824, 40, _RELU),
    "relullama-70b": _llama(80, 8192, 28672, 64, _RELU, kv_heads=8),
    "prosparse-7b": _llama(32, 4096, 11008, 32, _FATRELU),
    "prosparse-13b": _llama(40, 5120, 13824, 40, _FATRELU),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model at one precision: the sizes that decide what fits and what is read."""

    spec: ModelSpec
    dtype: str  # of the weights on the device
    host_dtype: str
    kv_dtype: str = "float16"

    def __post_init__(self) -> None:
        for name in (self.dtype, self.host_dtype, self.kv_dtype):
            if name not in WEIGHT_BYTES:
                raise UsageError(f"no size is known of {name!r}, only of {', '.join(WEIGHT_BYTES)}")

    def _size(self, elements: float, dtype: str | None = None) -> float:
        return elements * WEIGHT_BYTES[dtype or self.dtype]

    @property
    def bytes_of_one(self) -> float:
        """Of a weight on the device."""
        return WEIGHT_BYTES[self.dtype]

    @property
    def unit(self) -> float:
        """Bytes of a neuron on the device."""
        return self._size(unit_bytes(self.spec, "float16") / 2)

    @property
    def host_unit(self) -> float:
        """Bytes of a neuron in host memory."""
        return self._size(unit_bytes(self.spec, "float16") / 2, self.host_dtype)

    @property
    def dense(self) -> float:
        """Bytes on the device that are neither neurons nor cache."""
        return self._size(dense_bytes(self.spec, "float16") / 2)

    @property
    def neurons(self) -> float:
        """Bytes of all neurons on the device."""
        return self.unit * self.spec.layers * self.spec.ffn

    @property
    def attention(self) -> float:
        """Bytes of a layer beside its neurons."""
        return self._size(self.spec.block_parameters)

    @property
    def head(self) -> float:
        """Bytes of the table that gives logits."""
        return self._size(self.spec.hidden * self.spec.vocab)

    def cache(self, tokens: int) -> float:
        """Bytes of keys and values of one sequence."""
        return kv_bytes(self.spec, self.kv_dtype, tokens, 1)

    @property
    def parameters(self) -> float:
        """Of the whole model, an untied table of embeddings included."""
        spec = self.spec
        table = 0 if spec.tied else spec.vocab * spec.hidden
        return dense_bytes(spec, "float16") / 2 + table + spec.layers * spec.ffn * spec.ffn_parts * spec.unit_width

    def load(self, score: float, scores: int) -> Load:
        """What a token meets; score: bytes of a layer's predictors, scores: programs that ask them."""
        spec = self.spec
        return Load(
            layers=spec.layers,
            neurons=spec.ffn,
            unit=self.unit,
            host_unit=self.host_unit,
            dtype=self.host_dtype,
            parts=spec.ffn_parts,
            attention=self.attention,
            kv_token=self.cache(1) / spec.layers,
            head=self.head,
            score=score,
            scores=scores,
            piece=staged_units(spec.ffn),
        )
