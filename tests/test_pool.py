"""The device pool: contents and bucket change together, buffers stay, and the books notice what is wrong."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.ops.ffn import write_slots
from dynajax.pool import DevicePool

UNITS, HIDDEN = 9, 4


def pool_of(*slots, width=1, dtype="float32"):
    return DevicePool(slots, 3, width, (HIDDEN,), jnp.dtype(dtype), UNITS)


def rows_of(units, width=1):
    """Rows that say whose they are: unit + part / 10."""
    rows = np.zeros((len(units), 3, width, HIDDEN), np.float32)
    return rows + np.array(units)[:, None, None, None] + np.arange(3)[None, :, None, None] / 10


write = jax.jit(write_slots, donate_argnums=0)


def ids(*numbers):
    return np.array(numbers, np.int32)


def put(pool, layer, slots, units):
    """The update that an engine would make."""
    rows = jnp.asarray(rows_of(units), jnp.float32)
    return pool.update(layer, slots, units, lambda parts: write(parts, rows, slots))


def full(layer_slots=(3, 2)):
    pool = pool_of(*layer_slots)
    for layer, count in enumerate(layer_slots):
        put(pool, layer, np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32) + 4)
    return pool


def pointers(pool, layer):
    return [part.unsafe_buffer_pointer() for part in pool.parts(layer)]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_a_new_pool(width, dtype):
    pool = pool_of(3, 0, 2, width=width, dtype=dtype)
    assert pool.slots == (3, 0, 2)
    assert [[part.shape for part in pool.parts(layer)] for layer in range(3)] == [
        [(3 * width, HIDDEN)] * 3,
        [],
        [(2 * width, HIDDEN)] * 3,
    ]
    assert not any(part.any() for layer in range(3) for part in pool.parts(layer))  # no slot is ever undefined
    assert pool.nbytes == 3 * 5 * width * HIDDEN * jnp.dtype(dtype).itemsize
    assert [pool.bucket(layer).tolist() for layer in range(3)] == [[-1] * 3, [], [-1] * 2]


def test_an_update_writes_rows_and_bucket():
    pool = full()
    pool.check()
    fence = put(pool, 0, ids(2, 0), ids(8, 1))
    fence.block_until_ready()
    pool.check()
    assert pool.bucket(0).tolist() == [1, 5, 8] and pool.bucket(1).tolist() == [4, 5]
    for layer in range(2):
        expected = rows_of(pool.bucket(layer))
        for part, array in enumerate(pool.parts(layer)):
            np.testing.assert_allclose(array, expected[:, part, 0])
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(pool.parts(0)[0], rows_of(ids(8, 5, 1))[:, 0, 0])


def test_an_update_keeps_the_buffers():
    pool = full()
    before = [pointers(pool, layer) for layer in range(2)]
    for step in range(4):
        put(pool, 0, ids(step % 3), ids(step))
    assert [pointers(pool, layer) for layer in range(2)] == before


def test_a_view_that_is_kept_makes_the_update_copy():
    """Why the class forbids NumPy views of its parts: nothing else says that the pool was copied."""
    pool = full()
    before = pointers(pool, 0)
    view = np.asarray(pool.parts(0)[1])
    put(pool, 0, ids(1), ids(8))
    assert pointers(pool, 0)[1] != before[1]
    assert view[1, 0] == np.float32(5.1)  # it still shows the old contents
    pool.check()


def test_rows_and_bucket_change_under_one_lock():
    """While the program is dispatched nobody else gets in, and the bucket does not run ahead of the rows."""
    pool = full()
    seen = []

    def program(parts):
        outsider = threading.Thread(target=lambda: seen.append(pool.lock.acquire(blocking=False)))
        outsider.start()
        outsider.join()
        seen.append(pool.bucket(0).tolist())
        return write(parts, jnp.asarray(rows_of(ids(8)), jnp.float32), ids(1))

    pool.update(0, ids(1), ids(8), program)
    assert seen == [False, [4, 5, 6]]
    assert pool.bucket(0).tolist() == [4, 8, 6]
    assert not pool.lock.locked()


def test_a_failed_update_changes_nothing_and_frees_the_lock():
    pool = full()
    before = pointers(pool, 0)
    with pytest.raises(RuntimeError, match="planted"):
        pool.update(0, ids(1), ids(8), lambda parts: (_ for _ in ()).throw(RuntimeError("planted")))
    assert pool.bucket(0).tolist() == [4, 5, 6] and pointers(pool, 0) == before
    assert not pool.lock.locked()
    pool.check()


def test_the_books_notice_parts_that_were_donated_away():
    pool = full()

    def program(parts):
        write(parts, jnp.asarray(rows_of(ids(8)), jnp.float32), ids(1))
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        pool.update(1, ids(1), ids(8), program)
    with pytest.raises(AssertionError, match="layer 1: parts were donated away"):
        pool.check()


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (ids(0, 1), "layer 1: a slot was never filled"),
        (ids(0, 1, 1), "layer 1: a unit sits in two slots"),
        (ids(0, 1, UNITS), "layer 1: a unit id out of range"),
        (ids(0, 1, -2), "layer 1: a slot was never filled"),
    ],
)
def test_the_books_notice(units, message):
    pool = pool_of(1, 3, 0)
    put(pool, 0, ids(0), ids(UNITS - 1))
    put(pool, 1, np.arange(len(units), dtype=np.int32), units)
    with pytest.raises(AssertionError, match=message):
        pool.check()
    put(pool, 1, ids(0, 1, 2), ids(8, 0, 3))
    pool.check()


@pytest.mark.parametrize("slots", [ids(3), ids(0, 3), ids(-1), ids(0, 1, 2**31 - 1)])
def test_slots_outside_the_pool(slots):
    """XLA would drop such a row without a word; nothing must have changed."""
    pool = full()
    with pytest.raises(ValueError, match=r"slots of layer 0 must be in \[0, 3\)"):
        put(pool, 0, slots, np.zeros(len(slots), np.int32))
    assert pool.bucket(0).tolist() == [4, 5, 6]
    pool.check()


def test_a_bucket_is_a_copy():
    pool = full()
    pool.bucket(0)[:] = 0
    assert pool.bucket(0).tolist() == [4, 5, 6]
