"""Every figure with tiny sizes: positive, finite, and such as a machine could have."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from dynajax.errors import UsageError
from dynajax.profiling import QUICK, device, engine, host, machine, overhead
from dynajax.profiling.pace import Line, Pace
from dynajax.sim.hardware import Program
from hostcompute import NumpyPool, open_pool
from tests.sim import cases

PACE = Pace(seconds=0.0, least=3, most=3)
RATE = (1e4, 1e13)  # bytes or operations a second
SPAN_S = (1e-9, 10.0)


def assert_within(value, bounds):
    low, high = bounds
    assert math.isfinite(value) and low < value < high


@pytest.fixture(params=["native", "numpy"])
def pool(request):
    with open_pool(2) if request.param == "native" else NumpyPool(2) as opened:
        yield opened


@pytest.fixture(scope="module")
def store():
    return host.make_store("float16", 64, 130, 100_000)


def test_a_store_has_the_bytes_asked_for_and_positive_gates(store):
    assert [arena.shape for arena in store.arenas] == [(130, 3, 1, 64)] * 3
    assert store.nbytes >= 100_000
    assert all((arena[:, 0] > 0).all() and (arena[:, 1] < 0).any() for arena in store.arenas)


def test_halves_are_disjoint_random_and_ascending(store):
    jobs = host._halves(store)
    found = [next(jobs) for _ in range(6)]
    assert [layer for layer, _ in found] == [0, 0, 1, 1, 2, 2]
    for (_, first), (_, second) in zip(found[::2], found[1::2], strict=True):
        assert np.array_equal(np.sort(np.concatenate([first, second])), np.arange(130))
        assert (np.diff(first) > 0).all() and not np.array_equal(first, np.arange(65))


def test_host_figures(pool, store):
    assert_within(host.read_bps(pool, 4096, 16384, PACE), RATE)
    assert_within(host.rows_bps(pool, store, PACE), RATE)
    assert_within(host.rows_flops(pool, store, 4, PACE), RATE)
    assert_within(host.gather_bps(pool, store, PACE), RATE)
    assert_within(host.call_s(pool, PACE), SPAN_S)


def test_rows_count_all_that_is_read(store, monkeypatch):
    monkeypatch.setattr(Pace, "median_s", lambda pace, call: 1.0)
    with open_pool(2) as pool:
        assert host.rows_bps(pool, store, PACE) == 65 * 3 * 64 * 2
        assert host.rows_flops(pool, store, 4, PACE) == 4 * 65 * 3 * 64 * 2
        assert host.gather_bps(pool, store, PACE) == 64 * 3 * 64 * 2


def test_caches_are_the_last_of_every_group_of_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, level, size in ((0, 1, "48K"), (3, 3, "32M")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            texts = {"level": str(level), "size": size, "shared_cpu_list": shared}
            for name, text in texts.items():
                (folder / name).write_text(f"{text}\n")
    assert host.cache_bytes(tmp_path) == 2 * 32 << 20
    assert host.cache_bytes(tmp_path / "absent") == 32 << 20


def test_device_figures():
    parts = device.make_parts("float32", 32, 10_000)
    assert [part.shape for part in parts] == [(27, 32)] * 3
    assert_within(device.weights_bps(parts, PACE), RATE)
    assert_within(device.products_flops(parts, 4, PACE), RATE)


def test_a_program_that_does_nothing():
    started = device.launch(32, Pace(seconds=0.0, least=9, most=9))
    for value in started:
        assert_within(value, SPAN_S)
    assert started.dispatch_s <= started.ready_s


@pytest.mark.parametrize("wanted", ["auto", "plain", "pinned_host"])
def test_link_figures(wanted):
    there = jax.local_devices()[0]
    found = device.link(device.open_link(there, wanted, 4096), 65536, 512, PACE)
    assert_within(found.bps, RATE)
    assert_within(found.t0_s, SPAN_S)
    assert_within(device.pageable_bps(there, 65536, PACE), RATE)


def test_what_is_pageable_is_not_used_in_place():
    block = device._unaligned(1000)
    assert block.shape == (1000,) and block.__array_interface__["data"][0] % 64 == 16


def test_plans_hardly_move_anything(monkeypatch):
    moved = []
    applied = overhead.NeuronPlanner.applied
    monkeypatch.setattr(
        overhead.NeuronPlanner, "applied", lambda *args: (moved.append(len(args[2].units)), applied(*args))
    )
    assert_within(overhead.plan_s(256, Pace(seconds=0.0, least=64, most=64)), SPAN_S)
    assert np.mean(moved[-64:]) < 4


def test_a_line_goes_through_its_points():
    assert Line.through((1.0, 5.0), (3.0, 9.0)) == Line(slope=2.0, intercept=3.0)


FEW = Pace(seconds=0.0, least=1, most=1)


@pytest.fixture(scope="module")
def seen() -> engine.Sample:
    return engine.sample(engine.NARROW, "static", 1, FEW)


def test_what_an_engine_shows(seen):
    assert_within(seen.token_s, SPAN_S)
    assert seen.activity.shape == (engine.NARROW.layers, engine.NARROW.ffn)
    load = engine.load_of(seen.prepared)
    assert (load.layers, load.neurons, load.scores, load.dtype) == (4, 192, 1, "float32")
    assert load.unit == load.host_unit == 3 * 64 * 4


def test_the_engines_figures_are_those_that_explain_its_times(seen):
    """A machine's own samples, simulated, give the machine back."""
    truth = replace(
        cases.machine(), cpu_bps={"float32": 1e9}, device_bps=1e9, host_bps=1e10, layer_s=1e-4, token_s=2e-4
    )
    programs = {"hot": Program(fixed_s=truth.launch_s, bps=3e7)}

    def timed(hardware, layers: int = 4):
        few = replace(seen.activity, frequency=seen.activity.frequency[:layers],
                      runs=tuple(replace(run, live=run.live[:, :layers], skip=run.skip[:, :layers],
                                         placed=run.placed[:, :layers]) for run in seen.activity.runs))  # fmt: skip
        spec, buckets = replace(seen.prepared.spec, layers=layers), seen.prepared.placement.buckets[:layers]
        placement = replace(seen.prepared.placement, buckets=buckets)
        prepared = replace(seen.prepared, spec=spec, placement=placement)
        return engine.Sample(prepared=prepared, activity=few, token_s=engine.simulated_s(prepared, few, hardware))

    assert engine.own_work(timed(truth, 2), timed(truth), truth) == pytest.approx((1e-4, 2e-4), rel=1e-6)
    found = engine.with_rate(truth, "hot", timed(replace(truth, programs=programs)))
    assert found.programs["hot"].bps == pytest.approx(3e7, rel=1e-3)
    assert engine.own_work(timed(truth, 2), timed(truth, 2 + 2), replace(truth, sync_s=1.0)) == (1e-7, 1e-7)


def test_the_faster_quartile():
    assert engine.quick_s([[4.0, 3.0], [1.0, 2.0, 5.0]]) == 2.0


def test_a_machine_has_a_name(tmp_path):
    there = jax.local_devices()[0]
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3:2 GHz\n")
    assert machine.machine_name(there, tmp_path / "cpuinfo") == "Some CPU @ 3:2 GHz"
    assert machine.machine_name(there, tmp_path / "absent")


def test_threads_that_cannot_be_are_refused_before_anything_is_measured():
    def progress(*told):
        raise AssertionError(told)

    with pytest.raises(UsageError, match="--threads must be an integer >= 1"):
        machine.profile_machine(0, QUICK, "today", progress)


def test_progress_may_end_it():
    def progress(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.profile_machine(1, replace(QUICK, pace=PACE, hidden=64, most_bytes=1 << 20), "today", progress)
