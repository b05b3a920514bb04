"""Products with packed matrices against float64 on what they stand for, with few rows and with many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops.linear import as_weights, contract
from dynajax.ops.packed import (
    BLOCK_BYTES,
    FEW_ROWS,
    block_dot,
    block_sum,
    dot_reference,
    fused_dot,
    fused_sum,
    packed_dot,
    packed_sum,
    sum_reference,
    unpacked,
)
from dynajax.quant import pack
from hostcompute.packed import unpack

SHAPES = [(7, 32), (50, 96), (600, 8192)]  # the last one: two blocks and a rest
TOKENS = [1, 3, FEW_ROWS + 1]


def products(tokens):
    """The dots and the sums that are for so many tokens."""
    fused = ((fused_dot,), (fused_sum,)) if tokens <= FEW_ROWS else ((), ())
    return (dot_reference, block_dot, packed_dot, *fused[0]), (sum_reference, block_sum, packed_sum, *fused[1])


def case(shape, bits, tokens, seed=0):
    rng = np.random.default_rng(seed)
    packed = pack(rng.standard_normal(shape) * 0.05, bits)
    along, across = (rng.standard_normal((tokens, size)).astype(np.float32) for size in shape[::-1])
    return packed, along, across


def assert_product(found, x, weights):
    """Against float64; relative to the largest sum of magnitudes."""
    assert found.dtype == jnp.float32
    scale = (np.abs(x).astype(np.float64) @ np.abs(weights)).max()
    np.testing.assert_allclose(found, x.astype(np.float64) @ weights, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacked_is_exact(shape, bits):
    packed, _, _ = case(shape, bits, 1)
    np.testing.assert_array_equal(unpacked(packed), unpack(packed))
    np.testing.assert_array_equal(as_weights(jnp.asarray(packed)), unpack(packed))
    np.testing.assert_array_equal(unpacked(packed[3]), unpack(packed)[3])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape, tokens, bits):
    packed, along, across = case(shape, bits, tokens)
    weights = unpack(packed).astype(np.float64)
    dots, sums = products(tokens)
    for product in dots:
        assert_product(jax.jit(product)(along, packed), along, weights.T)
    for product in sums:
        assert_product(jax.jit(product)(across, packed), across, weights)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_tolerance_notices_one_wrong_scale(tokens):
    packed, along, across = case((50, 96), 4, tokens)
    weights = unpack(packed).astype(np.float64)
    rows = packed.reshape(50, -1).copy()
    rows[7, -2] ^= 128  # of the last group's scale: an eighth of it
    wrong = rows.reshape(packed.shape)
    dots, sums = products(tokens)
    for product in dots:
        with pytest.raises(AssertionError):
            assert_product(jax.jit(product)(along, wrong), along, weights.T)
    for product in sums:
        with pytest.raises(AssertionError):
            assert_product(jax.jit(product)(across, wrong), across, weights)


def test_contract_takes_packed_matrices_of_any_rows():
    packed, along, across = case((50, 96), 4, 6)
    weights = unpack(packed).astype(np.float64)
    found = contract("BTD,OD->BTO", along.reshape(2, 3, 96), jnp.asarray(packed))
    assert found.shape == (2, 3, 50)
    assert_product(found.reshape(6, 50), along, weights.T)
    assert_product(contract("TG,GD->TD", across, jnp.asarray(packed)), across, weights)
    with pytest.raises(ValueError, match="a matrix that the last axis of `a` meets, got BTNP,NPC->BTNC"):
        contract("BTNP,NPC->BTNC", along.reshape(1, 3, 2, 96), jnp.asarray(packed))


@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("product", [block_dot, block_sum])
def test_no_temporary_of_the_matrix(product, tokens):
    """The matrix is 64 MiB in float32, 9 MiB packed. Whether `fused_dot` is one pass only a GPU's compiler can say."""
    rows, groups = 4096, 128
    columns = groups * 32
    x = jax.ShapeDtypeStruct((tokens, columns if product is block_dot else rows), jnp.float32)
    packed = jax.ShapeDtypeStruct((rows, groups, 18), jnp.uint8)
    temporary = jax.jit(product).lower(x, packed).compile().memory_analysis().temp_size_in_bytes
    assert temporary <= 2 * BLOCK_BYTES + 2 * 4 * tokens * (rows + columns)
