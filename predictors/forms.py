"""Which predictors there are (Form), what one was made for (Entry), and what it costs. No arrays.

Vectors. The *stream* of layer i is what its FFN norm reads: the residual stream after the layer's attention, or, where
attention and FFN run in parallel, before it. *Normed* is the FFN's input h_i = norm_i(stream_i), without the column
that carries biases. A predictor of lead k reads one of them at layer i and scores the neurons of layer i + k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import ml_dtypes  # noqa: F401  # teaches NumPy what bfloat16 is
import numpy as np

from dynajax.config import GROUP, Activation, ModelSpec, NormKind
from dynajax.quant import BITS, stored_as

Kind = Literal["gate", "mlp"]
Reads = Literal["stream", "normed"]
MOST_RANK = 2**16
MATRIX_BITS = 8  # of trained matrices on the device; their folder keeps floats
_RELU = Activation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a ModelSpec predictors depend on; static under jit."""

    layers: int
    hidden: int
    ffn: int
    activation: Activation = _RELU
    gated: bool = True
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    ffn_bias: bool = False

    @classmethod
    def of(cls, spec: ModelSpec) -> Shape:
        values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(cls)}
        return cls(**values)

    @property
    def matrices(self) -> int:
        """How many of a neuron's rows decide whether it matters: its gate, and for silu and drelu up as well."""
        return 2 if self.gated and self.activation.kind in ("silu", "drelu") else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to predict. gate: a copy of `bits` bits, with a corrector if rank > 0; mlp: two matrices of `rank`.

    weighted: silu gates only, scores times the norm of the neuron's down row.
    """

    kind: Kind
    bits: int = 0
    rank: int = 0
    reads: Reads = "normed"
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.reads not in get_args(Reads):
            raise ValueError(f"kind must be gate or mlp and reads stream or normed, got {self.kind!r}, {self.reads!r}")
        if not 0 <= self.rank <= MOST_RANK or (self.kind == "mlp" and self.rank < 1):
            raise ValueError(f"rank must be from {int(self.kind == 'mlp')} to {MOST_RANK}, got {self.rank}")
        if self.kind == "gate" and self.bits not in BITS:
            raise ValueError(f"bits must be 1, 2, 4 or 8, got {self.bits}")
        if self.kind == "mlp" and (self.bits or self.weighted):
            raise ValueError("an mlp has neither bits nor weights of its outputs")

    def at(self, lead: int) -> Form:
        """This form for a lead: a gate reads the FFN's own input where that is there, at lead 0."""
        if self.kind == "mlp":
            return self
        reads: Reads = "stream" if lead else "normed"
        return Form(kind="gate", bits=self.bits, rank=self.rank, reads=reads, weighted=self.weighted)

    @property
    def is_trained(self) -> bool:
        return self.rank > 0

    @property
    def is_shifted(self) -> bool:
        """Whether a vector is added to what it reads."""
        return self.kind == "gate" and (self.reads == "stream" or self.rank > 0)

    @property
    def name(self) -> str:
        """gate4, gate1+16, mlp128."""
        return f"mlp{self.rank}" if self.kind == "mlp" else f"gate{self.bits}" + (f"+{self.rank}" if self.rank else "")


def form_bytes(shape: Shape, form: Form, dtype: str = "float16") -> int:
    """Device bytes of one layer's parameters, before anything is loaded; dtype: of trained matrices in their folder."""
    return sum(math.prod(dims) * np.dtype(kind).itemsize for dims, kind in param_shapes(shape, form, dtype).values())


def matrix_as(dims: tuple[int, int], dtype: str) -> tuple[tuple[int, ...], str]:
    """Dimensions and type in which the device has a trained matrix of `dtype`: rows of whole groups become 8 bits."""
    return stored_as(dims, dtype if dims[1] % GROUP else f"int{MATRIX_BITS}")


def param_shapes(shape: Shape, form: Form, dtype: str = "float16") -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (dimensions, type)} of one layer's parameters on the device, for `scoring.scores`."""
    hidden, ffn, groups = shape.hidden, shape.ffn, -(-shape.hidden // GROUP)
    if form.kind == "mlp":
        return {"fc1": matrix_as((form.rank, hidden), dtype), "fc2": matrix_as((ffn, form.rank), dtype)}
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for i in range(shape.matrices):
        found |= {f"codes{i}": ((ffn, groups * 4 * form.bits), "uint8"), f"scales{i}": ((ffn, groups), "float16")}
        found |= {f"bias{i}": ((ffn,), "float32")} if shape.ffn_bias else {}
    if form.reads == "stream":
        found |= {"norm": ((hidden,), "float32")}
        found |= {"norm_bias": ((hidden,), "float32")} if shape.norm == "layer" else {}
    found |= {"weight": ((ffn,), "float32")} if form.weighted else {}
    found |= {"shift": ((hidden,), "float32")} if form.is_shifted else {}
    if form.rank:
        found |= {"narrow": matrix_as((form.rank, hidden), dtype), "wide": matrix_as((hidden, form.rank), dtype)}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One predictor of a folder: sigmoid(slope * score + intercept) is how often such a neuron is live."""

    layer: int  # whose neurons it scores
    lead: int
    form: Form
    slope: float = 1.0
    intercept: float = 0.0
    metrics: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """Of its arrays in the folder."""
        return f"{self.lead:03}-{self.layer:03}"

    def arrays(self, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], bool]]:
        """{name: (shape, whether in the manifest's dtype, else float32)} of what a folder keeps, for (hidden, ffn).

        histogram: of the calibrated probabilities x 255, on held-out tokens. Copies of gates are made again.
        """
        hidden, ffn = shape
        kept: dict[str, tuple[tuple[int, ...], bool]] = {"histogram": ((256,), False)}
        if self.form.kind == "mlp":
            return kept | {"fc1": ((self.form.rank, hidden), True), "fc2": ((ffn, self.form.rank), True)}
        if self.form.is_shifted:
            kept["shift"] = ((hidden,), False)
        if self.form.rank:
            kept |= {"narrow": ((self.form.rank, hidden), True), "wide": ((hidden, self.form.rank), True)}
        return kept


def entry_of(record: Any, layers: int) -> Entry:
    """The entry that a manifest tells of; ValueError: it tells of none."""
    if not isinstance(record, Mapping) or {*record} != {field.name for field in fields(Entry)}:
        raise ValueError("an entry must have layer, lead, form, slope, intercept and metrics")
    form = record["form"]
    if not isinstance(form, Mapping) or {*form} != {field.name for field in fields(Form)}:
        raise ValueError("a form must have kind, bits, rank, reads and weighted")
    whole = (record["layer"], record["lead"], form["bits"], form["rank"])
    if any(not isinstance(value, int) or isinstance(value, bool) for value in whole):
        raise ValueError("layer, lead, bits and rank must be integers")
    if not 0 <= record["lead"] <= record["layer"] < layers:
        raise ValueError(f"layer must be from its lead to {layers - 1}, got {record['layer']} with {record['lead']}")
    real = (record["slope"], record["intercept"])
    if any(not isinstance(v, int | float) or isinstance(v, bool) or not math.isfinite(v) for v in real):
        raise ValueError("slope and intercept must be finite numbers")
    if not isinstance(form["weighted"], bool) or not isinstance(record["metrics"], dict | None):
        raise ValueError("weighted must be true or false, metrics an object or null")
    values: dict[str, Any] = {**record, "form": Form(**form)}
    return Entry(**values)
