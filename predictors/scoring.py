"""Scores of any form, and what the engine makes of them, for use inside its programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from predictors.forms import Form, Shape
from predictors.gate import gate_scores
from predictors.mlp import mlp_scores


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
