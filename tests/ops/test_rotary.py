"""Rotary positions against float64 NumPy: complex numbers turned, and frequencies computed pair by pair."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.config import Rope
from dynajax.ops.rotary import frequencies, rotate

THETA = 10_000.0


def rotate_reference(x, positions, frequency, scale=1.0):
    """The pair (i, i + H/2) as a complex number, turned by position * frequency."""
    x = np.asarray(x).astype(np.float64)
    half = x.shape[-1] // 2
    turn = scale * np.exp(1j * np.asarray(positions)[:, :, None, None] * np.asarray(frequency, np.float64))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def plain(size, theta=THETA):
    return theta ** (-2 * np.arange(size // 2) / size)


def heads(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(("size", "theta"), [(2, THETA), (8, 500.0), (64, 1e6)])
@pytest.mark.parametrize(("last", "atol"), [(100, 3e-5), (4095, 1e-3)])  # a float32 angle of 4,095 is off by 2e-4
def test_rotate(size, theta, last, atol):
    rng = np.random.default_rng(0)
    x, rope = heads(rng, 2, 5, 3, size), Rope(theta=theta)
    positions = jnp.asarray([[0, 1, 2, 50, last], [last, 7, 7, 3, 0]], jnp.int32)
    run = jax.jit(rotate, static_argnums=2)
    found, expected = run(x, positions, rope), rotate_reference(x, positions, plain(size, theta))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=atol)
    for wrong in (run(x, positions + 1, rope), run(x, -positions, rope), run(x[..., ::-1], positions, rope)):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(wrong, expected, atol=atol)


def test_rotate_notices_another_base_and_another_order_of_pairs():
    x = heads(np.random.default_rng(0), 1, 4, 2, 8)
    positions = jnp.arange(4, dtype=jnp.int32)[None, :]
    expected = rotate_reference(x, positions, plain(8))
    interleaved = rotate(x.reshape(1, 4, 2, 4, 2).swapaxes(-1, -2).reshape(x.shape), positions, Rope())
    for wrong in (rotate(x, positions, Rope(theta=THETA / 2)), interleaved):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(wrong, expected, atol=3e-5)


def test_yarn_scales_what_it_turns():
    x, positions = heads(np.random.default_rng(0), 1, 4, 2, 8), jnp.arange(4, dtype=jnp.int32)[None, :]
    rope = Rope(kind="yarn", factor=4.0, original_positions=64, attention_factor=1.25)
    expected = rotate_reference(x, positions, frequencies(rope, 8), 1.25)
    np.testing.assert_allclose(rotate(x, positions, rope), expected, atol=3e-5)
    np.testing.assert_allclose(np.linalg.norm(rotate(x, positions, rope)), 1.25 * np.linalg.norm(x), rtol=1e-5)


# --- frequencies, pair by pair --------------------------------------------------------------------------


def llama3_pair(frequency, rope):
    """By wavelength, as Llama 3.1's own code has it: short ones kept, long ones stretched, a blend between."""
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_positions / rope.high_freq:
        return frequency
    if wavelength > rope.original_positions / rope.low_freq:
        return frequency / rope.factor
    smooth = (rope.original_positions / wavelength - rope.low_freq) / (rope.high_freq - rope.low_freq)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def yarn_pair(pair, size, rope):
    """The ramp in the number of the pair, its ends found by trying every pair's turns in the original context."""
    frequency = rope.theta ** (-2 * pair / size)

    def crossing(turns):
        """The real number of the pair with so many turns, by bisection of a falling function."""
        low, high = -64.0, 64.0 + size
        for _ in range(200):
            middle = (low + high) / 2
            made = rope.original_positions * rope.theta ** (-2 * middle / size) / (2 * math.pi)
            low, high = (middle, high) if made > turns else (low, middle)
        return low

    first, last = crossing(rope.beta_fast), crossing(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first + 1e-9), math.ceil(last - 1e-9)
    first, last = max(first, 0), min(last, size - 1)
    stretched = min(1.0, max(0.0, (pair - first) / max(last - first, 0.001)))
    return stretched * frequency / rope.factor + (1 - stretched) * frequency


LLAMA3 = Rope(theta=5e5, kind="llama3", factor=8.0, original_positions=8192)
YARN = Rope(kind="yarn", factor=16.0, original_positions=4096)
STRETCHED = {
    "linear": (Rope(kind="linear", factor=4.0), 128),
    "llama3": (LLAMA3, 128),
    "llama3 of a small head": (Rope(kind="llama3", factor=3.0, original_positions=100, high_freq=9.0), 16),
    "yarn": (YARN, 128),
    "yarn of a small head": (Rope(kind="yarn", factor=8.0, original_positions=64), 12),
    "yarn with other ends": (Rope(kind="yarn", factor=8.0, original_positions=1024, beta_fast=8, beta_slow=2), 64),
    "yarn not rounded": (Rope(kind="yarn", factor=8.0, original_positions=1024, truncate=False), 64),
    "yarn of a base that turns slowly": (Rope(theta=1e6, kind="yarn", factor=2.0, original_positions=32768), 128),
}


def by_pairs(rope, size):
    base = plain(size, rope.theta)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            return np.array([llama3_pair(frequency, rope) for frequency in base])
        case "yarn":
            return np.array([yarn_pair(pair, size, rope) for pair in range(size // 2)])
    return base


@pytest.mark.parametrize("name", STRETCHED)
def test_frequencies(name):
    rope, size = STRETCHED[name]
    found, expected = frequencies(rope, size), by_pairs(rope, size)
    assert found.dtype == np.float32 and found.shape == (size // 2,)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    share = expected / plain(size, rope.theta)
    assert 1 / rope.factor - 1e-12 <= share.min() and share.max() <= 1 + 1e-12
    if rope.kind != "linear":  # the case is worth something: some pairs are stretched, some kept, some in between
        assert share[-1] < 1 - 1e-9 and share[0] > 1 / rope.factor + 1e-9
        assert ((share > 1 / rope.factor + 1e-9) & (share < 1 - 1e-9)).any()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("linear", {"factor": 5.0}),
        ("llama3", {"factor": 9.0}),
        ("llama3", {"original_positions": 4096}),
        ("llama3", {"low_freq": 1.5}),
        ("llama3", {"high_freq": 5.0}),
        ("yarn", {"factor": 17.0}),
        ("yarn", {"original_positions": 2048}),
        ("yarn", {"beta_fast": 16.0}),
        ("yarn", {"beta_slow": 4.0}),
        ("yarn", {"truncate": False}),
    ],
)
def test_every_field_matters(name, changes):
    rope, size = STRETCHED[name]
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(frequencies(replace(rope, **changes), size), by_pairs(rope, size), rtol=1e-6)


def test_the_published_numbers_of_llama_3_1():
    """Llama-3.1-8B: the first frequency is 1, the last is stretched by 8; pairs 29 to 34 lie on the ramp."""
    share = frequencies(LLAMA3, 128) / plain(128, 5e5)
    assert share[0] == 1 and share[-1] == pytest.approx(1 / 8, rel=1e-6)
    between = np.flatnonzero((share < 1 - 1e-6) & (share > 1 / 8 + 1e-6))
    assert between.tolist() == [29, 30, 31, 32, 33, 34]


def test_a_factor_of_one_stretches_nothing():
    for rope, size in STRETCHED.values():
        np.testing.assert_allclose(frequencies(replace(rope, factor=1.0), size), plain(size, rope.theta), rtol=1e-6)
