"""The bodies against a whole sequence at once: chunks and single tokens through a cache change nothing."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops.ffn import pool_ffn
from dynajax.programs import bodies, split_chunks
from hostcompute import ffi
from tests.programs.cases import SHAPES, SPECS, Maker, host_ffn, shapes_of

LENGTH = 45
ATOL = 3e-5
attend_chunk = jax.jit(bodies.attend_chunk, static_argnames="prefix")
attend_rows = jax.jit(bodies.attend_rows, static_argnames="prefix")


@pytest.fixture(scope="module", params=SPECS)
def sequence(request):
    """A block, the stream before it, what the host adds to it, and the block's answer over the whole sequence."""
    make = Maker(shapes_of(request.param))
    spec, block, x = make.spec, make.block(), np.asarray(make.floats(LENGTH, make.spec.hidden))
    y_cold = np.asarray(0.5 * make.wide(LENGTH))
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None, :]
    before = x + spec.residual_scale * y_cold[:, : spec.hidden]
    whole, h = jax.jit(lambda block, x: block(x, positions))(block, before[None].astype(np.float32))
    return SimpleNamespace(spec=spec, block=block, x=x, y_cold=y_cold, whole=np.asarray(whole[0]), h=np.asarray(h[0]))


def prefilled(sequence, row, chunks, count, prefix=256):
    """xs, h of each token, and the caches after `count` tokens in chunks; other rows and later positions hold 7."""
    spec = sequence.spec
    k = v = np.full(SHAPES.k_shape, 7, np.float32)
    xs = np.full((SHAPES.ctx, spec.hidden), 7, np.float32)
    xs[:count] = sequence.x[:count]
    hidden, start = [], 0
    for size, tokens in split_chunks(count, chunks, prefix):
        y = np.zeros((size, spec.unit_width), np.float32)
        y[:tokens] = sequence.y_cold[start : start + tokens]
        xs, h, k, v = attend_chunk(sequence.block, k, v, xs, y, np.int32(row), np.int32(start), prefix=prefix)
        hidden.append(np.asarray(h)[:tokens])
        start += tokens
    return np.asarray(xs), np.concatenate(hidden), np.asarray(k), np.asarray(v)


@pytest.mark.parametrize("chunks", [(8,), (8, 32)])
@pytest.mark.parametrize("row", [0, 1])
def test_chunks_equal_the_whole_sequence(sequence, chunks, row):
    xs, h, k, v = prefilled(sequence, row, chunks, LENGTH)
    end = sum(size for size, _ in split_chunks(LENGTH, chunks, 256))
    np.testing.assert_allclose(xs[:LENGTH], sequence.whole, atol=ATOL)
    np.testing.assert_allclose(h, sequence.h, atol=ATOL)
    for cache in (k, v):
        assert (cache[1 - row] == 7).all() and not (cache[row, :LENGTH] == 7).any()
        assert (cache[row, end:] == 7).all()  # beyond the padding nothing was written
    assert (xs[end:] == 7).all()
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(xs[1:LENGTH], sequence.whole[:-1], atol=ATOL)


def test_a_token_at_a_time_equals_the_whole_sequence(sequence):
    """Row 1 goes on after a prompt of 20, row 0 starts with it; each at its own position, over the padding's keys."""
    _, _, k, v = prefilled(sequence, 1, (8,), 20)
    for step in range(LENGTH - 20):
        at = np.array([step, 20 + step], np.int32)
        out, h, k, v = attend_rows(sequence.block, k, v, sequence.x[at], sequence.y_cold[at], at, prefix=256)
        np.testing.assert_allclose(out, sequence.whole[at], atol=ATOL)
        np.testing.assert_allclose(h, sequence.h[at], atol=ATOL)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(h, sequence.h[at - 1], atol=ATOL)


def test_a_longer_prefix_changes_nothing(sequence, monkeypatch):
    short = prefilled(sequence, 0, (8,), 30, prefix=256)
    long = prefilled(sequence, 0, (8,), 30, prefix=264)
    np.testing.assert_allclose(short[0], long[0], atol=1e-6)
    monkeypatch.setattr(ffi, "unavailable", lambda: "the kernel goes by positions alone")
    cut = prefilled(sequence, 0, (8,), 30, prefix=8)  # too short a prefix does
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(short[0], cut[0], atol=ATOL)


@pytest.mark.parametrize("name", SPECS)
def test_hot_rows(name):
    make = Maker(shapes_of(name))
    spec = make.spec
    x, h, parts, tally = make.rows(), make.wide_rows(), make.pool(40), jnp.array([3, 4, 5], jnp.int32)
    y, live = pool_ffn(h, parts, spec.activation)
    assert live[0].sum() != live[1].sum()
    run = jax.jit(partial(bodies.hot_rows, spec=spec))
    for active in ([True, True], [True, False], [False, True], [False, False]):
        found, counted = run(x, h, parts, tally, np.int32(1), jnp.array(active))
        expected = x + spec.residual_scale * y[:, : spec.hidden]
        np.testing.assert_allclose(found, expected, atol=1e-6)  # rows that do not count are computed all the same
        assert counted.tolist() == [3, 4 + int(live[jnp.array(active)].sum()), 5]


@pytest.mark.parametrize("name", SPECS)
def test_hot_chunk_touches_only_its_own_positions(name):
    make = Maker(shapes_of(name))
    spec = make.spec
    xs, h, parts = make.prompt(), make.wide(8), make.pool(20)
    found = bodies.hot_chunk(xs, h, parts, np.int32(24), spec=spec)
    y = spec.residual_scale * pool_ffn(h, parts, spec.activation)[0][:, : spec.hidden]
    np.testing.assert_allclose(found[24:32], xs[24:32] + y, atol=1e-6)
    np.testing.assert_array_equal(np.delete(found, range(24, 32), 0), np.delete(xs, range(24, 32), 0))
    assert np.abs(y).min(axis=1).max() > 0


@pytest.mark.parametrize("name", SPECS)
def test_embeddings(name):
    make = Maker(shapes_of(name))
    spec = make.spec
    tables, ids = make.tables(), make.ints(spec.vocab, SHAPES.ctx)
    assert len(tables) == (2 if name == "opt" else 1)
    rows = np.asarray(tables[0])[np.asarray(ids)] * np.float32(spec.embed_scale)
    at = np.array([0, 200, 3], np.int32)
    expected, rows = rows[at], rows + (np.asarray(tables[1])[: len(rows)] if len(tables) == 2 else 0)
    expected = expected + (np.asarray(tables[1])[at + 5] if len(tables) == 2 else 0)
    np.testing.assert_array_equal(bodies.embed_prompt(tables, make.prompt(), ids, spec=spec), rows)
    np.testing.assert_array_equal(bodies.embed_rows(tables, ids[at], at + 5, spec=spec), expected)
    half = bodies.embed_rows(tuple(table.astype(jnp.float16) for table in tables), ids[at], at + 5, spec=spec)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, rtol=2e-3, atol=2e-3)


def test_a_chunk_is_loaded_where_it_belongs():
    make = Maker()
    xs, rows = make.prompt(), make.floats(8, make.spec.hidden)
    loaded = bodies.load_chunk(xs, rows, np.int32(16))
    np.testing.assert_array_equal(loaded[16:24], rows)
    np.testing.assert_array_equal(np.delete(loaded, range(16, 24), 0), np.delete(xs, range(16, 24), 0))


def test_positions_behind_the_last_learned_one_stay_finite():
    """A chunk's padding may lie there: its keys are masked, but not if they are NaN."""
    make = Maker(shapes_of("opt"))
    embed, learned = make.tables()
    found = bodies.embed_prompt((embed, learned[:250]), make.prompt(), make.ints(96, SHAPES.ctx), spec=make.spec)
    assert jnp.isfinite(found).all()


@pytest.mark.parametrize("name", SPECS)
def test_head(name):
    make = Maker(shapes_of(name))
    spec = make.spec
    norm, table, x, y_cold = make.norm(), make.table(), make.rows(), make.wide_rows()
    total = np.asarray(x, np.float64) + spec.residual_scale * np.asarray(y_cold)[:, : spec.hidden]
    if spec.norm == "layer":
        total -= total.mean(1, keepdims=True)
    normed = total / np.sqrt((total**2).mean(1, keepdims=True) + spec.norm_eps) * np.asarray(norm[0])
    normed = (normed + (np.asarray(norm[1]) if spec.norm == "layer" else 0)) * spec.logit_scale
    found = bodies.head(norm, table, x, y_cold, spec=spec)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, normed @ np.asarray(table).T, atol=ATOL)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(bodies.head(norm, table, x, -y_cold, spec=spec), found, atol=ATOL)


@pytest.mark.parametrize("name", SPECS)
def test_a_whole_step_is_its_parts_one_after_the_other(name):
    """As threads mode runs them, with a layer whose units are all on the host, all on the device, and some there."""
    make = Maker(shapes_of(name))
    spec, slots = make.spec, (0, make.spec.ffn, 12)
    blocks, pools = [make.block() for _ in slots], [make.pool(count) for count in slots]
    ks, vs = [make.kv() for _ in slots], [make.kv() for _ in slots]
    norm, table, tables = make.norm(), make.table(), make.tables()
    ids, positions, active = make.ints(96, 2), jnp.array([40, 3], jnp.int32), jnp.array([True, False])
    handle, tally = jnp.array([1, 0], jnp.uint32), jnp.array([3, 4, 5], jnp.int32)
    hosts = [None if count == spec.ffn else partial(host_ffn, handle, layer) for layer, count in enumerate(slots)]

    x = bodies.embed_rows(tables, ids, positions, spec=spec)
    ends = (norm, table, tables if spec.tied else ())
    whole = partial(bodies.token_rows, prefix=256)
    caches, start = (tuple(ks), tuple(vs)), ids if spec.tied else x
    state = (start, tally, positions, active)
    logits, counted, k_whole, v_whole = whole(ends, blocks, caches, pools, hosts, state)

    y_cold = jnp.zeros((2, spec.unit_width))
    for layer, block in enumerate(blocks):
        x, h, ks[layer], vs[layer] = bodies.attend_rows(block, ks[layer], vs[layer], x, y_cold, positions, prefix=256)
        if pools[layer]:
            x, tally = bodies.hot_rows(x, h, pools[layer], tally, layer, active, spec=spec)
        host = hosts[layer]
        y_cold = jnp.zeros_like(h) if host is None else host(h, active)
    np.testing.assert_array_equal(logits, bodies.head(norm, table, x, y_cold, spec=spec))
    assert counted.tolist() == tally.tolist() and counted[0] == 3
    for found, expected in zip([*k_whole, *v_whole], [*ks, *vs], strict=True):
        np.testing.assert_array_equal(found, expected)
