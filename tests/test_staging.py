"""Every way of sending a block gives its bytes, and memory that is still being read is not written again."""

import time

import jax
import ml_dtypes
import numpy as np
import pytest

from dynajax.bundles import HostStore, allocate_arena
from dynajax.config import EngineConfig
from dynajax.errors import UsageError
from dynajax.pool import DevicePool
from dynajax.staging import _MAKERS, KINDS, Plain, open_staging
from dynajax.transfer import RING, Transfer
from hostcompute import NumpyPool
from tests.test_transfer import Blind, assert_filled, later, pool_for, store_of

HERE = ("plain", "pinned_host")  # ways that the CPU backend has
DEVICE = jax.local_devices()[0]


def block_of(units: int, dtype="float32", seed=0) -> np.ndarray:
    block = allocate_arena((units, 3, 1, 64), dtype)
    block[...] = np.random.default_rng(seed).standard_normal(block.shape).astype(block.dtype)
    return block


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", HERE)
def test_the_bytes_arrive(name, dtype):
    blocks = [block_of(units, dtype, seed) for seed, units in enumerate((1, 7, 256))]
    staging = open_staging(name, DEVICE, blocks[-1])
    assert staging.name == name
    staging.register(blocks)
    for block in blocks:
        for rows in (block, block[: 1 + len(block) // 2]):  # a slot need not be full
            sent = staging.send(rows)
            assert sent.is_ready() and sent.devices() == {DEVICE} and sent.sharding.memory_kind == "device"
            assert sent.shape == rows.shape and sent.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            assert np.array(sent).tobytes() == rows.tobytes()
            assert np.array(sent).tobytes() != (rows * rows.dtype.type(2)).tobytes()
    staging.close()
    staging.close()


def test_what_this_device_cannot_do_is_refused_with_one_line():
    with pytest.raises(UsageError, match="^--staging registered cannot be used here: .*use auto or plain$") as caught:
        open_staging("registered", DEVICE, block_of(4))
    assert "\n" not in str(caught.value)


def test_unknown_ways_are_refused_before_anything_opens():
    with pytest.raises(UsageError, match="--staging must be one of .*plain.*, got 'fast'"):
        EngineConfig(staging="fast")


def test_auto_is_one_that_works_and_says_what_was_measured(caplog):
    with caplog.at_level("INFO", "dynajax"):
        staging = open_staging("auto", DEVICE, block_of(16))
    assert staging.name in HERE
    (record,) = caplog.records
    assert record.getMessage().startswith(f"units are sent by way of {staging.name}, the fastest for 12 KiB: ")
    assert all(f"{name} " in record.getMessage() for name in HERE) and "registered" not in record.getMessage()
    block = block_of(5)
    np.testing.assert_array_equal(np.array(staging.send(block)), block)


class Slow(Plain):
    """Takes its time."""

    name = "pinned_host"

    def send(self, block):
        time.sleep(0.005)
        return super().send(block)


class Broken(Plain):
    """Registers, and then cannot send."""

    name = "registered"
    open = 0

    def register(self, blocks):
        Broken.open += len(list(blocks))

    def send(self, block):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such link\nsecond line")

    def close(self):
        Broken.open = 0


def test_auto_measures_and_passes_over_what_fails(monkeypatch):
    assert set(KINDS) == set(_MAKERS) == {"pinned_host", "registered", "plain"}
    monkeypatch.setitem(_MAKERS, "pinned_host", Slow)
    monkeypatch.setitem(_MAKERS, "registered", Broken)
    assert open_staging("auto", DEVICE, block_of(64)).name == "plain"
    assert Broken.open == 0  # what was registered for the trial was given back
    with pytest.raises(UsageError, match="no such link; use auto or plain"):
        open_staging("registered", DEVICE, block_of(4))
    assert Broken.open == 0

    class Slower(Slow):
        name = "plain"

        def send(self, block):
            super().send(block)
            return super().send(block)

    monkeypatch.setitem(_MAKERS, "plain", Slower)
    assert open_staging("auto", DEVICE, block_of(64)).name == "pinned_host"


# --- the ring ---


class Dirty:
    """A gatherer that remembers where it wrote."""

    def __init__(self):
        self._host, self.written = NumpyPool(1), []

    def gather(self, bundle, units, out):
        self.written.append(out.ctypes.data)
        return self._host.gather(bundle, units, out)


def load_all_before_any_is_applied(name: str, blind: bool) -> tuple[DevicePool, HostStore, np.ndarray, Dirty]:
    """Eight pieces for a busy pool, so that every update runs long after its dispatch -> pool, store, units, host."""
    store = store_of(1, units=64, hidden=256)
    pool, programs = pool_for((64,), units=64, hidden=256)
    programs.get("write", 64, 8, "float32")
    units = np.random.default_rng(0).permutation(64).astype(np.int32)
    host, staging = Dirty(), _MAKERS[name](DEVICE)
    transfer = Transfer(store, Blind(pool) if blind else pool, programs, host, 8, staging)
    nothing = np.zeros(0, np.int32)
    pool.update(0, nothing, nothing, lambda parts: (later(parts), parts[0][:1]))
    for start in range(0, 64, 8):
        piece = units[start : start + 8]
        block = transfer.load(0, piece)
        assert block.gather_s >= 0 and block.transfer_s > 0
        transfer.apply(0, block, piece, np.arange(start, start + 8, dtype=np.int32))
    transfer.close()
    jax.block_until_ready(pool.parts(0))
    return pool, store, units, host


@pytest.mark.parametrize("name", HERE)
def test_blocks_are_used_again_when_their_update_has_run(name):
    pool, store, units, host = load_all_before_any_is_applied(name, blind=False)
    assert_filled(pool, store, [units])
    assert len(set(host.written)) == RING and host.written[:RING] == host.written[RING : 2 * RING]


def test_without_the_fence_units_arrive_from_other_blocks():
    """Why the ring waits: what is sent plainly may be the staging memory itself."""
    for _ in range(10):  # a pause of this thread at the wrong moment would hide it
        pool, store, units, _ = load_all_before_any_is_applied("plain", blind=True)
        if not np.array_equal(np.array(pool.parts(0)[0]), store.arenas[0][units, 0, 0]):
            break
    with pytest.raises(AssertionError):
        assert_filled(pool, store, [units])


@pytest.mark.parametrize("name", HERE)
def test_a_failed_load_or_update_costs_no_block(name, monkeypatch):
    store = store_of(1)
    pool, programs = pool_for((4,))
    transfer = Transfer(store, pool, programs, NumpyPool(1), 2, _MAKERS[name](DEVICE))
    two, outside = np.array([0, 1], np.int32), np.array([0, 99], np.int32)
    for _ in range(RING + 1):
        with pytest.raises(ValueError, match="units"):
            transfer.load(0, outside)
        with pytest.raises(ValueError, match="slots of layer 0"):
            transfer.apply(0, transfer.load(0, two), two, outside)
    for units in (two, two + 2):
        transfer.apply(0, transfer.load(0, units), units, units)
    transfer.close()
    assert_filled(pool, store, [np.arange(4)])


def test_a_block_for_a_pool_that_was_cleared_is_refused():
    """A thread that hung while the engine was made anew writes nothing into the new pool."""
    store = store_of(1)
    pool, programs = pool_for((4,))
    two = np.array([0, 1], np.int32)
    transfer = Transfer(store, pool, programs, NumpyPool(1), 2, Plain(DEVICE))
    block = transfer.load(0, two)
    pool.clear()
    with pytest.raises(RuntimeError, match="the pool was cleared since"):
        transfer.apply(0, block, two, two)
    assert pool.bucket(0).tolist() == [-1] * 4 and not any(np.array(part).any() for part in pool.parts(0))
    transfer.close()


def test_registered_memory_is_given_back_though_an_update_failed(monkeypatch):
    store = store_of(1)
    pool, programs = pool_for((4,))
    staging, closed = Plain(DEVICE), []
    transfer = Transfer(store, pool, programs, NumpyPool(1), 2, staging)
    monkeypatch.setattr(staging, "close", lambda: closed.append(1), raising=False)
    monkeypatch.setattr(transfer, "drain", lambda: pytest.fail("a fence that failed"))
    with pytest.raises(pytest.fail.Exception):
        transfer.close()
    assert closed == [1]
