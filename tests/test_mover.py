"""Experts on their way: pieces, the books of the pool, urgent moves first, and failures that reach who waits."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.bundles import HostStore, allocate_arena
from dynajax.errors import EngineError, StorageError
from dynajax.mover import Mover, Ticket
from dynajax.plan import Placement
from dynajax.pool import DevicePool
from dynajax.transfer import UnitTransfer, fill_units, piece_rows

EXPERTS, PARTS, WIDTH, HIDDEN, SLOTS = 5, 3, 7, 16, 3


class Programs:
    """The one program that is needed, not compiled."""

    def get(self, kind, slots, rows, dtype):
        assert (kind, slots, dtype) == ("write_rows", SLOTS, "float32")

        def run(part, new, start):
            assert new.shape == (rows, HIDDEN)
            return part.at[int(start) : int(start) + rows].set(jnp.array(new)), jnp.array(start)

        return run


@pytest.fixture
def store():
    arena = allocate_arena((EXPERTS, PARTS, WIDTH, HIDDEN), "float32")
    arena[:] = np.random.default_rng(0).standard_normal(arena.shape)
    return HostStore((arena,))


@pytest.fixture
def pool():
    return DevicePool((SLOTS,), PARTS, WIDTH, (HIDDEN,), jnp.dtype("float32"), EXPERTS)


def held(pool, slot):
    """[P, W, D] of a slot."""
    return np.stack([np.asarray(part)[slot * WIDTH : (slot + 1) * WIDTH] for part in pool.parts(0)])


@pytest.mark.parametrize("piece", [1, 3 * HIDDEN * 4, WIDTH * HIDDEN * 4, 2**20])
def test_a_unit_arrives_whole_in_pieces_of_any_size(store, pool, monkeypatch, piece):
    monkeypatch.setattr("dynajax.transfer.PIECE_BYTES", piece)
    transfer = UnitTransfer(store, Programs())
    fill_units(transfer, pool, Placement((np.array([0, 2, 4], np.int32),), EXPERTS))
    moved = transfer.bring(pool, 0, 3, 0, 1)
    transfer.drain()
    assert moved.nbytes == store.unit_bytes and pool.bucket(0).tolist() == [0, 3, 4] and pool.cold(0).tolist() == [1, 2]
    for slot, unit in enumerate((0, 3, 4)):
        np.testing.assert_array_equal(held(pool, slot), store.arenas[0][unit])


def test_pieces_are_equal_shares_within_the_limit(monkeypatch):
    monkeypatch.setattr("dynajax.transfer.PIECE_BYTES", 100)
    assert [piece_rows(width, 10) for width in (1, 10, 11, 25)] == [1, 10, 6, 9]


def test_a_slot_has_no_unit_while_one_is_written(store, pool):
    transfer = UnitTransfer(store, Programs())
    fill_units(transfer, pool, Placement((np.array([0, 2, 4], np.int32),), EXPERTS))
    seen = []

    class Watching(Programs):
        def get(self, *key):
            program = super().get(*key)

            def run(part, new, start):
                seen.append((pool.bucket(0).tolist(), pool._cold[0] is None))
                return program(part, new, start)

            return run

    UnitTransfer(store, Watching()).bring(pool, 0, 1, 0, 2)
    assert seen and all(bucket == [0, 2, -1] and unknown for bucket, unknown in seen)
    with pytest.raises(AssertionError, match="not vacated"):
        pool.name(0, 0, 3)


def test_a_cleared_pool_refuses_what_was_on_its_way(store, pool):
    class Clearing(Programs):
        def get(self, *key):
            program = super().get(*key)

            def run(part, new, start):
                pool.epoch += 1
                return program(part, new, start)

            return run

    with pytest.raises(RuntimeError, match="cleared"):
        UnitTransfer(store, Clearing()).bring(pool, 0, 1, 0, 2)


class Gate:
    """A transfer that waits at its first move until it is let go, and remembers the order."""

    def __init__(self, fault=None):
        self.order, self.started, self.open, self.closed = [], threading.Event(), threading.Event(), False
        self.fault = fault

    def bring(self, pool, arena, unit, layer, slot):
        self.started.set()
        assert self.open.wait(10)
        if self.fault is not None:
            raise self.fault
        self.order.append(unit)
        return "moved"

    def close(self):
        self.closed = True


@pytest.fixture
def moving():
    movers = []

    def make(gate):
        movers.append(Mover(gate, (0,)))
        return movers[-1]

    yield make
    for mover in movers:
        mover.close()


def test_what_a_layer_waits_for_comes_first(moving):
    gate = Gate()
    mover = moving(gate)
    tickets = [mover.move(None, 0, Ticket(0, unit, 0)) for unit in (1, 2)]
    assert gate.started.wait(10)  # 1 is under way
    urgent = [mover.move(None, 0, Ticket(0, unit, 0), urgent=True) for unit in (3, 4)]
    gate.open.set()
    for ticket in (*tickets, *urgent):
        mover.wait(ticket)
    assert gate.order == [1, 3, 4, 2]
    mover.settle()
    assert mover.busy_s == 0


def test_a_failure_reaches_whoever_waits_or_asks_next(moving):
    gate = Gate(StorageError("no more disk"))
    mover = moving(gate)
    ticket = mover.move(None, 0, Ticket(0, 1, 0))
    gate.open.set()
    with pytest.raises(StorageError, match="no more disk"):
        mover.wait(ticket)
    with pytest.raises(StorageError, match="no more disk"):
        mover.move(None, 0, Ticket(0, 2, 0))
    assert mover.failed and ticket.moved is None


def test_a_hang_becomes_an_error(moving, monkeypatch):
    gate = Gate()
    mover = moving(gate)
    monkeypatch.setattr("dynajax.worker.HANG_S", 0.05)
    with pytest.raises(EngineError, match="the mover did not answer"):
        mover.wait(mover.move(None, 0, Ticket(0, 1, 0)))
    gate.open.set()


def test_closing_drops_what_waits_and_gives_back(moving):
    gate = Gate()
    mover = moving(gate)
    mover.move(None, 0, Ticket(0, 1, 0))
    mover.move(None, 0, Ticket(0, 2, 0))
    assert gate.started.wait(10)
    mover.close(wait_s=0.01)  # the first move still waits
    gate.open.set()
    mover.close()
    assert gate.closed and gate.order == [1]
    with pytest.raises(EngineError, match="closed"):
        mover.settle()
