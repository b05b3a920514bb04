"""Products and norms against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops import linear
from dynajax.ops.linear import as_weights, contract, contract_each, contract_reference, layer_norm, rms_norm
from dynajax.quant import pack

RTOL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of the largest sum of absolute products
TIGHT = dict.fromkeys(RTOL, 1e-6)  # where the other operand is not rounded to the weights' type
PATTERNS = {  # and the shapes of the operands
    "BTD,FD->BTF": ((2, 3, 40), (70, 40)),
    "TD,OD->TO": ((1, 40), (70, 40)),
    "TG,GD->TD": ((5, 70), (70, 40)),
    "BTF,FD->BTD": ((2, 3, 70), (70, 40)),
    "D,OD->O": ((40,), (70, 40)),
    "BTKGH,BSKH->BKGTS": ((2, 3, 2, 4, 8), (2, 20, 2, 8)),
    "BKGTS,BSKH->BTKGH": ((2, 2, 4, 3, 20), (2, 20, 2, 8)),
}


def operands(dtype, seed=0):
    rng = np.random.default_rng(seed)
    a = jnp.asarray(rng.standard_normal((3, 5, 32)), jnp.float32)
    b = jnp.asarray(rng.standard_normal((7, 32)), dtype)
    return a, b


def as_float64(array):
    return np.asarray(array).astype(np.float64)


def assert_product(found, a, b, rtol, subscripts="BTD,FD->BTF"):
    a, b = as_float64(a), as_float64(b)
    scale = np.einsum(subscripts, np.abs(a), np.abs(b)).max()
    np.testing.assert_allclose(as_float64(found), np.einsum(subscripts, a, b), rtol=0, atol=rtol * scale)


@pytest.mark.parametrize(("product", "rtol"), [(contract, TIGHT), (contract_reference, RTOL)])
@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("compiled", [False, True])
def test_contract(product, rtol, dtype, compiled):
    a, b = operands(dtype)
    run = jax.jit(product, static_argnums=0) if compiled else product
    found = run("BTD,FD->BTF", a, b)
    assert found.dtype == jnp.float32 and found.shape == (3, 5, 7)
    assert_product(found, a, b, rtol[dtype])
    for wrong in (found * (1 + 20 * rtol[dtype]), found.at[0, 0, 0].add(0.5), found[:, :, ::-1]):
        with pytest.raises(AssertionError):
            assert_product(wrong, a, b, rtol[dtype])


def pattern_operands(subscripts, dtype):
    """b in the type of the weights; uint16 holds the bits of bfloat16."""
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in PATTERNS[subscripts])
    b = b.astype("bfloat16" if dtype == "uint16" else dtype)
    return a, jax.lax.bitcast_convert_type(b, jnp.uint16) if dtype == "uint16" else b


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint16"])
@pytest.mark.parametrize("subscripts", PATTERNS)
def test_no_pattern_rounds_its_input_on_the_cpu(subscripts, dtype):
    a, b = pattern_operands(subscripts, dtype)
    found = jax.jit(contract, static_argnums=0)(subscripts, a, b)
    assert_product(found, a, as_weights(b), 1e-6, subscripts)
    if dtype != "float32":
        rounded = contract_reference(subscripts, a, b)
        assert_product(rounded, a, as_weights(b), RTOL["bfloat16"], subscripts)
        with pytest.raises(AssertionError):
            assert_product(rounded, a, as_weights(b), 1e-6, subscripts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint16"])
@pytest.mark.parametrize("subscripts", PATTERNS)
def test_without_the_library_only_rounding_differs(monkeypatch, subscripts, dtype):
    monkeypatch.setattr(linear.ffi, "unavailable", lambda: "no library")
    a, b = pattern_operands(subscripts, dtype)
    found = jax.jit(lambda a, b: contract(subscripts, a, b))(a, b)
    assert_product(found, a, as_weights(b), RTOL["bfloat16"], subscripts)


def calls(subscripts, dtype):
    """How many custom calls a program of one product makes."""
    a, b = pattern_operands(subscripts, dtype)
    text = jax.jit(contract, static_argnums=0).lower(subscripts, a, b).as_text()
    return text.count(linear.ffi.DOT_ROWS) + text.count(linear.ffi.SUM_ROWS)


def test_matrices_of_16_bits_are_read_by_the_host_kernels():
    assert linear.ffi.unavailable() is None
    counts = {(pattern, dtype): calls(pattern, dtype) for pattern in PATTERNS for dtype in ("float32", "bfloat16")}
    assert counts == {
        (pattern, dtype): int(dtype == "bfloat16" and len(PATTERNS[pattern][1]) == 2) for pattern, dtype in counts
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("subscripts", PATTERNS)
def test_gradients_are_those_of_the_plain_form(subscripts, dtype):
    a, b = pattern_operands(subscripts, dtype)

    def loss(product, a, b):
        return (product(subscripts, a, b) ** 2).sum()

    for run in (jax.grad, lambda *args, **kwargs: jax.jit(jax.grad(*args, **kwargs), static_argnums=0)):
        found, expected = (run(loss, argnums=(1, 2))(product, a, b) for product in (contract, contract_reference))
        for one, other, given in zip(found, expected, (a, b), strict=True):
            assert one.dtype == given.dtype and np.abs(other).max() > 0
            np.testing.assert_allclose(as_float64(one), as_float64(other), rtol=1e-2, atol=0.2)


def test_many_inputs_at_once():
    a, b = pattern_operands("TD,OD->TO", "float16")
    many = jnp.stack([a, 2 * a])
    found = jax.vmap(lambda a: contract("TD,OD->TO", a, b))(many)
    one = contract("TD,OD->TO", a, b)
    np.testing.assert_array_equal(found, jnp.stack([one, 2 * one]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_wider_than_the_weights(dtype):
    """2,048 ones and then ones that a 16-bit sum would swallow."""
    ones = jnp.ones((1, 6000), dtype)
    found = contract("TD,FD->TF", jnp.ones((1, 6000), jnp.float32), ones)
    assert found.tolist() == [[6000.0]]
    assert jnp.einsum("TD,FD->TF", ones, ones).dtype == ones.dtype  # what would happen without asking


@pytest.mark.parametrize("dtype", RTOL)
def test_float32_weights_ask_for_full_precision(dtype):
    """The CPU always computes so; a GPU would take TF32."""
    (dot,) = [
        eqn
        for outer in jax.make_jaxpr(lambda a, b: contract_reference("BTD,FD->BTF", a, b))(*operands(dtype)).eqns
        for inner in [outer.params.get("jaxpr")]
        for eqn in (inner.eqns if inner else [outer])
        if eqn.primitive.name == "dot_general"
    ]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert (dot.params["precision"] == highest) == (dtype == "float32")
    assert {var.aval.dtype for var in dot.invars} == {jnp.dtype(dtype)}
    assert dot.params["preferred_element_type"] == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "packed"])
def test_several_matrices_are_multiplied_in_one_call(dtype):
    if dtype == "packed":
        a, b = jnp.ones((2, 3, 64)), jnp.asarray(pack(np.random.default_rng(1).standard_normal((9, 64)), 4))
    else:
        a, b = pattern_operands("BTD,FD->BTF", dtype)
    matrices = (b, b[:2], b[1:])
    run = jax.jit(contract_each)
    for found, matrix in zip(run(a, matrices), matrices, strict=True):
        np.testing.assert_array_equal(found, jax.jit(contract, static_argnums=0)("BTD,FD->BTF", a, matrix))
    assert run.lower(a, matrices).as_text().count(linear.ffi.DOT_ROWS) == (dtype != "float32")
    mixed = (b, as_weights(b).astype(jnp.float32))
    found, plain = run(a, mixed)
    assert_product(plain, a, as_weights(b), 1e-5)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_several_are_those_of_each(dtype):
    a, b = pattern_operands("BTD,FD->BTF", dtype)

    def loss(each, a, b):
        return sum((y**2).sum() for y in each(a, (b, 2 * b)))

    def apart(a, matrices):
        return [contract_reference("BTD,FD->BTF", a, matrix) for matrix in matrices]

    for found, expected in zip(*(jax.grad(loss, (1, 2))(each, a, b) for each in (contract_each, apart)), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(as_float64(found), as_float64(expected), rtol=1e-2, atol=0.2)


def test_other_platforms_multiply_in_the_type_of_the_weights():
    """What a GPU would be given."""
    a, b = pattern_operands("TD,OD->TO", "float16")
    text = jax.jit(contract, static_argnums=0).trace("TD,OD->TO", a, b).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in text and "xf16>" in text and linear.ffi.DOT_ROWS not in text


def norm_reference(x, weight, eps):
    x, weight = as_float64(x), as_float64(weight)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16)])
def test_rms_norm(dtype, shape):
    rng = np.random.default_rng(1)
    x = jnp.asarray(3 * rng.standard_normal(shape), jnp.float32)
    weight = jnp.asarray(1 + 0.3 * rng.standard_normal(16), dtype)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == jnp.float32 and found.shape == shape
    np.testing.assert_allclose(found, norm_reference(x, weight, 1e-5), rtol=2e-6)
    for wrong in (
        rms_norm(x, weight, 1e-3),
        rms_norm(x - x.mean(-1, keepdims=True), weight, 1e-5),
        rms_norm(x, weight[::-1], 1e-5),
    ):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(wrong, norm_reference(x, weight, 1e-5), rtol=2e-6)


def test_rms_norm_of_almost_nothing():
    x = jnp.full((2, 8), 1e-4, jnp.float32)
    np.testing.assert_allclose(
        rms_norm(x, jnp.ones(8, jnp.float32), 1e-5), norm_reference(x, np.ones(8), 1e-5), rtol=2e-6
    )
    assert not rms_norm(jnp.zeros((2, 8), jnp.float32), jnp.ones(8, jnp.float32), 1e-5).any()


def layer_norm_reference(x, weight, bias, eps):
    x, weight, bias = as_float64(x), as_float64(weight), as_float64(bias)
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * weight + bias


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16)])
def test_layer_norm(dtype, shape):
    rng = np.random.default_rng(1)
    x = jnp.asarray(2 + 3 * rng.standard_normal(shape), jnp.float32)
    weight = jnp.asarray(1 + 0.3 * rng.standard_normal(16), dtype)
    bias = jnp.asarray(0.3 * rng.standard_normal(16), dtype)
    found, expected = layer_norm(x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5)
    assert found.dtype == jnp.float32 and found.shape == shape
    np.testing.assert_allclose(found, expected, rtol=4e-6, atol=2e-6)
    for wrong in (
        layer_norm(x, weight, bias, 1e-3),
        layer_norm(x, weight[::-1], bias, 1e-5),
        layer_norm(x, weight, -bias, 1e-5),
        rms_norm(x, weight, 1e-5) + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,)),
    ):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(wrong, expected, rtol=4e-6, atol=2e-6)


def test_layer_norm_of_a_constant_is_the_bias():
    x, bias = jnp.full((2, 8), 5.0, jnp.float32), jnp.arange(8, dtype=jnp.float32)
    np.testing.assert_array_equal(layer_norm(x, jnp.ones(8, jnp.float32), bias, 1e-5), np.tile(np.arange(8.0), (2, 1)))


def test_a_large_mean_costs_no_precision():
    """The mean of the squares less the square of the mean would lose all digits here."""
    x = jnp.asarray(4096 + np.random.default_rng(0).standard_normal((2, 64)), jnp.float32)
    ones, zeros = jnp.ones(64, jnp.float32), jnp.zeros(64, jnp.float32)
    np.testing.assert_allclose(layer_norm(x, ones, zeros, 1e-5), layer_norm_reference(x, ones, zeros, 1e-5), atol=5e-4)
