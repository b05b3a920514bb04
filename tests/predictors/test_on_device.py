"""Trained matrices as the device has them: in eight bits where whole groups fill a row, else as their folder."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.errors import NumericalError
from dynajax.quant import pack
from hostcompute.packed import unpack
from predictors.forms import Form, Shape, form_bytes, param_shapes
from predictors.gate import GateSource, gate_params
from predictors.mlp import mlp_start
from predictors.scoring import on_device, scores
from predictors.selection import mlp_rank

SHAPE = Shape(layers=2, hidden=128, ffn=192)
MLP, CORRECTED = Form(kind="mlp", rank=64), Form(kind="gate", bits=4, rank=32).at(1)
MATRICES = ("fc1", "fc2", "narrow", "wide")


def params_of(shape: Shape, form: Form, dtype: str = "float16") -> dict[str, np.ndarray]:
    """As a folder gives them."""
    rng = np.random.default_rng(0)
    if form.kind == "mlp":
        found = mlp_start(shape, form.rank, rng)
    else:
        rows = rng.standard_normal((shape.ffn, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5)
        narrow = rng.standard_normal((form.rank, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5)
        wide = rng.standard_normal((shape.hidden, form.rank), np.float32)
        kept = {"shift": rng.standard_normal(shape.hidden, np.float32), "narrow": narrow, "wide": wide}
        source = GateSource(rows=(rows,), norm=np.ones(shape.hidden, np.float32))
        found = gate_params(shape, form, source, trained=kept)
    return {name: value.astype(jnp.dtype(dtype)) if name in MATRICES else value for name, value in found.items()}


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("form", [MLP, CORRECTED], ids=["mlp", "corrected"])
def test_packed_scores(form, rows):
    """Within a hundredth of their spread of the float ones, and exactly those of what the packed matrices stand for."""
    params = params_of(SHAPE, form)
    held = on_device(params, SHAPE, form)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, SHAPE.hidden)), jnp.float32)
    ask = jax.jit(scores, static_argnums=(2, 3))
    with jax.numpy_dtype_promotion("strict"):
        plain, found = (np.asarray(ask(some, x, SHAPE, form)) for some in (params, held))
    packed = [name for name in MATRICES if name in held]
    assert len(packed) == 2 and all(held[name].dtype == np.uint8 for name in packed)

    def error(z: np.ndarray) -> float:
        return float(np.sqrt(np.mean(np.square(z - plain))) / plain.std())

    assert 0 < error(found) < 0.01
    coarse = held | {name: pack(params[name], 4) for name in packed}
    assert error(np.asarray(ask(coarse, x, SHAPE, form))) > 0.03  # or the bound would hold for anything
    meant = ask(held | {name: unpack(held[name]) for name in packed}, x, SHAPE, form)
    np.testing.assert_allclose(found, meant, rtol=0, atol=1e-5 * plain.std())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "rank", "packed"),
    [
        (128, 64, {"fc1", "fc2", "narrow", "wide"}),
        (128, 40, {"fc1", "narrow"}),
        (136, 32, {"fc2", "wide"}),
        (136, 40, set()),
    ],
)
@pytest.mark.parametrize("kind", ["mlp", "gate"])
def test_what_is_packed(kind, hidden, rank, packed, dtype):
    """Rows of whole groups and nothing else; dimensions, types and bytes are those that were planned."""
    shape = replace(SHAPE, hidden=hidden)
    form = Form(kind=kind, rank=rank, bits=0 if kind == "mlp" else 2).at(1)
    params = params_of(shape, form, dtype)
    held = on_device(params, shape, form)
    assert {name: (array.shape, jnp.dtype(array.dtype).name) for name, array in held.items()} == param_shapes(
        shape, form, dtype
    )
    assert form_bytes(shape, form, dtype) == sum(array.nbytes for array in held.values())
    for name in params:
        if name in packed:
            assert held[name].nbytes == prod(params[name].shape) * 34 // 32
        else:
            assert held[name].tobytes() == params[name].tobytes()


def test_magnitudes_that_no_group_can_hold_are_refused():
    params = params_of(SHAPE, MLP, "float32")
    params["fc1"][3, 5] = 1e5
    with pytest.raises(NumericalError, match="within float16"):
        on_device(params, SHAPE, MLP)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, hidden=136), Shape(layers=1, hidden=2048, ffn=5632)])
def test_the_mlp_of_a_gates_bytes(shape, bits):
    """No larger rank takes as little."""
    limit = form_bytes(shape, Form(kind="gate", bits=bits))
    rank = mlp_rank(shape, bits)
    assert form_bytes(shape, Form(kind="mlp", rank=rank)) <= limit
    assert all(form_bytes(shape, Form(kind="mlp", rank=more)) > limit for more in range(rank + 1, 2 * rank + 64))
