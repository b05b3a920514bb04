"""Compiled programs: they compute what the bodies do, in place, with little scratch, and are few."""

import functools
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynajax.programs.cache as cache
from dynajax.config import Activation, Rope
from dynajax.ops.ffn import pool_ffn, write_slots
from dynajax.policy.placement import LEVELS, block_units
from dynajax.programs import MAX_PROGRAMS, Programs, Shapes, bodies
from dynajax.testing import TINY
from tests.programs.cases import SHAPES, SPEC, SPECS, Maker, copied, host_ffn, leaves, programs, shapes_of

START, ROW, LAYER = np.int32(19), np.int32(1), np.int32(2)
POSITIONS, ACTIVE = jnp.array([40, 3], jnp.int32), jnp.array([True, False])
SLOTS = (12, 0, SPEC.ffn)  # of the three layers: some units, none, all on the device


def embed_rows(make, names):
    args = make.tables(), make.ints(96, 2), POSITIONS
    return args, lambda: bodies.embed_rows(*args, spec=make.spec)


def embed_prompt(make, names):
    args = make.tables(), make.prompt(), make.ints(96, SHAPES.ctx)
    return args, lambda: bodies.embed_prompt(*args, spec=make.spec)


def load_chunk(make, names, size):
    args = make.prompt(), make.floats(size, make.spec.hidden), START
    return args, lambda: bodies.load_chunk(*args)


def attend_rows(make, names, prefix):
    block, args = make.block(), (make.kv(), make.kv(), make.rows(), make.wide_rows(), POSITIONS)
    return (leaves(block, names), *args), lambda: bodies.attend_rows(block, *args, prefix=prefix)


def attend_chunk(make, names, size, prefix):
    block, args = make.block(), (make.kv(), make.kv(), make.prompt(), make.wide(size), ROW, START)
    return (leaves(block, names), *args), lambda: bodies.attend_chunk(block, *args, prefix=prefix)


def hot_rows(make, names, slots):
    args = make.rows(), make.wide_rows(), make.pool(slots), make.ints(50, make.spec.layers), LAYER, ACTIVE
    return args, lambda: bodies.hot_rows(*args, spec=make.spec)


def hot_chunk(make, names, size, slots):
    args = make.prompt(), make.wide(size), make.pool(slots), START
    return args, lambda: bodies.hot_chunk(*args, spec=make.spec)


def head(make, names):
    args = make.norm(), make.table(), make.rows() * 0.1, make.wide_rows() * 0.1
    return args, lambda: bodies.head(*args, spec=make.spec)


def write(make, names, slots, count, host_dtype):
    rows = make.floats(count, make.spec.ffn_parts, 1, make.spec.unit_width).astype(host_dtype)
    args = make.pool(slots), rows, jnp.array([7, 0, 9, 4], jnp.int32)
    return args, lambda: write_slots(*args)


def token_rows(make, names, prefix, *slots):
    spec, handle = make.spec, jnp.array([2, 0], jnp.uint32)
    blocks = [make.block() for _ in slots]
    caches = tuple(tuple(make.kv() for _ in slots) for _ in "kv")
    pools = tuple(make.pool(count) for count in slots)
    hosts = [partial(host_ffn, handle, i) if count < spec.ffn else None for i, count in enumerate(slots)]
    tables = make.tables()
    ends = make.norm(), tables[0] if spec.tied else make.table(), tables if spec.tied else ()
    start = make.ints(96, 2) if spec.tied else make.rows()
    args = start, make.ints(50, spec.layers), POSITIONS, ACTIVE
    flat = tuple(leaves(block, names) for block in blocks)
    body = partial(bodies.token_rows, prefix=prefix)
    return (handle, ends, flat, caches, pools, *args), lambda: body(ends, blocks, caches, pools, hosts, args)


CASES = [
    (embed_rows,),
    (embed_prompt,),
    (load_chunk, 8),
    (attend_rows, 256),
    (attend_chunk, 8, 264),
    (hot_rows, 12),
    (hot_chunk, 8, 12),
    (head,),
    (write, 10, 4, "float32"),
    (write, 10, 4, "bfloat16"),
    (token_rows, 256, *SLOTS),
]


def assert_same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0].__name__, *map(str, case[1:])]))
def test_programs_compute_what_the_bodies_do(case, name):
    kind, *sizes = case
    compiler = programs(shapes_of(name))
    args, eager = kind(Maker(compiler.shapes), compiler.leaf_names, *sizes)
    expected = eager()
    other_args, _ = kind(Maker(compiler.shapes, seed=1), compiler.leaf_names, *sizes)
    program = compiler.get(kind.__name__, *sizes)
    assert_same(program(*copied(args)), expected)
    assert compiler.kinds == [(kind.__name__, *sizes)]
    with pytest.raises(AssertionError):  # the comparison sees other numbers
        assert_same(program(*copied(other_args)), expected)


SETTINGS = [
    ("llama", {"activation": Activation()}),
    ("llama", {"rope": Rope(theta=301.0)}),
    ("llama", {"norm_eps": 1e-5}),
    ("llama", {"window": 5}),
    ("llama", {"embed_scale": 2.0}),
    ("llama", {"residual_scale": 2.0}),
    ("llama", {"logit_scale": 2.0}),
    ("llama", {"parallel": True}),
    ("scaled", {"activation": Activation()}),
    ("parallel", {"window": None}),
    ("parallel", {"norm_eps": 1e-5}),
]


@functools.cache
def step_logits(shapes, drawn_for):
    """Of the programs of `shapes`, with the arguments that are drawn for other shapes."""
    compiler = programs(shapes)
    args, _ = token_rows(Maker(drawn_for), compiler.leaf_names, 256, *SLOTS)
    return compiler.get("token_rows", 256, *SLOTS)(*copied(args))[0]


@pytest.mark.parametrize(
    ("name", "changes"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_every_setting_reaches_the_programs(name, changes):
    shapes = shapes_of(name)
    if "embed_scale" in changes:  # embeddings enter this program where they are on the device
        shapes = replace(shapes, spec=replace(shapes.spec, tied=True))
    changed = replace(shapes, spec=replace(shapes.spec, **changes))
    with pytest.raises(AssertionError):
        assert_same(step_logits(shapes, shapes), step_logits(changed, shapes))


def test_the_host_is_asked_only_where_it_has_units():
    asked = []

    def note(handle, layer, h, active):
        asked.append((handle.shape, layer, h.shape, active.shape))
        return jnp.zeros_like(h)

    compiler = Programs(SHAPES, note)
    compiler.token_rows(256, 12, 0, SPEC.ffn)  # tracing asks once a layer
    assert asked == [((2,), layer, (2, SPEC.hidden), (2,)) for layer in (0, 1)]
    asked.clear()
    compiler.token_rows(256, SPEC.ffn, SPEC.ffn, SPEC.ffn)
    assert not asked


def test_a_program_without_a_host_must_hold_every_unit():
    full = (SPEC.ffn,) * SPEC.layers
    args, eager = token_rows(Maker(), Programs(SHAPES).leaf_names, 256, *full)
    assert_same(Programs(SHAPES).get("token_rows", 256, *full)(*copied(args)), eager())
    with pytest.raises(AssertionError, match="units are left for a host that was not given"):
        Programs(SHAPES).get("token_rows", 256, *SLOTS)


DONATED = [  # arguments that the program takes over, and the outputs that get their buffers
    ((write, 10, 4, "float32"), (0,), (0,)),
    ((write, 10, 4, "float16"), (0,), (0,)),
    ((attend_rows, 256), (1, 2), (2, 3)),
    ((attend_chunk, 8, 256), (1, 2, 3), (2, 3, 0)),
    ((hot_rows, 12), (3,), (1,)),
    ((hot_chunk, 8, 12), (0,), ()),
    ((embed_prompt,), (1,), ()),
    ((load_chunk, 8), (0,), ()),
    ((token_rows, 256, *SLOTS), (3, 6), (2, 3, 1)),
]


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("case", DONATED, ids=lambda case: "-".join([case[0][0].__name__, *map(str, case[0][1:])]))
def test_buffers_stay_where_they_are(case):
    (kind, *sizes), taken, given = case
    compiler = programs()
    args = copied(kind(Maker(), compiler.leaf_names, *sizes)[0])
    before = pointers([args[at] for at in taken])
    kept = [leaf for at, arg in enumerate(args) if at not in taken for leaf in jax.tree.leaves(arg)]
    result = compiler.get(kind.__name__, *sizes)(*args)
    jax.block_until_ready(result)
    assert before == pointers([result[at] for at in given] if given else result)
    assert all(leaf.is_deleted() for at in taken for leaf in jax.tree.leaves(args[at]))
    assert not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in kept)


def test_without_donation_the_pool_would_move():
    args = copied(write(Maker(), (), 10, 4, "float32")[0])
    written, _ = jax.jit(write_slots)(*args)
    assert not set(pointers(written)) & set(pointers(args[0]))


@pytest.mark.parametrize("pool_type", ["float32", "float16", "bfloat16"])
def test_a_pool_is_written_in_place_whatever_its_type(pool_type):
    compiler = programs(replace(SHAPES, dtype=pool_type))
    make = Maker()
    pool = tuple(part.astype(compiler.shapes.pool_type) for part in make.pool(20))
    before = pointers(pool)
    for step in range(3):
        slots = np.arange(step, step + 4, dtype=np.int32)
        rows = make.floats(4, 3, 1, SPEC.hidden).astype(pool_type)
        pool, fence = compiler.get("write", 20, 4, pool_type)(pool, rows, slots)
        fence.block_until_ready()
    assert pointers(pool) == before
    assert compiler.temp_bytes("write", 20, 4, pool_type) <= sum(part.nbytes for part in pool)


@pytest.mark.parametrize("count", [1, 4])
def test_the_fence_is_made_by_the_program(count):
    """Handed through from the argument it would be ready before the parts are, and staging memory reused too soon."""
    slots = jnp.arange(count, dtype=jnp.int32)
    rows = Maker().floats(count, 3, 1, SPEC.hidden)
    _, fence = programs().get("write", 10, count, "float32")(Maker().pool(10), rows, slots)
    assert fence is not slots and fence.unsafe_buffer_pointer() != slots.unsafe_buffer_pointer()


SCRATCH_SHARE = 0.05
SIZES = {192: 768, 1024: 2816, 2048: 5632}  # hidden: FFN neurons


def wide(hidden, ffn=None, **changes):
    """Programs of a model of one layer; nothing of it is allocated."""
    sizes = {"hidden": hidden, "ffn": ffn or SIZES[hidden], "heads": 4, "head_dim": hidden // 4}
    spec = replace(TINY, layers=1, vocab=64, **sizes, **changes)
    return Programs(Shapes(spec=spec, dtype="float32", ctx=256, batch=1))


def pool_bytes(compiler, slots):
    spec = compiler.shapes.spec
    return spec.ffn_parts * slots * spec.unit_width * 4


def scratch_shares(compiler):
    """The FFN programs' temporaries over their pool's bytes: decode and every chunk size, from one block to all."""
    ffn = compiler.shapes.spec.ffn
    block = block_units(ffn)
    for slots in (block, 3 * block, ffn):
        for kind in [("hot_rows", slots), *(("hot_chunk", size, slots) for size in compiler.shapes.chunks)]:
            yield kind, compiler.temp_bytes(*kind) / pool_bytes(compiler, slots)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The FFN as XLA's own products: the host's kernels have no temporaries in a program."""
    monkeypatch.setattr("hostcompute.ffi.unavailable", lambda: "as on a GPU")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("hidden", SIZES)
def test_scratch_of_the_ffn_is_a_twentieth_of_its_pool(hidden):
    shares = dict(scratch_shares(wide(hidden)))
    assert max(shares.values()) <= SCRATCH_SHARE, shares


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("ffn_bias", [False, True])
@pytest.mark.parametrize("hidden", [1024, 2048])
def test_scratch_of_an_ungated_ffn_too(hidden, ffn_bias):
    """Models without a gate have four times as many neurons as dimensions."""
    shares = dict(scratch_shares(wide(hidden, 4 * hidden, gated=False, ffn_bias=ffn_bias)))
    assert max(shares.values()) <= SCRATCH_SHARE, shares


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("hidden", "ffn"), [(856, 2304), (3416, 9216)])
def test_scratch_where_a_larger_chunk_just_begins_to_be_used(hidden, ffn):
    compiler = wide(hidden, ffn)
    slots = block_units(ffn)
    shares = {
        size: compiler.temp_bytes("hot_chunk", size, slots) / pool_bytes(compiler, slots)
        for size in compiler.shapes.chunks[-1:]
    }
    assert max(shares.values()) <= SCRATCH_SHARE, shares


@pytest.mark.usefixtures("as_on_a_gpu")
def test_more_tokens_break_the_bound():
    compiler = wide(192)
    assert compiler.temp_bytes("hot_chunk", 32, 768) / pool_bytes(compiler, 768) > 2 * SCRATCH_SHARE


def test_one_array_for_all_parts_breaks_the_bound():
    """Why a pool is a tuple: slicing [G, P, D] copies it."""

    def stacked(h, pool):
        return pool_ffn(h, tuple(pool[:, part] for part in range(3)), Activation())

    h, pool = jax.ShapeDtypeStruct((1, 192), jnp.float32), jax.ShapeDtypeStruct((768, 3, 192), jnp.float32)
    temporary = jax.jit(stacked).lower(h, pool).compile().memory_analysis().temp_size_in_bytes
    assert temporary / pool_bytes(wide(192), 768) > 6 * SCRATCH_SHARE


def test_each_program_is_compiled_once():
    compiler = programs()
    assert (compiler.count, compiler.kinds, compiler.max_temp_bytes, compiler.compile_s) == (0, [], 0, 0.0)
    first = compiler.get("hot_rows", 12)
    spent = compiler.compile_s
    assert spent > 0
    assert compiler.get("hot_rows", 12) is first
    assert (compiler.count, compiler.compile_s) == (1, spent)
    chunk = compiler.temp_bytes("hot_chunk", 8, 12)
    assert compiler.kinds == [("hot_rows", 12), ("hot_chunk", 8, 12)]
    assert chunk > compiler.temp_bytes("hot_rows", 12) > 0
    assert compiler.max_temp_bytes == chunk and compiler.count == 2
    assert compiler.compile_s > spent


def test_the_count_is_limited(monkeypatch):
    assert MAX_PROGRAMS == 60
    monkeypatch.setattr(cache, "MAX_PROGRAMS", 2)
    compiler = programs()
    compiler.get("embed_rows")
    compiler.get("load_chunk", 8)
    with pytest.raises(AssertionError, match="more than 2 programs.*load_chunk"):
        compiler.get("head")
    assert compiler.count == 2
    compiler.get("embed_rows")  # what is there stays usable


def all_kinds(shapes, slots):
    """Every program that threads mode can ask for, once pools have these sizes."""
    chunks, prefixes, longer = shapes.chunks, shapes.prefixes, shapes.chunk_prefixes
    return [
        ("head",),
        *([("embed_rows",), ("embed_prompt",)] if shapes.spec.tied else [("load_chunk", size) for size in chunks]),
        *(("attend_rows", prefix) for prefix in prefixes),
        *(("attend_chunk", *sizes) for sizes in product(chunks, longer) if sizes[0] <= sizes[1]),
        *(("hot_rows", count) for count in slots),
        *(("hot_chunk", *sizes) for sizes in product(chunks, slots)),
        *(("write", count, 4, shapes.dtype) for count in slots),
    ]


@pytest.mark.parametrize(
    ("hidden", "ffn", "ctx"),
    [
        (192, 768, 2048),
        (2048, 5632, 4096),
        (4096, 11008, 4096),
        (4096, 11008, 131072),
    ],
)
def test_the_limit_is_never_reached(hidden, ffn, ctx):
    """Every pool size in use, prompts of every length: a long session must not run into the limit."""
    spec = replace(TINY, hidden=hidden, ffn=ffn, head_dim=hidden // 4, layers=32, max_positions=ctx)
    shapes = Shapes(spec=spec, dtype="float32", ctx=ctx, batch=1)
    slots = [min(ffn, (level + 1) * block_units(ffn)) for level in range(LEVELS)]
    assert len(all_kinds(shapes, slots)) <= MAX_PROGRAMS
    if hidden == 192:  # the list is right: each of them can be compiled
        assert all(getattr(Programs(shapes), kind)(*sizes) is not None for kind, *sizes in all_kinds(shapes, slots))


def test_programs_need_no_weights():
    """Scratch is known before anything is allocated."""
    before = len(jax.live_arrays())
    compiler = wide(2048)
    assert compiler.temp_bytes("hot_rows", 5632) > 0
    assert len(jax.live_arrays()) <= before


def test_partial_bodies_are_static():
    """The activation is part of the program, not an argument."""
    h, parts = Maker().rows(), Maker().pool(12)
    plain = jax.jit(partial(pool_ffn, activation=Activation()))(h, parts)[1]
    fat = jax.jit(partial(pool_ffn, activation=SPEC.activation))(h, parts)[1]
    assert plain.sum() > fat.sum() > 0
