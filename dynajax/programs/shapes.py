"""The few numbers that fix every compiled shape, and the ladders that keep their count small."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from dynajax.config import GROUP, ModelSpec, is_packed, unpacked_dtype
from dynajax.quant import stored_as

PREFIX_STEP = 256
CHUNKS = (8, 32, 128)
MOST_PADDING = 4  # times a chunk's own tokens, where it takes the longest to read the weights
CHEAP_CHUNKS = (8, 32, 64, 128)
CHEAP_PADDING = 1.5  # where arithmetic does


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What fixes the shape of every program of one engine."""

    spec: ModelSpec
    dtype: str  # device type of the weights
    kv_dtype: str | None = None  # of keys and values; None: as the weights
    ctx: int  # KV rows of a sequence, a multiple of the smallest chunk
    batch: int  # sequences decoded together
    skip_zeros: bool = True  # a neuron whose activation is zero need not be computed further
    cheap_chunks: bool = False  # nothing is kept of a chunk's neurons: the CPU's kernels compute FFNs, and of all units

    def __post_init__(self) -> None:
        if self.ctx < 1 or self.ctx % CHUNKS[0]:
            raise ValueError(f"ctx must be a positive multiple of {CHUNKS[0]}, got {self.ctx}")
        if self.kv_dtype is None and is_packed(self.dtype):
            raise ValueError(f"kv_dtype must be given beside weights in {self.dtype}")

    @property
    def weight_type(self) -> jnp.dtype:
        """Of what is not packed."""
        return jnp.dtype(unpacked_dtype(self.dtype))

    @property
    def kv_name(self) -> str:
        """The type of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def kv_type(self) -> jnp.dtype:
        """How they are kept: as a pool is, see `pool_type`."""
        return jnp.dtype("uint16" if self.kv_name == "bfloat16" else self.kv_name)

    @property
    def pool_type(self) -> jnp.dtype:
        """bfloat16 pools are uint16: a bfloat16 donated update rewrites the whole pool on jax 0.10."""
        return jnp.dtype("uint16") if self.dtype == "bfloat16" else jnp.dtype(stored_as((GROUP,), self.dtype)[1])

    def rows_shape(self, *counts: int) -> tuple[int, ...]:
        """Of rows of units, as pool and host hold them: [..., W], packed [..., groups, n]."""
        return stored_as((*counts, self.spec.unit_width), self.dtype)[0]

    @property
    def chunks(self) -> tuple[int, ...]:
        """Prefill chunk sizes: the smallest, and the largest of at most 3 D / 80 tokens.

        That keeps the FFN's [T, G] temporaries (up to four, float32) below 5 % of a float32 pool; the smallest is
        there for narrow models too. Experts have temporaries of one expert alone. Cheap chunks have none, and come in
        more sizes, so that little is padded.
        """
        if self.cheap_chunks:
            return tuple(c for c in CHEAP_CHUNKS if c <= self.ctx)
        if self.spec.experts is not None:
            return tuple(sorted({CHUNKS[0], max(c for c in CHUNKS if c <= self.ctx)}))
        fitting = [c for c in CHUNKS if c <= min(3 * self.spec.hidden // 80, self.ctx)]
        return tuple(sorted({CHUNKS[0], *fitting[-1:]}))

    @property
    def most_padding(self) -> float:
        """How many times its tokens a prompt's last chunk may be."""
        return CHEAP_PADDING if self.cheap_chunks else MOST_PADDING

    @property
    def sources(self) -> tuple[int, ...]:
        """Sizes in which an encoder reads a prompt at once."""
        return tuple(sorted({min(CHUNKS[-1], self.ctx), self.ctx}))

    @property
    def prefixes(self) -> tuple[int, ...]:
        """KV prefixes of decode programs."""
        return prefix_buckets(self.ctx)

    @property
    def chunk_prefixes(self) -> tuple[int, ...]:
        """KV prefixes of prefill programs: every second one, since there is one program for each chunk size."""
        return self.prefixes[::-2][::-1]

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """[B, S, KV, H] of one layer's keys."""
        return self.batch, self.ctx, self.spec.cache_heads, self.spec.key_width

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """The same of its values."""
        return self.batch, self.ctx, self.spec.cache_heads, self.spec.value_width


def round_ctx(tokens: int) -> int:
    """The KV rows to allocate for this many tokens: whole smallest chunks, so that a padded chunk always fits."""
    return -(-tokens // CHUNKS[0]) * CHUNKS[0]


def prefix_buckets(ctx: int) -> tuple[int, ...]:
    """KV prefixes a program may read: 256, 512, ... doubling, and the whole context."""
    sizes, size = [], PREFIX_STEP
    while size < ctx:
        sizes.append(size)
        size *= 2
    return (*sizes, ctx)


def bucket_of(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `length`."""
    assert length <= buckets[-1], f"{length} does not fit the largest bucket, {buckets[-1]}"
    return next(size for size in buckets if size >= length)


def split_chunks(
    length: int, chunks: tuple[int, ...], room: int, most_padding: float = MOST_PADDING
) -> list[tuple[int, int]]:
    """Cut a prompt into (padded size, tokens) pieces; only the last is padded, at most to `most_padding` times its
    tokens or to the smallest size: a chunk reads the whole pool, so one wide chunk can cost less than several narrow.
    `room`: rows of the cache from the prompt's first token on, whole smallest chunks.

    Example: 143 tokens with sizes 8 and 128 and much room -> [(128, 128), (8, 8), (8, 7)].
    """
    pieces = []
    while length > 0:
        covering = next((c for c in chunks if length <= c <= room), 0)
        largest_full = max((c for c in chunks if c <= length), default=chunks[0])
        size = covering if 0 < covering <= most_padding * length else largest_full
        pieces.append((size, min(size, length)))
        length, room = length - size, room - size
    return pieces
