"""The paper's predictor: fc2 relu(fc1 x), low rank, no biases, one per layer, x the stream or the FFN's input.

PowerInfer's published ones read the stream (`Form.reads`), score their own layer, and compare the score with 0.
"""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt

from dynajax.ops.linear import contract
from predictors.forms import Shape


def mlp_start(shape: Shape, rank: int, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Random fc1 [R, D] and fc2 [F, R] for inputs of unit size: hidden units near 1, scores well below it."""
    fc1 = rng.standard_normal((rank, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5)
    fc2 = rng.standard_normal((shape.ffn, rank), np.float32) * np.float32(0.1 * rank**-0.5)
    return {"fc1": fc1, "fc2": fc2}


def mlp_scores(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """x [B, D] -> scores [B, F] float32. The matrices may have any float type, or be packed (see `dynajax.quant`)."""
    return contract("BR,FR->BF", jax.nn.relu(contract("BD,RD->BR", x, params["fc1"])), params["fc2"])
