"""Arenas and the host store."""

import gc
import mmap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dynajax.bundles import HostStore, allocate_arena, arena_shape, load_store, one_arena
from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.spec import spec_of
from dynajax.errors import FitError
from dynajax.testing import TINY, make_checkpoint
from dynajax.testing.families import write
from dynajax.testing.mixtures import MIXTURES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_arena_is_aligned_zeroed_and_writable(dtype):
    arena = allocate_arena((5, 3, 1, 7), dtype)
    assert arena.shape == (5, 3, 1, 7) and str(arena.dtype) == dtype
    assert arena.ctypes.data % mmap.PAGESIZE == 0
    assert arena.flags.c_contiguous and arena.flags.writeable
    assert not arena.any()
    arena[-1] = 1
    assert arena.sum() == 21
    assert allocate_arena((2, 2), arena.dtype).dtype == arena.dtype  # the NumPy type serves as well as its name


def resident_kib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def test_memory_returns_when_the_last_view_is_gone():
    before = resident_kib()
    arena = allocate_arena((64, 2**18), "float32")
    arena[...] = 1
    view = arena[3:, ::2]
    del arena
    assert resident_kib() - before > 60_000 and view.all()
    del view
    gc.collect()
    assert resident_kib() - before < 8_000


def test_impossible_arenas():
    with pytest.raises(FitError, match="GiB"):
        allocate_arena((2**50, 2), "float32")
    with pytest.raises(FitError, match="GiB"):
        allocate_arena((2**70,), "float32")
    with pytest.raises(ValueError, match="at least one element"):
        allocate_arena((0, 3), "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_load_store(tmp_path, dtype):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, TINY, shards=3))
    seen = []
    store = load_store(checkpoint, dtype, seen.append)
    store.check()
    assert seen == [0, 1]
    assert store.dtype == dtype
    assert store.nbytes == sum(arena.nbytes for arena in store.arenas)
    assert store.unit_bytes == 3 * TINY.hidden * store.dtype.itemsize
    expected = np.empty(store.arenas[0].shape, store.dtype)
    for layer, arena in enumerate(store.arenas):
        checkpoint.fill_bundle(layer, expected)
        np.testing.assert_array_equal(arena, expected)


def test_units_of_a_model_with_biases(tmp_path):
    """Two parts; behind up's row its bias, behind down's nothing, and no rest of what was there before."""
    folder = write(tmp_path, "opt")
    checkpoint = Checkpoint.open(folder)
    store = load_store(checkpoint, "float32")
    store.check()
    tensors = load_file(folder / "model.safetensors")
    for layer, arena in enumerate(store.arenas):
        at = f"model.decoder.layers.{layer}."
        assert arena.shape == (80, 2, 1, 64)
        np.testing.assert_array_equal(arena[:, 0, 0, :32], tensors[f"{at}fc1.weight"])
        np.testing.assert_array_equal(arena[:, 0, 0, 32], tensors[f"{at}fc1.bias"])
        np.testing.assert_array_equal(arena[:, 1, 0, :32], tensors[f"{at}fc2.weight"].T)
        assert not arena[:, 0, 0, 33:].any() and not arena[:, 1, 0, 32:].any()
    used = np.full(store.arenas[0].shape, np.nan, np.float32)
    checkpoint.fill_bundle(1, used)
    np.testing.assert_array_equal(used, store.arenas[1])


def test_one_arena_serves_every_layer():
    store = one_arena(TINY, "bfloat16")
    store.check()
    assert len(store.arenas) == TINY.layers and store.dtype == "bfloat16"
    assert store.arenas[0].shape == (TINY.ffn, 3, 1, TINY.hidden)
    store.arenas[0][:] = 3
    assert (store.arenas[1] == 3).all()


def test_layers_without_experts_have_no_arena():
    spec = spec_of(MIXTURES["deepseek_v2"].config(), Path("made"))
    store = one_arena(spec, "float32")
    store.check()
    assert len(store.arenas) == 2 and store.arenas[0].shape == arena_shape(spec) == (8, 3, 20, 40)
    assert arena_shape(TINY) == (TINY.ffn, 3, 1, TINY.hidden)


def test_an_empty_store_holds_nothing():
    HostStore(()).check()
    assert HostStore(()).nbytes == 0


@pytest.mark.parametrize(
    "second",
    [
        np.zeros((4, 3, 1, 16), np.float32),  # as likely as not off the page
        allocate_arena((4, 3, 1, 8), "float32"),
        allocate_arena((4, 3, 1, 16), ml_dtypes.bfloat16),
        allocate_arena((4, 3, 16), "float32"),
        allocate_arena((4, 3, 1, 32), "float32")[..., ::2],
    ],
)
def test_check_notices(second):
    if second.flags.owndata:
        second = np.frombuffer(bytearray(second.nbytes + 4), np.float32, offset=4).reshape(second.shape)
    with pytest.raises(AssertionError):
        HostStore([allocate_arena((4, 3, 1, 16), "float32"), second]).check()
