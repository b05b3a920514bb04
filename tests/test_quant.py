"""Packing: the layout of the bytes, the error, and what cannot be packed."""

import numpy as np
import pytest

from dynajax.config import stored_bytes
from dynajax.errors import NumericalError
from dynajax.quant import (
    ZERO,
    bits_of,
    dequantise_groups,
    held_as,
    pack,
    pack_into,
    packed_shape,
    quantise_groups,
    symmetric_zero,
    wide_scales,
)
from hostcompute.packed import unpack, widened

SHAPES = [(7, 32), (50, 96), (3, 4, 2, 64)]


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.05


def plain_unpack(packed):
    """By the words of the format, one column at a time."""
    *outer, groups, size = packed.shape
    count, rows = size - 2, packed.reshape(-1, groups * size)
    bits = count // 4
    out = np.empty((len(rows), groups * 32))
    for row, line in enumerate(rows):
        scales = line[groups * count :].view(np.float16)
        for column in range(groups * 32):
            group, element = divmod(column, 32)
            byte = int(line[group * count + element % count])
            code = byte >> bits * (element // count) & 2**bits - 1
            out[row, column] = (code - ZERO[bits]) * float(scales[group])
    return out.reshape(*outer, groups * 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_is_exact(shape, bits):
    packed = pack(values(shape), bits)
    assert packed.shape == packed_shape(shape, bits) == (*shape[:-1], shape[-1] // 32, 4 * bits + 2)
    assert packed.nbytes == stored_bytes(int(np.prod(shape)), f"int{bits}") and bits_of(packed) == bits
    np.testing.assert_array_equal(unpack(packed), plain_unpack(packed))
    np.testing.assert_array_equal(widened(packed), unpack(packed))
    assert widened(values(shape)).dtype == np.float32


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest_and_scales_better_than_the_largest_magnitude(bits):
    given = values((300, 128))
    found = unpack(pack(given, bits))
    scales = np.ascontiguousarray(pack(given, bits).reshape(300, -1)[:, 4 * 4 * bits :]).view(np.float16)
    levels = (np.arange(2**bits) - ZERO[bits])[None, None, :] * scales[:, :, None].astype(np.float64)
    block = given.reshape(300, 4, 32)
    nearest = np.abs(block[..., None] - levels[:, :, None, :]).min(axis=-1)
    np.testing.assert_allclose(np.abs(found.reshape(block.shape) - block), nearest, atol=1e-7)
    plain = wide_scales(block, np.full(4, 32, np.float32), bits)
    coded = quantise_groups(block, bits, plain, symmetric_zero(bits))
    error = np.square(found - given).sum() / np.square(given).sum()
    assert error < 0.95 * np.square(dequantise_groups(coded, bits) - block).sum() / np.square(given).sum()
    assert error < {8: 3e-5, 4: 0.0075}[bits]  # of a Gaussian


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_can_be_filled_by_and_by(bits):
    given = values((40, 96))
    out = np.zeros((40, 3 * (4 * bits + 2)), np.uint8)
    pack_into(given[:, 32:], out, bits, 1)
    pack_into(given[:, :32], out, bits)
    np.testing.assert_array_equal(out.reshape(40, 3, -1), pack(given, bits))
    with pytest.raises(ValueError, match="from 2 on"):
        pack_into(given[:, 32:], out, bits, 2)


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_any_float_type(kind):
    given = values((9, 64)).astype(kind)
    np.testing.assert_array_equal(pack(given, 4), pack(given.astype(np.float32), 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_the_smallest_numbers(bits):
    assert not unpack(pack(np.zeros((3, 64), np.float16), bits)).any()
    tiny = np.full((2, 64), -1e-30, np.float32)
    tiny[0, 3] = 1e-7
    assert np.abs(unpack(pack(tiny, bits))).max() < 3e-7
    large = np.full((1, 32), 59_000, np.float32)
    np.testing.assert_allclose(unpack(pack(large, bits)), large, rtol=2e-3)


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match=r"a positive multiple of 32, got \(4, 40\)"):
        pack(values((4, 40)), 4)
    with pytest.raises(ValueError, match="bits must be 1, 2, 4 or 8, got 3"):
        pack(values((4, 64)), 3)
    with pytest.raises(ValueError, match="34 or 18"):
        unpack(np.zeros((2, 1, 20), np.uint8))
    for bad in (np.nan, np.inf, -np.inf, 1e6):
        given = values((600, 1024))
        given[599, 5] = bad
        with pytest.raises(NumericalError, match="finite and within float16"):
            pack(given, 8)


def test_what_an_engine_packs():
    assert held_as("q", (64, 32), "int4") == ((64, 1, 18), "uint8")
    assert held_as("head", (96, 64), "int4") == ((96, 2, 18), "uint8")
    assert held_as("embed", (96, 64), "int4", tied=True) == ((96, 2, 34), "uint8")
    assert held_as("q", (64, 32), "bfloat16") == ((64, 32), "bfloat16")
    for name, shape in (("ffn_norm", (32,)), ("router", (8, 32)), ("mix", (1, 32)), ("key_up", (64, 32))):
        assert held_as(name, shape, "int8") == (shape, "float32")
