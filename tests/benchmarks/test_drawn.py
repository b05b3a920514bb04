"""Models drawn on the device, and the ways of computing absent neurons that the engine's own are compared with."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_stages import drawn
from benchmarks.gpu_stages.other_ways import PinnedCold, StreamedCold, Throttled
from benchmarks.make_checkpoint import SHAPES, Recipe
from dynajax import quant
from dynajax.bundles import HostStore, allocate_arena
from dynajax.checkpoint import read_spec
from dynajax.config import Activation
from dynajax.engine.cold import ColdSide
from dynajax.pool import DevicePool
from hostcompute import open_pool
from hostcompute.packed import widened
from predictors.folder import read_manifest

SPEC = replace(SHAPES["tiny"], layers=2, hidden=64, ffn=256, heads=4, kv_heads=2, head_dim=16, vocab=1024)


def test_a_drawn_model_has_the_wanted_activity_and_what_an_engine_looks_for(tmp_path):
    model = drawn.draw(tmp_path, SPEC, "float16", Recipe(rank=8), predictors=True)
    model.store.check()
    spec = read_spec(tmp_path)
    assert (spec.layers, spec.ffn, spec.activation.kind) == (2, 256, "relu")
    frequency = np.load(tmp_path / "activations.npz")["frequency"]
    np.testing.assert_allclose(frequency.mean(axis=1), 0.125, atol=0.01)
    hottest = -np.sort(-frequency, axis=1)[:, : round(0.23 * 256)]
    np.testing.assert_allclose(hottest.sum(axis=1) / frequency.sum(axis=1), 0.8, atol=0.05)
    manifest = read_manifest(tmp_path / "predictors")
    assert manifest.fingerprint == model.fingerprint()
    assert [(entry.lead, entry.layer) for entry in manifest.entries] == [(0, 0), (0, 1), (1, 1)]
    again = drawn.Drawn(**{name: getattr(model, name) for name in drawn.Drawn.__slots__} | {"recipe": Recipe(rank=9)})
    assert again.fingerprint() != model.fingerprint()


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_on_the_device_errs_by_half_a_step(bits):
    values = np.random.default_rng(bits).standard_normal((6, 3, 96), np.float32)
    values[0, 0, :32] = 0
    packed = np.asarray(drawn.packed(jnp.asarray(values), bits))
    assert packed.shape == quant.packed_shape(values.shape, bits) and quant.bits_of(packed) == bits
    largest = np.abs(values).reshape(6, 3, 3, 32).max(axis=3, keepdims=True)
    # Half a step, and a whole one beyond the level that there is only on the other side of zero.
    step = largest / 2 ** (bits - 1)
    off = np.abs(widened(packed) - values).reshape(6, 3, 3, 32)
    assert (off <= 1.02 * step).all() and off.mean() < 0.3 * step.mean()


@pytest.fixture(scope="module")
def machine():
    """Arenas of three layers, a pool that holds the first, and threads -> arguments of a ColdSide."""
    rng = np.random.default_rng(0)
    arenas = [allocate_arena((48, 3, 1, 64), "float32") for _ in range(3)]
    for arena in arenas:
        arena[:] = rng.standard_normal(arena.shape, np.float32)
    pool = DevicePool((48, 0, 0), 3, 1, (64,), jnp.float32, 48)
    pool.update(0, np.arange(48, dtype=np.int32), np.arange(48, dtype=np.int32), lambda parts: (parts, jnp.zeros(1)))
    return HostStore(arenas), pool


@pytest.mark.parametrize("kind", [StreamedCold, PinnedCold])
def test_other_ways_compute_what_the_host_computes(machine, kind):
    host = [open_pool(1, "own") for _ in range(2)]
    wanted = ColdSide(*machine, host[0], Activation(), skip_zeros=True)
    other = kind(*machine, host[1], Activation(), skip_zeros=True)
    rng, everything = np.random.default_rng(1), np.arange(48, dtype=np.int32)
    chosen = everything if kind is StreamedCold else np.sort(rng.permutation(48)[:21]).astype(np.int32)
    for layer in (1, 2, 1):
        h = rng.standard_normal((1, 64), np.float32)
        lives = [np.full((1, len(chosen)), 7, np.uint8) for _ in range(2)]
        expected = wanted.run_chosen(layer, h, chosen, live=lives[0])
        found = other.run_chosen(layer, h, chosen, live=lives[1])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        if kind is PinnedCold:
            np.testing.assert_array_equal(*lives)
    prompt = rng.standard_normal((5, 64), np.float32)
    np.testing.assert_array_equal(other.run(2, prompt), wanted.run(2, prompt))
    assert other.counters.computed == wanted.counters.computed
    wanted.close()
    other.close()


def test_streaming_goes_through_the_link_it_is_given(machine):
    links = []

    def around(way):
        links.append(Throttled(way, 1e9))
        return links[0]

    host = open_pool(1, "own")
    cold = StreamedCold(*machine, host, Activation(), skip_zeros=True, around=around)
    cold.run(1, np.ones((1, 64), np.float32))
    cold.close()
    assert 0 < links[0].fastest_bytes_s <= 1e9
