"""The measured peak: sees what is alive, forgets nothing, and counts nobody else's arrays."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.memory import PeakMeter

MIB = 2**20


@pytest.fixture
def meter():
    return PeakMeter(jax.local_devices()[0])


def planted(mib=1):
    return jax.device_put(np.zeros((mib, MIB), np.uint8)).block_until_ready()


def test_a_planted_array_is_seen(meter):
    assert meter.sample() == 0
    one = planted()
    assert meter.sample() == one.nbytes == MIB
    two = planted(2)
    assert meter.sample() == 3 * MIB
    assert meter.peak_bytes(0) == 3 * MIB
    del one, two


def test_what_is_in_use_is_the_allocators_word_or_what_is_alive(meter):
    array = planted()
    assert meter.in_use() == array.nbytes
    del array
    assert meter.in_use() == 0
    device = SimpleNamespace(platform="cpu", memory_stats=lambda: {"bytes_in_use": 7, "peak_bytes_in_use": 9})
    assert PeakMeter(device).in_use() == 7


def test_the_peak_outlives_its_arrays(meter):
    array = planted(3)
    meter.sample()
    del array
    small = planted()
    assert meter.sample() == small.nbytes
    assert meter.peak_bytes(0) == 3 * MIB
    assert meter.peak_bytes(77) == 3 * MIB + 77  # temporaries, which no array shows


def test_only_samples_are_remembered(meter):
    array = planted()
    del array
    meter.sample()
    assert meter.peak_bytes(5) == 5


def test_arrays_from_before_do_not_count():
    before = planted(5)
    meter = PeakMeter(jax.local_devices()[0])
    assert meter.sample() == 0
    after = planted()
    assert meter.sample() == after.nbytes
    del before
    assert meter.sample() == after.nbytes  # and their going is no credit


def test_a_new_array_in_the_place_of_an_old_one_counts():
    """Python gives the identity of a dead object to a new one."""
    old = [planted() for _ in range(50)]
    identities = {id(array) for array in old}
    meter = PeakMeter(jax.local_devices()[0])
    old.clear()
    new = [planted() for _ in range(50)]
    assert identities & {id(array) for array in new}  # else this test shows nothing
    assert meter.sample() == 50 * MIB
    del new


def test_donated_arrays_are_gone(meter):
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    array = jnp.ones(MIB, jnp.float32)
    result = double(array)
    assert array.is_deleted()
    assert meter.sample() == result.nbytes == 4 * MIB


def test_an_allocator_that_keeps_its_own_peak_is_believed():
    device = SimpleNamespace(platform="cpu", memory_stats=lambda: {"peak_bytes_in_use": 12345})
    meter = PeakMeter(device)
    array = planted()
    meter.sample()
    assert meter.peak_bytes(77) == 12345
    device.memory_stats = lambda: {"bytes_in_use": 1}  # an allocator without that figure
    meter.sample()
    del array
    assert meter.peak_bytes(77) == MIB + 77
