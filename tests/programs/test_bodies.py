"""The bodies against a whole sequence at once: chunks and single tokens through a cache change nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops.ffn import pool_ffn
from dynajax.programs import bodies, split_chunks
from tests.programs.cases import SHAPES, SPEC, Maker

LENGTH = 45
ATOL = 2e-5
attend_chunk = jax.jit(bodies.attend_chunk, static_argnames="prefix")
attend_rows = jax.jit(bodies.attend_rows, static_argnames="prefix")


@pytest.fixture(scope="module")
def sequence():
    """A block, the stream before it, what the host adds to it, and the block's answer over the whole sequence."""
    make = Maker()
    block, x, y_cold = make.block(), make.floats(LENGTH, SPEC.hidden), make.floats(LENGTH, SPEC.hidden, scale=0.5)
    x, y_cold = np.asarray(x), np.asarray(y_cold)
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
    whole, h = jax.jit(lambda block, x: block(x, positions))(block, (x + y_cold)[None])
    return block, x, y_cold, np.asarray(whole[0]), np.asarray(h[0])


def prefilled(sequence, row, chunks, count, prefix=256):
    """xs, h of each token, and the caches after `count` tokens in chunks; other rows and later positions hold 7."""
    block, x, y_cold, _, _ = sequence
    k = v = np.full(SHAPES.kv_shape, 7, np.float32)
    xs = np.full((SHAPES.ctx, SPEC.hidden), 7, np.float32)
    xs[:count] = x[:count]
    hidden, start = [], 0
    for size, tokens in split_chunks(count, chunks, prefix):
        y = np.zeros((size, SPEC.hidden), np.float32)
        y[:tokens] = y_cold[start : start + tokens]
        xs, h, k, v = attend_chunk(block, k, v, xs, y, np.int32(row), np.int32(start), prefix=prefix)
        hidden.append(np.asarray(h)[:tokens])
        start += tokens
    return np.asarray(xs), np.concatenate(hidden), np.asarray(k), np.asarray(v)


@pytest.mark.parametrize("chunks", [(8,), (8, 32)])
@pytest.mark.parametrize("row", [0, 1])
def test_chunks_equal_the_whole_sequence(sequence, chunks, row):
    _, _, _, whole, whole_h = sequence
    xs, h, k, v = prefilled(sequence, row, chunks, LENGTH)
    end = sum(size for size, _ in split_chunks(LENGTH, chunks, 256))
    np.testing.assert_allclose(xs[:LENGTH], whole, atol=ATOL)
    np.testing.assert_allclose(h, whole_h, atol=ATOL)
    for cache in (k, v):
        assert (cache[1 - row] == 7).all() and not (cache[row, :LENGTH] == 7).any()
        assert (cache[row, end:] == 7).all()  # beyond the padding nothing was written
    assert (xs[end:] == 7).all()
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(xs[1:LENGTH], whole[:-1], atol=ATOL)


def test_a_token_at_a_time_equals_the_whole_sequence(sequence):
    """Row 1 goes on after a prompt of 20, row 0 starts with it; each at its own position, over the padding's keys."""
    block, x, y_cold, whole, whole_h = sequence
    _, _, k, v = prefilled(sequence, 1, (8,), 20)
    for step in range(LENGTH - 20):
        at = np.array([step, 20 + step], np.int32)
        out, h, k, v = attend_rows(block, k, v, x[at], y_cold[at], at, prefix=256)
        np.testing.assert_allclose(out, whole[at], atol=ATOL)
        np.testing.assert_allclose(h, whole_h[at], atol=ATOL)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(h, whole_h[at - 1], atol=ATOL)


def test_a_longer_prefix_changes_nothing(sequence):
    short = prefilled(sequence, 0, (8,), 30, prefix=256)
    long = prefilled(sequence, 0, (8,), 30, prefix=264)
    np.testing.assert_allclose(short[1], long[1], atol=1e-6)
    cut = prefilled(sequence, 0, (8,), 30, prefix=8)  # too short a prefix does
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(short[1], cut[1], atol=ATOL)


def test_hot_rows():
    make = Maker()
    x, h, parts, tally = make.rows(), make.rows(), make.pool(20), jnp.array([3, 4, 5], jnp.int32)
    y, live = pool_ffn(h, parts, SPEC.activation)
    assert live[0].sum() != live[1].sum()
    run = jax.jit(partial(bodies.hot_rows, activation=SPEC.activation))
    for active in ([True, True], [True, False], [False, True], [False, False]):
        found, counted = run(x, h, parts, tally, np.int32(1), jnp.array(active))
        np.testing.assert_allclose(found, x + y, atol=1e-6)  # rows that do not count are computed all the same
        assert counted.tolist() == [3, 4 + int(live[jnp.array(active)].sum()), 5]


def test_hot_chunk_touches_only_its_own_positions():
    make = Maker()
    xs, h, parts = make.prompt(), make.floats(8, SPEC.hidden), make.pool(20)
    found = bodies.hot_chunk(xs, h, parts, np.int32(24), activation=SPEC.activation)
    y, _ = pool_ffn(h, parts, SPEC.activation)
    np.testing.assert_allclose(found[24:32], xs[24:32] + y, atol=1e-6)
    np.testing.assert_array_equal(np.delete(found, range(24, 32), 0), np.delete(xs, range(24, 32), 0))
    assert np.abs(y).min(axis=1).max() > 0


def test_embeddings():
    make = Maker()
    table, ids = make.table(), make.ints(SPEC.vocab, SHAPES.ctx)
    rows = np.asarray(table)[np.asarray(ids)]
    np.testing.assert_array_equal(bodies.embed_prompt(table, make.prompt(), ids), rows)
    xs = make.prompt()
    loaded = bodies.load_chunk(xs, rows[:8], np.int32(16))
    np.testing.assert_array_equal(loaded[16:24], rows[:8])
    np.testing.assert_array_equal(np.delete(loaded, range(16, 24), 0), np.delete(xs, range(16, 24), 0))
    half = bodies.embed_rows(table.astype(jnp.float16), ids[:2])
    assert half.dtype == jnp.float32
    np.testing.assert_array_equal(half, rows[:2].astype(np.float16).astype(np.float32))


def test_head():
    make = Maker()
    norm, table, x, y_cold = make.floats(SPEC.hidden), make.table(), make.rows(), make.rows()
    total = np.asarray(x, np.float64) + np.asarray(y_cold)
    normed = total / np.sqrt((total**2).mean(1, keepdims=True) + SPEC.norm_eps) * np.asarray(norm)
    found = bodies.head(norm, table, x, y_cold, eps=SPEC.norm_eps)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, normed @ np.asarray(table).T, atol=ATOL)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(bodies.head(norm, table, x, -y_cold, eps=SPEC.norm_eps), found, atol=ATOL)
