"""Attention over a cache as a custom call, against float64 NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hostcompute import HostPool
from hostcompute.ffi import attend_ffi, unavailable
from tests.hostcompute.cases import DTYPES, ISAS, make_pool

SHAPES = [  # batch, tokens, heads, heads of the cache, keys, size, width of values
    (1, 1, 9, 3, 70, 64, 64),
    (2, 3, 4, 4, 33, 20, 12),
    (1, 2, 7, 1, 9, 8, 8),
    (3, 1, 12, 2, 300, 128, 96),
    (2, 7, 4, 4, 50, 20, 12),
    (1, 40, 9, 3, 700, 64, 40),  # more than one piece, and more than one block of keys
]


@pytest.fixture(scope="module", autouse=True)
def handler() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no FFI handler: {reason}")


def operands(shape, dtype, seed=0):
    """q, k, v, positions: 0, the last key and between; behind the farthest query there is what is not finite."""
    batch, tokens, heads, cache_heads, keys, size, width = shape
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, keys, (batch, tokens)).astype(np.int32)
    positions[0, 0] = seed % 2 * (keys - 1)
    q = rng.standard_normal((batch, tokens, heads, size)).astype(np.float32) * 2
    k, v = (rng.standard_normal((batch, keys, cache_heads, n)).astype(dtype) for n in (size, width))
    for row in range(batch):
        k[row, positions[row].max() + 1 :] = v[row, positions[row].max() + 1 :] = np.nan
    return q, k, v, positions


def reference(q, k, v, positions, scale, window=None):
    k, v = k.astype(np.float64), v.astype(np.float64)
    y = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, n in np.ndindex(q.shape[:3]):
        head, end = n // (q.shape[2] // k.shape[2]), positions[b, t] + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        scores = scale * k[b, seen, head] @ q[b, t, n].astype(np.float64)
        share = np.exp(scores - scores.max())
        y[b, t, n] = share / share.sum() @ v[b, seen, head]
    return y


def run(q, k, v, positions, scale, window=None):
    return np.asarray(jax.jit(partial(attend_ffi, scale=scale, window=window))(*map(jnp.asarray, (q, k, v, positions))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_right(shape, dtype):
    for seed in range(3):
        for window in (None, 1, 5):
            case, scale, atol = operands(shape, dtype, seed), 0.3, 1e-5 if shape[4] > 500 else 5e-6
            found, expected = run(*case, scale, window), reference(*case, scale, window)
            np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
            if window != 1 and case[3].max() > 1:
                with pytest.raises(AssertionError):
                    np.testing.assert_allclose(run(*case, 0.31, window), expected, rtol=0, atol=atol)
                with pytest.raises(AssertionError):
                    np.testing.assert_allclose(run(*case, scale, 2), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5]])
@pytest.mark.parametrize("isa", ISAS)
def test_threads_do_not_change_a_bit_and_every_isa_is_right(isa, shape):
    case = operands(shape, np.float16)
    expected = reference(*case, 0.1)
    found = []
    for threads in (1, 2, 3):
        with make_pool(isa, threads):  # the one opened first is every program's
            found.append(run(*case, 0.1))
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_far_scores_and_bits(pool: HostPool):
    """Scores far below the largest weigh nothing and give no NaN; NaN shows; uint16 holds the bits of bfloat16."""
    q, k, v, positions = operands(SHAPES[0], ml_dtypes.bfloat16, 1)
    q *= 1000
    found = run(q, k, v, positions, 1.0)
    np.testing.assert_allclose(found, reference(q, k, v, positions, 1.0), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(run(q, k.view(np.uint16), v.view(np.uint16), positions, 1.0), found)
    k[0, 3] = np.nan
    assert np.isnan(run(q, k, v, positions, 1.0)).all()


def test_no_key_gives_zeros():
    q, k, v, positions = operands(SHAPES[1], np.float32)
    assert not run(q, k, v, positions * 0 - 1, 1.0).any()
    far = run(q, np.nan_to_num(k), np.nan_to_num(v), positions * 0 + 10**6, 1.0)  # all there are
    np.testing.assert_allclose(
        far, reference(q, np.nan_to_num(k), np.nan_to_num(v), positions * 0 + 32, 1.0), atol=5e-6
    )


def test_it_keeps_off_what_it_cannot_read():
    q, k, v, positions = map(jnp.asarray, operands(SHAPES[1], np.float32))
    call = partial(attend_ffi, scale=1.0)
    for wrong, reason in (
        ((q.astype(jnp.float16), k, v, positions), "q must be float32"),
        ((q, k, v.astype(jnp.float16), positions), "k and v must be"),
        ((q, k.astype(jnp.int8), v.astype(jnp.int8), positions), "k and v must be"),
        ((q, k[:, :4], v, positions), "fit q"),
        ((q, k[:1], v[:1], positions), "fit q"),
        ((q[:, :, :3], k[:, :, :2], v[:, :, :2], positions), "fit q"),
        ((q, k[..., :4], v, positions), "fit q"),
        ((q, k, v, positions[:, :1]), "positions must be int32"),
        ((q, k, v, positions.astype(jnp.float32)), "positions must be int32"),
    ):
        with pytest.raises(ValueError, match=reason):
            call(*wrong)
    with pytest.raises(ValueError, match="window must be >= 1"):
        call(q, k, v, positions, window=0)
