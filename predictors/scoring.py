"""Scores of any form, what they are made from on the device, and what the engine makes of them in its programs."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.quant import pack
from predictors.forms import MATRIX_BITS, Form, Shape, param_shapes
from predictors.gate import gate_scores
from predictors.mlp import mlp_scores


def on_device(params: Mapping[str, npt.NDArray], shape: Shape, form: Form) -> dict[str, npt.NDArray]:
    """Parameters, or some of them, as `param_shapes` has them: trained matrices that are packed there become packed.

    NumericalError: one of these is not finite, or beyond float16.
    """
    held = {name: kind for name, (_, kind) in param_shapes(shape, form).items()}
    return {
        name: pack(array, MATRIX_BITS) if held[name] == "uint8" and array.dtype != np.uint8 else np.asarray(array)
        for name, array in params.items()
    }


def scores(params: dict[str, jax.Array], x: jax.Array, shape: Shape, form: Form) -> jax.Array:
    """x [B, D], the vector that `form` reads -> raw scores [B, F] float32; `shape` and `form` are static."""
    if x.shape[1:] != (shape.hidden,):
        raise ValueError(f"x must be [B, {shape.hidden}], without a bias column, got {x.shape}")
    return mlp_scores(params, x) if form.kind == "mlp" else gate_scores(params, x, shape, form)


def probabilities(z: jax.Array, slope: jax.Array, intercept: jax.Array) -> jax.Array:
    """sigmoid(slope z + intercept); slope and intercept are scalars, of the layer."""
    return jax.nn.sigmoid(z * slope + intercept)


def to_uint8(p: jax.Array) -> jax.Array:
    """Probabilities as the planner takes them, x 255 and rounded."""
    return jnp.rint(p * jnp.float32(255)).astype(jnp.uint8)
