"""The ladders of sizes: what they cover, how much they pad, and that nothing is ever written past the cache."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.programs import Shapes, bucket_of, prefix_buckets, split_chunks
from dynajax.programs.shapes import CHEAP_CHUNKS, CHUNKS, round_ctx
from dynajax.testing import TINY

CHECKED = settings(deadline=None, derandomize=True, max_examples=500)
HIDDEN = (32, 192, 853, 854, 1024, 3413, 3414, 4096)
LENGTHS = st.integers(1, 2000)


def shapes(hidden=4096, ctx=512, **changes):
    return Shapes(spec=replace(TINY, hidden=hidden), dtype="float32", ctx=ctx, batch=1, **changes)


@CHECKED
@given(length=LENGTHS, hidden=st.sampled_from(HIDDEN), ctx=LENGTHS.map(round_ctx))
def test_chunks_cover_the_prompt(length, hidden, ctx):
    chunks = shapes(hidden, ctx).chunks
    pieces = split_chunks(length, chunks, 10**6)
    assert sum(count for _, count in pieces) == length
    *full, (size, count) = pieces
    assert all(size == count for size, count in full)  # so that every start is a multiple of the smallest chunk
    assert all(size in chunks for size, _ in pieces)
    assert 1 <= count <= size <= max(4 * count, CHUNKS[0])


@CHECKED
@given(length=LENGTHS)
def test_no_more_chunks_than_needed(length):
    """All of the largest size, and few for the rest."""
    pieces = split_chunks(length, CHUNKS, 10**6)
    assert len(pieces) <= length // 128 + 3 + 3
    assert [size for size, _ in pieces] == sorted((size for size, _ in pieces), reverse=True)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, [(8, 1)]),
        (8, [(8, 8)]),
        (9, [(32, 9)]),
        (16, [(32, 16)]),
        (24, [(32, 24)]),
        (31, [(32, 31)]),
        (33, [(128, 33)]),
        (130, [(128, 128), (8, 2)]),
        (300, [(128, 128), (128, 128), (128, 44)]),
    ],
)
def test_cuts(length, expected):
    assert split_chunks(length, CHUNKS, 10**6) == expected


@CHECKED
@given(length=LENGTHS, hidden=st.sampled_from(HIDDEN), ctx=LENGTHS.map(round_ctx))
def test_cheap_chunks_pad_little(length, hidden, ctx):
    cheap = shapes(hidden, ctx, cheap_chunks=True)
    pieces = split_chunks(length, cheap.chunks, 10**6, cheap.most_padding)
    assert cheap.chunks[-1] == max(c for c in CHEAP_CHUNKS if c <= ctx)
    assert sum(count for _, count in pieces) == length
    *full, (size, count) = pieces
    assert all(size == count for size, count in full)
    assert 1 <= count <= size <= max(1.5 * count, CHUNKS[0])


def overflow(ctx, hidden, length, cheap):
    """By how many rows the chunks of a prompt reach past a cache of `ctx`."""
    start = end = 0
    of = shapes(hidden, ctx, cheap_chunks=cheap)
    for size, count in split_chunks(length, of.chunks, ctx, of.most_padding):
        end = max(end, start + size)
        start += count
    return end - ctx


@CHECKED
@given(ctx=LENGTHS, hidden=st.sampled_from(HIDDEN), cheap=st.booleans(), data=st.data())
def test_every_chunk_fits_the_cache(ctx, hidden, cheap, data):
    """XLA would shift what does not fit to earlier positions, without a word."""
    length = data.draw(st.integers(1, round_ctx(ctx)))
    assert overflow(round_ctx(ctx), hidden, length, cheap) <= 0


@CHECKED
@given(
    ctx=st.integers(1, 16).map(lambda n: 128 * n), hidden=st.sampled_from(HIDDEN), cheap=st.booleans(), data=st.data()
)
def test_every_chunk_fits_a_cache_of_whole_largest_chunks(ctx, hidden, cheap, data):
    assert overflow(ctx, hidden, data.draw(st.integers(1, ctx)), cheap) <= 0


@CHECKED
@given(tokens=st.integers(1, 10**6))
def test_contexts_are_whole_chunks(tokens):
    ctx = round_ctx(tokens)
    assert ctx % CHUNKS[0] == 0 and tokens <= ctx < tokens + CHUNKS[0]
    assert round_ctx(ctx) == ctx


@CHECKED
@given(ctx=st.integers(1, 10**6), data=st.data())
def test_prefixes(ctx, data):
    buckets = prefix_buckets(ctx)
    assert buckets[-1] == ctx and list(buckets) == sorted(set(buckets))
    assert all(size == 256 * 2**i for i, size in enumerate(buckets[:-1]))
    length = data.draw(st.integers(1, ctx))
    assert length <= bucket_of(length, buckets) <= max(256, 2 * length)
    assert bucket_of(length, buckets) == min(size for size in buckets if size >= length)


@pytest.mark.parametrize(
    ("ctx", "expected"),
    [(8, (8,)), (256, (256,)), (264, (256, 264)), (512, (256, 512)), (4096, (256, 512, 1024, 2048, 4096))],
)
def test_the_whole_context_is_the_last_prefix(ctx, expected):
    assert prefix_buckets(ctx) == shapes(ctx=ctx).prefixes == expected


@pytest.mark.parametrize(
    ("hidden", "ctx", "expected"),
    [
        (32, 512, (8,)),  # the smallest is always there
        (192, 512, (8,)),
        (853, 512, (8,)),
        (854, 512, (8, 32)),
        (1024, 512, (8, 32)),
        (2048, 512, (8, 32)),
        (3413, 512, (8, 32)),
        (3414, 512, (8, 128)),
        (4096, 120, (8, 32)),
        (4096, 24, (8,)),
        (4096, 8, (8,)),
    ],
)
def test_chunk_sizes(hidden, ctx, expected):
    assert shapes(hidden, ctx).chunks == expected


def test_shapes():
    spec = replace(TINY, kv_heads=2, head_dim=16)
    one = Shapes(spec=spec, dtype="float16", ctx=24, batch=3)
    assert one.k_shape == (3, 24, 2, 16)
    for dtype, weight, pool in (
        ("float32", "float32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "uint16"),
    ):
        one = replace(one, dtype=dtype)
        assert (one.weight_type, one.pool_type) == (jnp.dtype(weight), jnp.dtype(pool))


@pytest.mark.parametrize("ctx", [0, -8, 4, 100])
def test_contexts_that_are_not_whole_chunks(ctx):
    with pytest.raises(ValueError, match=f"ctx must be a positive multiple of 8, got {ctx}"):
        shapes(ctx=ctx)
