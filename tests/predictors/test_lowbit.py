"""Packed low-bit copies against float64, at every width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.errors import NumericalError
from hostcompute import ffi
from predictors.lowbit import (
    BLOCK_BYTES,
    dequantise,
    lowbit_bytes,
    lowbit_scores,
    lowbit_scores_reference,
    quantise,
)

SHAPES = [(7, 32), (50, 33), (600, 40), (9, 5), (3, 100)]


def matrix_of(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * 0.05


def plain_copy(matrix, bits, scales):
    """The nearest level for every element in float64, group by group, with the scales of the copy."""
    out = np.zeros(matrix.shape)
    half = (2**bits - 1) / 2
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            scale = float(scales[row, column // 32])
            levels = (np.arange(2**bits) - half) * scale
            out[row, column] = levels[np.abs(levels - float(matrix[row, column])).argmin()]
    return out


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_round_trip(bits, shape):
    matrix = matrix_of(*shape)
    packed = quantise(matrix, bits)
    groups = -(-shape[1] // 32)
    assert packed.codes.shape == (shape[0], groups * 4 * bits) and packed.codes.dtype == np.uint8
    assert packed.scales.shape == (shape[0], groups) and packed.scales.dtype == np.float16
    assert packed.bytes == lowbit_bytes(*shape, bits) == packed.codes.nbytes + packed.scales.nbytes
    expected = plain_copy(matrix, bits, packed.scales)
    worst = np.abs(dequantise(packed) - expected)
    # float32 against float64 may round an element in the middle between two levels the other way
    assert (worst > 1e-6).mean() < 1e-3 and dequantise(packed).shape == shape


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_error_shrinks_as_it_must(bits):
    matrix = matrix_of(200, 96)
    error = np.square(dequantise(quantise(matrix, bits)) - matrix).mean() / np.square(matrix).mean()
    assert error < {1: 0.37, 2: 0.12, 4: 0.009, 8: 4e-5}[bits]  # Gaussian optimum: 0.363, 0.117, 0.0115 without groups


def test_one_bit_is_sign_times_mean_also_in_a_short_group():
    matrix = matrix_of(4, 40)
    packed = dequantise(quantise(matrix, 1))
    for group in (slice(0, 32), slice(32, 40)):
        mean = np.abs(matrix[:, group]).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(packed[:, group], np.sign(matrix[:, group]) * mean, rtol=1e-3)


def test_what_cannot_be_copied():
    with pytest.raises(ValueError, match="bits must be 1, 2, 4 or 8, got 3"):
        quantise(matrix_of(2, 32), 3)
    for bad in (np.nan, np.inf, 1e6):
        matrix = matrix_of(3, 32)
        matrix[1, 5] = bad
        with pytest.raises(NumericalError, match="finite and within float16"):
            quantise(matrix, 4)
    zeros = np.zeros((3, 64), np.float16)
    assert all(not dequantise(quantise(zeros, bits)).any() for bits in (1, 2, 4, 8))


def test_any_float_type():
    matrix = jnp.asarray(matrix_of(5, 64), jnp.bfloat16)
    narrow, wide = quantise(np.asarray(matrix), 4), quantise(np.asarray(matrix, np.float32), 4)
    np.testing.assert_array_equal(narrow.codes, wide.codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(50, 33), (1100, 512), (8 * 300, 2048)])
@pytest.mark.parametrize("rows", [1, 3])
def test_scores_are_the_product(bits, shape, rows):
    matrix = matrix_of(*shape)
    packed = quantise(matrix, bits)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape[1])), jnp.float32)
    expected = np.asarray(x, np.float64) @ dequantise(packed).astype(np.float64).T
    with jax.numpy_dtype_promotion("strict"):
        for function in (lowbit_scores, lowbit_scores_reference):
            found = jax.jit(function, static_argnums=3)(x, packed.codes, packed.scales, bits)
            assert found.shape == (rows, shape[0]) and found.dtype == jnp.float32
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * scale)
            with pytest.raises(AssertionError):
                np.testing.assert_allclose(found[:, ::-1], expected, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_scores_on_the_cpu_with_and_without_the_library(monkeypatch, bits, available):
    """The host's kernels if they can be had, blocks if not: both within rounding of the reference."""
    if not available:
        monkeypatch.setattr(ffi, "unavailable", lambda: "tried without")
    elif (reason := ffi.unavailable()) is not None:
        pytest.skip(reason)
    for shape in ((130, 33), (70, 1001), (300, 512)):
        packed = quantise(matrix_of(*shape), bits)
        lengths = np.linalg.norm(dequantise(packed), axis=1)
        for rows in (1, 2, 3, 8):
            x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, shape[1])), jnp.float32)
            program = jax.jit(lambda x, c, s: lowbit_scores(x, c, s, bits)).lower(x, packed.codes, packed.scales)
            assert (ffi.LOWBIT in program.as_text()) == available
            found = program.compile()(x, packed.codes, packed.scales)
            wanted = lowbit_scores_reference(x, packed.codes, packed.scales, bits)
            limit = 3e-6 * np.linalg.norm(x, axis=1)[:, None] * lengths
            assert (np.abs(np.asarray(found) - wanted) <= limit).all()
            assert not (np.abs(np.asarray(found)[:, ::-1] - wanted) <= limit).all()


def test_other_platforms_do_without_the_library():
    packed = quantise(matrix_of(40, 64), 2)
    traced = jax.jit(lambda x: lowbit_scores(x, packed.codes, packed.scales, 2)).trace(jnp.ones((1, 64)))
    assert ffi.LOWBIT not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_no_large_temporary_forward_and_backward():
    packed = quantise(matrix_of(6000, 1024), 2)
    whole = 4 * 6000 * 1024  # unpacked

    def temporary(function):
        x = jax.ShapeDtypeStruct((2, 1024), jnp.float32)
        memory = jax.jit(function).lower(x, packed.codes, packed.scales).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    forward = temporary(lambda x, c, s: lowbit_scores(x, c, s, 2))
    backward = temporary(jax.grad(lambda x, c, s: jnp.square(lowbit_scores(x, c, s, 2)).sum()))
    assert max(forward, backward) < 4 * BLOCK_BYTES < whole / 2


def test_gradient():
    packed = quantise(matrix_of(1100, 512), 4)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 512)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((2, 1100)), jnp.float32)
    found = jax.grad(lambda x: (lowbit_scores(x, packed.codes, packed.scales, 4) * weights).sum())(x)
    expected = np.asarray(weights, np.float64) @ dequantise(packed)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gradient_is_that_of_the_blocks(bits):
    """In x; codes and scales have none."""
    packed = quantise(matrix_of(1100, 1001), bits)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 1001)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((2, 1100)), jnp.float32)

    def gradient(scores):
        return jax.jit(jax.grad(lambda x: (scores(x) * weights).sum()))(x)

    found = gradient(lambda x: lowbit_scores(x, packed.codes, packed.scales, bits))
    wanted = gradient(lambda x: lowbit_scores_reference(x, packed.codes, packed.scales, bits))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found[:, ::-1], wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    scales = jax.grad(lambda s: lowbit_scores(x, packed.codes, s, bits).sum())(packed.scales)
    assert not np.any(scales)


def test_in_a_program_with_donated_neighbours():
    packed = quantise(matrix_of(40, 64), 4)

    def program(x, state, codes, scales):
        z = lowbit_scores(x, codes, scales, 4)
        return z, state + z

    x, state = jnp.ones((1, 64), jnp.float32), jnp.zeros((1, 40), jnp.float32)
    compiled = jax.jit(program, donate_argnums=1).lower(x, state, packed.codes, packed.scales).compile()
    z, total = compiled(x, state, packed.codes, packed.scales)
    np.testing.assert_array_equal(z, total)
