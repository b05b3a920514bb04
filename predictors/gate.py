"""The training-free predictor: a low-bit copy of the target layer's gate, asked early; optionally a small corrector.

For lead k >= 1 it reads the stream of layer i and scores layer i + k by its own gate on norm(stream + r), r the mean
difference of the two streams. For lead 0 it reads the FFN's input, and the copy is nearly exact. A trained corrector
goes in front: x + b + B relu(A unit(x)), unit(x) = x / rms(x), b in the place of r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.ops.ffn import activate
from dynajax.ops.linear import contract, layer_norm, rms_norm
from predictors.forms import Form, Shape
from predictors.lowbit import LowBit, lowbit_scores, quantise

Params = dict[str, Any]  # arrays, of NumPy or of jax
_UNIT_EPS = 1e-6
_FAINT = 1e-12  # squared magnitude below which a silu neuron counts as silent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GateSource:
    """What of a layer's weights a gate predictor needs. NumPy, any float type; rows [F, D], the bias column cut off."""

    rows: tuple[npt.NDArray, ...]  # as many as Shape.matrices: the activation's argument, and up for silu and drelu
    norm: npt.NDArray  # [D] of the FFN's norm
    norm_bias: npt.NDArray | None = None
    biases: tuple[npt.NDArray, ...] = ()  # [F] each, beside rows
    down_norm: npt.NDArray | None = None  # [F], for weighted forms


def copies(source: GateSource, bits: int) -> tuple[LowBit, ...]:
    """The low-bit copies of a layer; several forms and leads may share them."""
    return tuple(quantise(rows, bits) for rows in source.rows)


def gate_params(
    shape: Shape,
    form: Form,
    source: GateSource,
    *,
    packed: tuple[LowBit, ...] | None = None,
    trained: dict[str, npt.NDArray] | None = None,
) -> Params:
    """The parameters of one layer, NumPy arrays; `trained` has what a folder keeps (shift, narrow, wide).

    packed: copies made before, None makes them. Without a shift nothing is added.
    """
    if len(source.rows) != shape.matrices or len(source.biases) != shape.matrices * shape.ffn_bias:
        raise ValueError(f"{shape.matrices} matrices of a neuron are needed, with their biases if the model has such")
    params: Params = {}
    for i, copy in enumerate(packed or copies(source, form.bits)):
        params |= {f"codes{i}": copy.codes, f"scales{i}": copy.scales}
        if source.biases:
            params[f"bias{i}"] = source.biases[i].astype(np.float32)
    if form.reads == "stream":
        params["norm"] = source.norm.astype(np.float32)
        if source.norm_bias is not None:
            params["norm_bias"] = source.norm_bias.astype(np.float32)
    if form.weighted:
        if source.down_norm is None:
            raise ValueError("a weighted form needs the norms of the down rows")
        params["weight"] = source.down_norm.astype(np.float32)
    if form.is_shifted:
        params["shift"] = np.zeros(shape.hidden, np.float32)
    wanted = (["shift"] if form.is_shifted else []) + (["narrow", "wide"] if form.rank else [])
    kept = {name: value for name, value in (trained or {}).items() if name in wanted}
    if form.rank and kept.keys() != set(wanted):
        raise ValueError(f"a corrector of rank {form.rank} needs {', '.join(wanted)}, got {sorted(kept)}")
    return {**params, **kept}


def gate_scores(params: Params, x: jax.Array, shape: Shape, form: Form) -> jax.Array:
    """x [B, D], the vector that `form` reads -> scores [B, F] float32, one neuron's larger when it matters more.

    relu, fatrelu: the predicted gate. drelu: the smaller of gate and up, since both must be positive. silu: the log of
    |silu(gate) * up|, weighted by the down row's norm if the form says so; in a model without a gate, of |silu(up)|.
    """
    h = corrected(params, x, shape, form)
    products = []
    for i in range(shape.matrices):
        product = lowbit_scores(h, params[f"codes{i}"], params[f"scales{i}"], form.bits)
        products.append(product + params[f"bias{i}"][None, :] if shape.ffn_bias else product)
    if shape.activation.kind == "drelu":
        return jnp.minimum(products[0], products[1])
    if shape.activation.kind != "silu":
        return products[0]
    value = activate(products[0], shape.activation)
    if shape.matrices == 2:
        value = value * products[1]
    if form.weighted:
        value = value * params["weight"][None, :]
    return jnp.float32(0.5) * jnp.log(value * value + jnp.float32(_FAINT))


def corrected(params: Params, x: jax.Array, shape: Shape, form: Form) -> jax.Array:
    """What the target layer's FFN is expected to read, [B, D]."""
    if form.is_shifted:
        moved = x + params["shift"][None, :]
        if form.rank:
            unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(_UNIT_EPS))
            inner = jax.nn.relu(contract("BD,RD->BR", unit, params["narrow"]))
            moved = moved + contract("BR,DR->BD", inner, params["wide"])
        x = moved
    if form.reads == "normed":
        return x
    if shape.norm == "layer":
        return layer_norm(x, params["norm"], params["norm_bias"], shape.norm_eps)
    return rms_norm(x, params["norm"], shape.norm_eps)
