"""Gate predictors against float64: every activation, both vectors, correctors, bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.config import Activation
from predictors.calibration import recall_at
from predictors.forms import Form, Shape, form_bytes
from predictors.gate import GateSource, copies, gate_params
from predictors.lowbit import dequantise
from predictors.mlp import mlp_scores, mlp_start
from predictors.scoring import probabilities, scores, to_uint8

D, F, R = 40, 70, 6
RELU, SILU, DRELU = (Activation(kind=kind) for kind in ("relu", "silu", "drelu"))
BASE = Shape(layers=3, hidden=D, ffn=F)


def source_of(shape, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*size):
        return rng.standard_normal(size).astype(np.float32)

    return GateSource(
        rows=tuple(draw(shape.ffn, shape.hidden) * np.float32(shape.hidden**-0.5) for _ in range(shape.matrices)),
        norm=1 + 0.2 * draw(shape.hidden),
        norm_bias=0.3 * draw(shape.hidden) if shape.norm == "layer" else None,
        biases=tuple(draw(shape.ffn) for _ in range(shape.matrices if shape.ffn_bias else 0)),
        down_norm=np.abs(draw(shape.ffn)),
    )


def trained_of(form, seed=1):
    rng = np.random.default_rng(seed)

    def draw(*size):
        return rng.standard_normal(size).astype(np.float32)

    kept = {"shift": draw(D)} if form.is_shifted else {}
    return kept | ({"narrow": draw(form.rank, D) / 6, "wide": draw(D, form.rank)} if form.rank else {})


def plain(shape, form, source, trained, x):
    """What the scores must be, in float64, from the unpacked copies."""
    x = x.astype(np.float64)
    kept = {name: value.astype(np.float64) for name, value in trained.items()}
    moved = x + kept.get("shift", 0)
    if form.rank:
        unit = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
        moved = moved + np.maximum(unit @ kept["narrow"].T, 0) @ kept["wide"].T
    if form.reads == "stream":
        if shape.norm == "layer":
            moved = moved - moved.mean(axis=1, keepdims=True)
        moved = moved / np.sqrt((moved * moved).mean(axis=1, keepdims=True) + shape.norm_eps) * source.norm
        if source.norm_bias is not None:
            moved = moved + source.norm_bias
    products = [moved @ dequantise(copy).astype(np.float64).T for copy in copies(source, form.bits)]
    products = [p + b for p, b in zip(products, source.biases, strict=True)] if source.biases else products
    if shape.activation.kind == "drelu":
        return np.minimum(*products)
    if shape.activation.kind == "silu":
        value = products[0] / (1 + np.exp(-products[0])) * (products[1] if len(products) == 2 else 1)
        return np.log(np.abs(value * (source.down_norm if form.weighted else 1)) + 1e-30)
    return products[0]


SHAPES = {
    "relu": BASE,
    "layer norm, biases": Shape(layers=3, hidden=D, ffn=F, gated=False, norm="layer", ffn_bias=True),
    "silu": Shape(layers=3, hidden=D, ffn=F, activation=SILU),
    "silu without gate": Shape(layers=3, hidden=D, ffn=F, activation=SILU, gated=False),
    "drelu": Shape(layers=3, hidden=D, ffn=F, activation=DRELU),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rank", [0, R])
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("bits", [1, 4])
def test_scores(shape, rank, lead, bits):
    form = Form(kind="gate", bits=bits, rank=rank, weighted=shape.activation.kind == "silu").at(lead)
    assert form.reads == ("stream" if lead else "normed")
    source, trained = source_of(shape), trained_of(form)
    params = gate_params(shape, form, source, trained=trained)
    x = np.random.default_rng(3).standard_normal((4, D)).astype(np.float32) * 2
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(scores, static_argnums=(2, 3))(params, jnp.asarray(x), shape, form)
    expected = plain(shape, form, source, trained, x)
    assert found.dtype == jnp.float32
    loud = expected > -10  # fainter ones are cut off
    np.testing.assert_allclose(np.asarray(found)[loud], expected[loud], rtol=1e-4, atol=1e-4)
    assert loud.mean() > 0.95
    half = {name: value.astype(np.float16) if name in ("narrow", "wide") else value for name, value in params.items()}
    assert form_bytes(shape, form) == sum(array.nbytes for array in half.values())


def test_recall_of_four_bits_at_lead_0():
    shape = Shape(layers=1, hidden=192, ffn=768)
    source = source_of(shape)
    form = Form(kind="gate", bits=4)
    h = np.random.default_rng(4).standard_normal((64, 192)).astype(np.float32)
    for shift in (0.0, 1.0):  # half of the neurons live, and one in six
        live = h @ source.rows[0].T > shift
        z = scores(gate_params(shape, form, source), jnp.asarray(h), shape, form)
        assert recall_at(np.asarray(z), live, 1.3)[0] >= 0.97
        assert recall_at(np.asarray(z), live, 1.0)[0] < 1  # or the test could not fail


def test_untrained_shift_is_zero_and_missing_correctors_are_refused():
    form = Form(kind="gate", bits=2).at(1)
    assert not gate_params(BASE, form, source_of(BASE))["shift"].any()
    with pytest.raises(ValueError, match="a corrector of rank 6 needs shift, narrow, wide, got"):
        gate_params(BASE, Form(kind="gate", bits=2, rank=6).at(1), source_of(BASE))
    with pytest.raises(ValueError, match="2 matrices of a neuron"):
        gate_params(SHAPES["silu"], form, source_of(BASE))
    with pytest.raises(ValueError, match="without a bias column"):
        scores(gate_params(BASE, form, source_of(BASE)), jnp.ones((1, D + 32)), BASE, form)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kind": "tree"}, "kind must be gate or mlp"),
        ({"kind": "gate", "bits": 3}, "bits must be"),
        ({"kind": "gate"}, "bits must be"),
        ({"kind": "mlp"}, "rank must be from 1"),
        ({"kind": "mlp", "rank": 4, "bits": 2}, "an mlp has neither"),
        ({"kind": "gate", "bits": 1, "rank": -1}, "rank must be from 0"),
        ({"kind": "mlp", "rank": 4, "reads": "tea"}, "reads stream or normed"),
    ],
)
def test_forms_that_are_none(values, named):
    with pytest.raises(ValueError, match=named):
        Form(**values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_mlp(dtype):
    params = {
        name: jnp.asarray(10 * value, dtype) for name, value in mlp_start(BASE, R, np.random.default_rng(0)).items()
    }
    x = np.random.default_rng(1).standard_normal((3, D)).astype(np.float32)
    fc1, fc2 = (np.asarray(params[name]).astype(np.float64) for name in ("fc1", "fc2"))
    expected = np.maximum(x.astype(np.float64) @ fc1.T, 0) @ fc2.T
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(mlp_scores)(params, x)
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    form = Form(kind="mlp", rank=R)
    assert form_bytes(BASE, form, dtype) == sum(part.nbytes for part in params.values())
    np.testing.assert_array_equal(scores(params, jnp.asarray(x), BASE, form), mlp_scores(params, jnp.asarray(x)))


def test_probabilities_as_the_planner_takes_them():
    z = jnp.asarray([[-100.0, -1.0, 0.0, 100.0]], jnp.float32)
    with jax.numpy_dtype_promotion("strict"):
        p = probabilities(z, jnp.float32(2), jnp.float32(1))
        found = to_uint8(p)
    np.testing.assert_allclose(p, 1 / (1 + np.exp(-(2 * np.asarray(z, np.float64) + 1))), atol=1e-6)
    assert found.dtype == jnp.uint8 and found.tolist() == [[0, 69, 186, 255]]
