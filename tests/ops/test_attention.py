"""Attention against float64 NumPy, one query at a time."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops.attention import attention, cached_attention


def heads(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def attention_reference(q, k, v, positions, window=None):
    """Row by row, query by query, head by head: only the keys up to the query's position, the last of them, exist."""
    q, k, v = (np.asarray(array).astype(np.float64) for array in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    out = np.empty(q.shape)
    for row, t, head in np.ndindex(q.shape[:3]):
        end = int(positions[row, t]) + 1
        known = slice(0 if window is None else max(0, end - window), end)
        scores = k[row, known, head // groups] @ q[row, t, head] / np.sqrt(q.shape[3])
        share = np.exp(scores - scores.max())
        out[row, t, head] = share / share.sum() @ v[row, known, head // groups]
    return out


@dataclass(frozen=True, eq=False)
class Case:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: jax.Array


def case(kv_heads=2, dtype="float32", batch=3, seed=0):
    """Queries anywhere in a cache of 24, in no order; behind them the cache holds large rubbish."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((batch, 24, kv_heads, 8)) * 2 for _ in "kv")
    positions = rng.integers(0, 20, (batch, 5))
    positions[0, 0], positions[-1, -1] = 0, 23
    for row in range(batch):
        k[row, positions[row].max() + 1 :] = 1e4
        v[row, positions[row].max() + 1 :] = -1e4
    k, v = jnp.asarray(k, dtype), jnp.asarray(v, dtype)
    return Case(heads(rng, batch, 5, 4, 8), k, v, jnp.asarray(positions, jnp.int32))


ATOL = {"float32": 3e-6, "float16": 5e-3, "bfloat16": 6e-2}


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(kv_heads, dtype):
    run = jax.jit(attention)
    for seed in range(3):
        c = case(kv_heads, dtype, seed=seed)
        found = run(c.q, c.k, c.v, c.positions)
        assert found.dtype == jnp.float32 and found.shape == c.q.shape
        expected = attention_reference(c.q, c.k, c.v, c.positions)
        np.testing.assert_allclose(found, expected, atol=ATOL[dtype])


@pytest.mark.parametrize("window", [1, 2, 7, 19])
def test_a_window(window):
    run = jax.jit(attention, static_argnames="window")
    for seed in range(3):
        c = case(seed=seed)
        expected = attention_reference(c.q, c.k, c.v, c.positions, window)
        np.testing.assert_allclose(run(c.q, c.k, c.v, c.positions, window), expected, atol=ATOL["float32"])
    for other in (window + 1, window - 1 or None, None):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(run(c.q, c.k, c.v, c.positions, other), expected, atol=ATOL["float32"])


@pytest.mark.parametrize("window", [24, 100])
def test_a_window_as_long_as_the_cache_cuts_nothing_off(window):
    c = case()
    np.testing.assert_array_equal(attention(c.q, c.k, c.v, c.positions, window), attention(c.q, c.k, c.v, c.positions))


WRONG = {
    "one key too many": lambda c: attention(c.q, c.k, c.v, c.positions + 1),
    "one key too few": lambda c: attention(c.q, c.k, c.v, jnp.maximum(c.positions - 1, 0)),
    "values for keys": lambda c: attention(c.q, c.v, c.v, c.positions),
    "another row's cache": lambda c: attention(c.q, c.k[::-1], c.v[::-1], c.positions),
    "KV heads swapped": lambda c: attention(c.q, c.k[:, :, ::-1], c.v[:, :, ::-1], c.positions),
    "interleaved groups": lambda c: attention(c.q[:, :, jnp.array([0, 2, 1, 3])], c.k, c.v, c.positions)[
        :, :, jnp.array([0, 2, 1, 3])
    ],
    "another scale": lambda c: attention(c.q * jnp.float32(0.9), c.k, c.v, c.positions),
}


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("fault", WRONG)
def test_the_tolerance_notices(fault, dtype):
    c = case(dtype=dtype)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(WRONG[fault](c), attention_reference(c.q, c.k, c.v, c.positions), atol=ATOL[dtype])


def test_what_lies_behind_the_query_weighs_nothing():
    c = case()
    grown = [jnp.concatenate([part, jnp.full_like(part, 3e4)], axis=1) for part in (c.k, c.v)]
    np.testing.assert_allclose(attention(c.q, *grown, c.positions), attention(c.q, c.k, c.v, c.positions), atol=3e-7)
    only_first = attention(c.q, c.k, c.v, jnp.zeros_like(c.positions))
    np.testing.assert_allclose(only_first, jnp.repeat(c.v[:, :1], 2, axis=2) + jnp.zeros_like(c.q), atol=1e-6)


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 3, 5])
def test_a_prefix_of_a_cache(queries, kv_heads, dtype):
    """By the host's kernels for few queries and for more: nothing is rounded but the sums."""
    run = jax.jit(cached_attention, static_argnames=("prefix", "window"))
    for seed, window in ((0, None), (1, 3), (2, None)):
        c = case(kv_heads, dtype, seed=seed)
        q, where = c.q[:, :queries], jnp.minimum(c.positions[:, :queries], 19)
        found = run(q, c.k, c.v, where, prefix=20, window=window)
        expected = attention_reference(q, c.k, c.v, where, window)
        assert found.dtype == jnp.float32 and found.shape == q.shape
        np.testing.assert_allclose(found, expected, atol=3e-6)
        for wrong in (where + 1, jnp.maximum(where - 1, 0)):
            with pytest.raises(AssertionError):
                np.testing.assert_allclose(run(q, c.k, c.v, wrong, prefix=24, window=window), expected, atol=1e-3)
