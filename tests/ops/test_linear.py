"""Products and norms against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops.linear import contract, layer_norm, rms_norm

RTOL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of the largest sum of absolute products


def operands(dtype, seed=0):
    rng = np.random.default_rng(seed)
    a = jnp.asarray(rng.standard_normal((3, 5, 32)), jnp.float32)
    b = jnp.asarray(rng.standard_normal((7, 32)), dtype)
    return a, b


def as_float64(array):
    return np.asarray(array).astype(np.float64)


def assert_product(found, a, b, dtype):
    a, b = as_float64(a), as_float64(b)
    scale = np.einsum("BTD,FD->BTF", np.abs(a), np.abs(b)).max()
    np.testing.assert_allclose(as_float64(found), np.einsum("BTD,FD->BTF", a, b), rtol=0, atol=RTOL[dtype] * scale)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("compiled", [False, True])
def test_contract(dtype, compiled):
    a, b = operands(dtype)
    run = jax.jit(contract, static_argnums=0) if compiled else contract
    found = run("BTD,FD->BTF", a, b)
    assert found.dtype == jnp.float32 and found.shape == (3, 5, 7)
    assert_product(found, a, b, dtype)
    for wrong in (found * (1 + 20 * RTOL[dtype]), found.at[0, 0, 0].add(0.5), found[:, :, ::-1]):
        with pytest.raises(AssertionError):
            assert_product(wrong, a, b, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_are_wider_than_the_weights(dtype):
    """2,048 ones and then ones that a 16-bit sum would swallow."""
    ones = jnp.ones((1, 6000), dtype)
    found = contract("TD,FD->TF", jnp.ones((1, 6000), jnp.float32), ones)
    assert found.tolist() == [[6000.0]]
    assert jnp.einsum("TD,FD->TF", ones, ones).dtype == ones.dtype  # what would happen without asking


def dots(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"] + [
        eqn
        for outer in jaxpr.eqns
        for inner in outer.params.values()
        if hasattr(inner, "jaxpr")
        for eqn in dots(inner.jaxpr)
    ]


@pytest.mark.parametrize("dtype", RTOL)
def test_float32_weights_ask_for_full_precision(dtype):
    """The CPU always computes so; a GPU would take TF32."""
    (dot,) = dots(jax.make_jaxpr(lambda a, b: contract("BTD,FD->BTF", a, b))(*operands(dtype)).jaxpr)
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert (dot.params["precision"] == highest) == (dtype == "float32")
    assert {var.aval.dtype for var in dot.invars} == {jnp.dtype(dtype)}
    assert dot.params["preferred_element_type"] == jnp.float32


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
