"""From the host store into the pool: every row arrives, and staging memory is not reused too soon."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.bundles import HostStore, allocate_arena
from dynajax.plan import Placement
from dynajax.policy.placement import block_units, place_static
from dynajax.pool import DevicePool
from dynajax.programs import Programs, Shapes
from dynajax.transfer import RING, Transfer, fill_piece, fill_pool
from hostcompute import NumpyPool
from tests.programs.cases import SHAPES, shapes_of

HIDDEN, UNITS = SHAPES.spec.hidden, SHAPES.spec.ffn
PAIRS = [("float32", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("float16", "float16")]
PAIRS += [("bfloat16", "bfloat16")]  # host and device type; the last pool is uint16


def store_of(layers, dtype="float32", units=UNITS, hidden=HIDDEN):
    rng = np.random.default_rng(0)
    arenas = [allocate_arena((units, 3, 1, hidden), dtype) for _ in range(layers)]
    for arena in arenas:
        arena[...] = rng.standard_normal(arena.shape).astype(arena.dtype)
    return HostStore(arenas)


def pool_for(slots, dtype="float32", units=UNITS, hidden=HIDDEN):
    """A pool and the programs that write it."""
    spec = replace(SHAPES.spec, hidden=hidden, ffn=units)
    programs = Programs(Shapes(spec=spec, dtype=dtype, ctx=8, batch=1))
    return DevicePool(tuple(slots), 3, 1, (hidden,), programs.shapes.pool_type, units), programs


def assert_filled(pool, store, buckets):
    """Slot by slot and part by part: the arena's rows, in the pool's type."""
    for layer, bucket in enumerate(buckets):
        np.testing.assert_array_equal(pool.bucket(layer), bucket)
        for part, found in enumerate(pool.parts(layer)):
            rows = store.arenas[layer][bucket, part, 0]
            rows = rows.view(np.uint16) if found.dtype == jnp.uint16 else rows.astype(found.dtype)
            np.testing.assert_array_equal(np.array(found), rows)


@pytest.mark.parametrize(("host_type", "device_type"), PAIRS)
def test_fill_gives_the_arenas_rows(host_type, device_type):
    rng = np.random.default_rng(3)
    sizes = (4, 5, 0, 7, 8, 11, UNITS)  # with pieces of 4: whole, one over, none, one short, ...
    buckets = tuple(rng.permutation(UNITS)[:size].astype(np.int32) for size in sizes)
    store = store_of(len(sizes), host_type)
    pool, programs = pool_for(sizes, device_type)
    seen = []
    fill_pool(Transfer(store, pool, programs, NumpyPool(1), 4), pool, Placement(buckets, UNITS), seen.append)
    assert_filled(pool, store, buckets)
    assert seen == list(range(len(sizes)))
    if device_type == "bfloat16":
        assert pool.parts(0)[0].dtype == jnp.uint16
    with pytest.raises(AssertionError):  # the comparison sees the order of the slots
        assert_filled(pool, store, [bucket[::-1] for bucket in buckets])
    assert programs.count == len(set(sizes) - {0})  # a piece that overlaps needs no further program


def test_one_arena_fills_every_layer():
    """`load` brings a layer's units in before any of them is sent; the next layer's may overwrite them at once."""
    sizes, whole = (UNITS, 0, 7, UNITS), store_of(4)
    arena = allocate_arena(whole.arenas[0].shape, "float32")
    shared = HostStore((arena,) * 4)
    buckets = tuple(np.random.default_rng(3).permutation(UNITS)[:size].astype(np.int32) for size in sizes)
    pool, programs = pool_for(sizes)
    events = []

    def load(layer):
        events.append(("load", layer))
        arena[:] = whole.arenas[layer]

    transfer = Transfer(shared, pool, programs, NumpyPool(1), 4)
    fill_pool(transfer, pool, Placement(buckets, UNITS), lambda layer: events.append(("sent", layer)), load)
    assert_filled(pool, whole, buckets)
    assert events == [(what, layer) for layer in range(4) for what in ("load", "sent")]
    with pytest.raises(AssertionError):  # what the arena holds in the end is another layer's
        assert_filled(pool, shared, buckets)


@pytest.mark.parametrize("name", ["opt", "scaled"])
def test_units_of_every_shape_arrive(name):
    """Two parts, and rows that are wider than the model for the sake of their biases."""
    spec = shapes_of(name).spec
    programs = Programs(Shapes(spec=spec, dtype="float32", ctx=8, batch=1))
    arena = allocate_arena((UNITS, spec.ffn_parts, 1, spec.unit_width), "float32")
    arena[:] = np.random.default_rng(0).standard_normal(arena.shape)
    pool = DevicePool((9,), spec.ffn_parts, 1, (spec.unit_width,), programs.shapes.pool_type, UNITS)
    bucket = np.random.default_rng(3).permutation(UNITS)[:9].astype(np.int32)
    fill_pool(Transfer(HostStore([arena]), pool, programs, NumpyPool(1), 4), pool, Placement((bucket,), UNITS))
    assert len(pool.parts(0)) == spec.ffn_parts
    assert_filled(pool, HostStore([arena]), [bucket])


@pytest.mark.parametrize("units", [1, 2, 7, 16, 17, 45, 48])
def test_every_placement_can_be_filled(units):
    """The piece is never larger than a pool that a placement makes."""
    frequency = np.random.default_rng(1).random((3, units), dtype=np.float32)
    store, piece = store_of(3, units=units), fill_piece(units, 1, 1, 10**9)
    assert 1 <= piece <= block_units(units)
    for share in (0.3, 1.0):
        placement = place_static(frequency, 1, int(share * 3 * units))
        pool, programs = pool_for(placement.slots, units=units)
        fill_pool(Transfer(store, pool, programs, NumpyPool(1), piece), pool, placement)
        assert_filled(pool, store, placement.buckets)


@pytest.mark.parametrize("spare", [0, 1, 639, 640, 1000, 10**4, 10**9])
def test_pieces_in_flight_fit_the_scratch_memory(spare):
    """A unit is 100 bytes on the host and 340 on the device; three staging slots, one converted piece."""
    piece = fill_piece(768, 100, 340, spare)
    assert 1 <= piece <= 4  # a twentieth of the smallest pool, 96
    assert piece * (RING * 100 + 340) <= spare or piece == 1
    assert piece == 4 or (piece + 1) * (RING * 100 + 340) > spare  # no smaller than it must be


def test_a_unit_moves_to_another_slot():
    store = store_of(2)
    pool, programs = pool_for((4, 3))
    transfer = Transfer(store, pool, programs, NumpyPool(1), 2)
    for units, slots in (([9, 8], [0, 3]), ([7, 6], [1, 2]), ([20, 9], [0, 2])):
        transfer.send(0, np.array(units, np.int32), np.array(slots, np.int32))
    transfer.drain()
    assert_filled(pool, store, [np.array([20, 7, 9, 8]), np.full(3, -1)][:1])
    assert pool.bucket(1).tolist() == [-1] * 3 and not any(part.any() for part in pool.parts(1))


class Log:
    """A host, a pool and programs that move nothing and write down what they were asked."""

    def __init__(self):
        self.events = []
        self.slots, self.epoch = (64,), 0
        self.lanes = {}

    def lane(self, staging):
        """A small number for each staging slot."""
        return self.lanes.setdefault(staging.ctypes.data, len(self.lanes))

    def gather(self, bundle, units, out):
        self.events.append(("gather", self.lane(out)))

    def get(self, kind, *sizes):
        self.asked = (kind, *sizes)
        return lambda parts, staging, slots: self.lane(staging)

    def update(self, layer, slots, units, program, epoch):
        lane = program(None)
        self.events.append(("update", lane))
        return SimpleNamespace(block_until_ready=lambda: self.events.append(("ready", lane)))


def test_a_staging_slot_waits_for_the_update_that_read_it():
    log = Log()
    transfer = Transfer(store_of(1), log, log, log, 2)
    for start in range(0, 16, 2):
        two = np.arange(start, start + 2, dtype=np.int32)
        transfer.send(0, two, two)
    assert log.asked == ("write", 64, 2, "float32")
    assert len(log.lanes) == RING == 3 and all(address % 64 == 0 for address in log.lanes)
    state = dict.fromkeys(range(RING), "ready")
    for event, lane in log.events:
        before = {"gather": "ready", "update": "gather", "ready": "update"}[event]
        assert state[lane] == before, (event, lane, log.events)
        state[lane] = event
    gathers = [lane for event, lane in log.events if event == "gather"]
    waits = [lane for event, lane in log.events if event == "ready"]
    assert gathers == [0, 1, 2, 0, 1, 2, 0, 1] and waits == [0, 1, 2, 0, 1]  # never longer than needed
    transfer.drain()
    assert [lane for event, lane in log.events if event == "ready"] == [0, 1, 2, 0, 1, 2, 0, 1]
    transfer.drain()
    assert len(log.events) == 24


@jax.jit
def later(parts):
    """The same parts, after a tenth of a second of arithmetic that adds nothing to them."""
    busy = jax.lax.fori_loop(0, 600, lambda _, x: jnp.tanh(x @ x), jnp.ones((256, 256)))
    return tuple(part + 0 * busy[0, 0] for part in parts)


class Blind:
    """A pool whose fences are ready at once, as if the ring had none."""

    def __init__(self, pool):
        self._pool, self.slots, self.epoch = pool, pool.slots, pool.epoch

    def update(self, *args):
        self._pool.update(*args)
        return SimpleNamespace(block_until_ready=lambda: None)


def send_all_before_any_runs(blind):
    """Eight pieces for a pool that is busy, so that every update runs after its dispatch; -> pool, store, units."""
    store = store_of(1, units=64, hidden=256)
    pool, programs = pool_for((64,), units=64, hidden=256)
    programs.get("write", 64, 8, "float32")
    units = np.random.default_rng(0).permutation(64).astype(np.int32)
    transfer = Transfer(store, Blind(pool) if blind else pool, programs, NumpyPool(1), 8)
    nothing = np.zeros(0, np.int32)
    pool.update(0, nothing, nothing, lambda parts: (later(parts), parts[0][:1]))
    for start in range(0, 64, 8):
        transfer.send(0, units[start : start + 8], np.arange(start, start + 8, dtype=np.int32))
    transfer.drain()
    jax.block_until_ready(pool.parts(0))
    return pool, store, units


def test_staging_memory_is_safe_while_updates_run_late():
    pool, store, units = send_all_before_any_runs(blind=False)
    assert_filled(pool, store, [units])


def test_without_fences_rows_arrive_from_other_pieces():
    """Why the ring waits: jax reads page-aligned NumPy memory in place, long after the call returned."""
    for _ in range(10):  # a pause of this thread at the wrong moment would hide it
        pool, store, units = send_all_before_any_runs(blind=True)
        gate = np.array(pool.parts(0)[0])
        if not np.array_equal(gate, store.arenas[0][units, 0, 0]):
            break
    with pytest.raises(AssertionError):
        assert_filled(pool, store, [units])
    np.testing.assert_array_equal(gate[-8:], store.arenas[0][units[-8:], 0, 0])  # only the last pieces are right


def test_many_pieces_in_a_row():
    """Hundreds of different pieces as fast as they go, over slots that are written again and again."""
    store = store_of(1, units=512, hidden=256)
    pool, programs = pool_for((96,), units=512, hidden=256)
    transfer = Transfer(store, pool, programs, NumpyPool(1), 32)
    rng = np.random.default_rng(0)
    bucket = np.full(96, -1, np.int32)
    for step in range(300):
        absent = np.setdiff1d(np.arange(512, dtype=np.int32), bucket)
        units = rng.permutation(absent)[:32]
        slots = np.arange(step % 3 * 32, step % 3 * 32 + 32, dtype=np.int32) if step < 3 else rng.permutation(96)[:32]
        transfer.send(0, units, slots.astype(np.int32))
        bucket[slots] = units
        if step % 50 == 49:
            transfer.drain()
            pool.check()
            assert_filled(pool, store, [bucket])


def test_a_bucket_smaller_than_a_piece_is_noticed():
    pool, programs = pool_for((3,))
    transfer = Transfer(store_of(1), pool, programs, NumpyPool(1), 4)
    with pytest.raises(AssertionError, match="layer 0: a slot was never filled"):
        fill_pool(transfer, pool, Placement((np.arange(3, dtype=np.int32),), UNITS))


def test_a_failed_send_costs_no_staging_memory():
    store = store_of(1)
    pool, programs = pool_for((4,))
    transfer = Transfer(store, pool, programs, NumpyPool(1), 2)
    for _ in range(RING + 1):
        with pytest.raises(ValueError, match="units"):
            transfer.send(0, np.array([0, UNITS], np.int32), np.array([0, 1], np.int32))
    for slots in ([0, 1], [2, 3]):
        transfer.send(0, np.array(slots, np.int32), np.array(slots, np.int32))
    transfer.drain()
    assert_filled(pool, store, [np.arange(4)])
