"""The systems that are compared: what fits, what each is made of, and figures that can be told beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.sim import compare
from dynajax.sim.compare import SYSTEMS, Job, simulate
from dynajax.sim.hardware import load_hardware
from dynajax.sim.models import SPECS, Weights
from dynajax.sim.rivals import llama_cpp_s, transformers_s
from dynajax.sim.systems import bound_s, pool_bytes, shipped_frequency, shipped_share
from tests.sim.cases import LAYERS, NEURONS, activity, load, machine

GIB = 2**30


def weights_of(model: str, dtype: str = "float16") -> Weights:
    return Weights(spec=SPECS[model], dtype=dtype, host_dtype=dtype)


@pytest.mark.parametrize(
    ("model", "dtype", "neurons", "attention", "cache"),
    [("relullama-7b", "float16", 8.66, 4.29, 0.524), ("relullama-13b", "float16", 16.99, 8.39, 0.819),
     ("relullama-70b", "int4", 31.71, 6.79, 0.328)],
)  # fmt: skip
def test_sizes_are_the_published_ones(model, dtype, neurons, attention, cache):
    """GB of neurons and of attention, MB of cache for a token"""
    weights = weights_of(model, dtype)
    assert weights.neurons / 1e9 == pytest.approx(neurons, abs=0.01)
    assert weights.attention * weights.spec.layers / 1e9 == pytest.approx(attention, abs=0.01)
    assert weights.cache(1) / 1e6 == pytest.approx(cache, abs=0.001)
    assert weights.parameters / 1e9 == pytest.approx({32: 6.74, 40: 13.0, 80: 69.0}[weights.spec.layers], abs=0.1)


def test_transformers_streams_what_does_not_fit():
    """Everything fits: one reading of the weights. Nothing fits: all of it over the link, at 16 bit."""
    weights, hardware = weights_of("relullama-7b", "int4"), load_hardware("pc-high")
    hardware = replace(hardware, layer_s=1e-12, systems={})
    read = weights.attention * 32 + weights.neurons + weights.head + weights.cache(100)
    assert transformers_s(weights, hardware, 100) == pytest.approx(read / hardware.device_bps)
    empty = replace(hardware, device_bytes=hardware.reserved_bytes + GIB // 10)
    halves = weights_of("relullama-7b")
    streamed = halves.attention * 32 + halves.neurons
    assert transformers_s(weights, empty, 100) == pytest.approx(
        streamed / hardware.pageable_bps + (streamed + weights.head + weights.cache(100)) / hardware.device_bps
    )


def test_llama_cpp_splits_by_layers():
    weights, hardware = weights_of("relullama-7b"), replace(load_hardware("pc-high"), layer_s=1e-12)
    layer = weights.attention + weights.neurons / 32 + weights.cache(100) / 32
    fits = int(10.5 * layer + weights.head)
    some = replace(hardware, device_bytes=hardware.reserved_bytes + fits)
    expected = (10 * layer + weights.head) / hardware.device_bps + 22 * layer / hardware.host_rate("float16")
    assert llama_cpp_s(weights, some, 100) == pytest.approx(expected, rel=1e-6)
    slow = replace(some, host_bps=1e9)  # no kernel reads faster than memory
    assert llama_cpp_s(weights, slow, 100) > 20 * layer / 1e9


def test_powerinfers_flaws():
    order = shipped_frequency(np.arange(12, dtype=np.float32)[:, None])[:, 0].astype(int).tolist()
    assert order == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    shares = [shipped_share(weights_of(model)) for model in ("relullama-13b", "relullama-70b")]
    assert shares == pytest.approx([0.988, 0.762], abs=1e-3)


def test_the_bound_splits_live_neurons_so_that_both_sides_end_together():
    """6 live neurons a layer of 3 bytes, the device 10 times as fast: 6 x 10/11 of them are hot, 2 if 2 fit."""
    live = np.zeros((1, LAYERS, NEURONS), np.bool_)
    live[:, :, :6] = True
    rest = (2 * 20 + 50) / 100
    free = bound_s(load(), machine(), activity(live), (8, 8))
    assert free == pytest.approx(rest + 2 * 6 * 10 / 11 * 0.03)
    tight = bound_s(load(), machine(), activity(live), (2, 2))
    assert tight == pytest.approx(rest + 2 * 4 * 0.3)


@pytest.fixture
def job(monkeypatch) -> Job:
    monkeypatch.setattr(compare, "WIDTH", 300)
    compare.drawn.cache_clear()
    yield Job(model="relullama-13b", dtype="float16", hardware=load_hardware("pc-high"), tokens=6)
    compare.drawn.cache_clear()


def test_every_system_and_their_order(job):
    speeds = {name: simulate(job, name).tok_s for name in SYSTEMS}
    assert speeds["transformers"] < speeds["llama.cpp"] < speeds["powerinfer"] < speeds["powerinfer-repaired"]
    assert max(speeds, key=lambda name: speeds[name]) == "bound"
    assert speeds["powerinfer-repaired"] < speeds["ours"]


def test_constants_can_be_changed(job):
    base = simulate(job, "dynamicinfer")
    still = simulate(job, "dynamicinfer", policy="static")
    assert still.tally.migrated == 0 < base.tally.migrated
    assert still.tok_s == pytest.approx(simulate(job, "powerinfer-repaired").tok_s, rel=1e-3)
    low = simulate(job, "dynamicinfer", theta=0.05).tally
    assert low.on_device + low.on_host > base.tally.on_device + base.tally.on_host
    assert simulate(job, "dynamicinfer", placement="shipped").tally.hot_live < base.tally.hot_live
    steps = [simulate(job, "ours", steps=count).tok_s for count in range(1, 5)]
    assert simulate(job, "powerinfer-repaired").tok_s < steps[0] < steps[1]


def test_more_memory_holds_more(job):
    pools = [
        pool_bytes(job.weights, replace(job.hardware, device_bytes=size * GIB), 512, 1e9) for size in (8, 16, 20, 24)
    ]
    assert pools[0] == 0 < pools[1] < pools[2] < pools[3]
