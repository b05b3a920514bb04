"""Every figure with tiny sizes: positive, finite, and such as a machine could have."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from dynajax.config import Activation, ModelSpec
from dynajax.errors import UsageError
from dynajax.plan import Placement
from dynajax.profiling import QUICK, device, engine, host, machine, overhead
from dynajax.profiling.pace import Line, Pace
from dynajax.sim.hardware import Hardware, Program
from hostcompute import NumpyPool, open_pool
from predictors.forms import Entry
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
NARROW = engine.NARROW
MODELS = engine.Models(  # each larger than the narrow one in what it is for, and in nothing that is told after it
    narrow=NARROW,
    deep=replace(NARROW, layers=7),
    attention=(replace(NARROW, heads=16, kv_heads=16), replace(NARROW, heads=48, kv_heads=48)),
    neurons=(replace(NARROW, ffn=384), replace(NARROW, ffn=960)),
    vocabulary=replace(NARROW, vocab=40_000),
    ranked=replace(NARROW, ffn=768, activation=Activation(kind="silu")),
)
LAUNCH_S, BPS = 2e-6, 2e10
DECODED = 10  # tokens that are simulated
HOT_S = (1e-3, 1e-3 + 3 * 64 * 4 * (480 - 192) / BPS)  # between these two at the rate that scores are read with
SECONDS = {"attend": (3e-4, 5e-4), "hot": HOT_S, "head": (5e-2,), "rank": (2e-3,)}  # of the larger ones


@pytest.fixture(scope="module")
def seen() -> engine.Sample:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "TOKENS", 4)
        patch.setattr(engine, "TRACED", DECODED)
        return engine.sample(NARROW, "static", 1, FEW)


def like(seen: engine.Sample, spec: ModelSpec, policy: str = "static") -> engine.Sample:
    """What an engine of another size and policy would decide and do: layers and neurons repeat those that were seen."""
    prepared, (run,) = seen.prepared, seen.activity.runs
    layer, unit = np.arange(spec.layers) % NARROW.layers, np.arange(spec.ffn) % NARROW.ffn

    def cut(array):
        return array[..., layer, :][..., unit]

    arrays = {"live": cut(run.live[:DECODED]), "skip": cut(run.skip[:DECODED]), "placed": run.placed[:DECODED, layer]}
    run = replace(run, prompt_counts=cut(run.prompt_counts), **arrays)
    activity = replace(seen.activity, frequency=cut(seen.activity.frequency), runs=(run,))
    buckets = tuple(np.flatnonzero(np.isin(unit, prepared.placement.buckets[i])).astype(np.int32) for i in layer)
    form = prepared.prediction.entries[0, 0].form
    leads = (0,) if policy == "static" else (0, 1)
    entries = {(lead, i): Entry(layer=i, lead=lead, form=form) for lead in leads for i in range(spec.layers)}
    density = None if spec.activation.has_zeros else 0.5
    prepared = replace(
        prepared,
        spec=spec,
        strategy=replace(prepared.strategy, policy=policy),
        prediction=replace(prepared.prediction, entries=entries, density=density),
        placement=Placement(buckets, spec.ffn),
    )
    return engine.Sample(prepared=prepared, activity=activity, token_s=1.0)


def timed(sample: engine.Sample, hardware: Hardware) -> engine.Sample:
    """The sample as it would be on that machine."""
    return replace(sample, token_s=engine.simulated_s(sample.prepared, sample.activity, hardware))


def pairs(models: engine.Models) -> dict[str, tuple[ModelSpec, ...]]:
    """The models of each curve."""
    return {"attend": models.attention, "hot": models.neurons, "head": (models.vocabulary,), "rank": (models.ranked,)}


@pytest.fixture(scope="module")
def bare() -> Hardware:
    """A machine whose programs are plain, and whose Python takes next to nothing."""
    quick = dict.fromkeys(("t0_s", "sync_s", "dispatch_s"), 1e-6)
    return replace(cases.machine(), cpu_bps={"float32": 2e9}, device_bps=BPS, host_bps=1e11, link_bps=1e10,
                   gather_bps=1e10, launch_s=LAUNCH_S, call_s=4e-5, plan_unit_s=1e-8, **quick)  # fmt: skip


@pytest.fixture(scope="module")
def truth(seen, bare) -> Hardware:
    """The same with figures that engines show."""
    programs = {}
    for kind, specs in pairs(MODELS).items():
        sizes = [float(engine.bytes_of(kind, like(seen, spec))) for spec in (NARROW, *specs)]
        programs[kind] = Program(sizes=tuple(sizes), seconds=(LAUNCH_S + sizes[0] / BPS, *SECONDS[kind]))
    figures = {"layer_s": 1e-4, "token_s": 2e-4, "plan_s": 5e-5, "balance_s": 3e-5}
    return replace(bare, programs=programs, **figures)


def test_what_an_engine_shows(seen):
    assert_within(seen.token_s, SPAN_S)
    assert seen.activity.shape == (NARROW.layers, NARROW.ffn)
    load = engine.load_of(seen.prepared)
    assert (load.layers, load.neurons, load.scores, load.dtype, load.piece) == (4, 192, 1, "float32", 1)
    assert load.unit == load.host_unit == 3 * 64 * 4
    assert not load.ranks and engine.load_of(like(seen, MODELS.ranked).prepared).ranks
    assert engine.bytes_of("hot", seen) == 96 * load.unit  # half of them
    assert engine.bytes_of("attend", seen) == load.attention + 256 * load.kv_token
    twice = engine.load_of(like(seen, NARROW, "lru").prepared)
    assert (twice.scores, twice.score) == (2, 2 * load.score)
    assert engine.bytes_of("rank", like(seen, NARROW, "lru")) == engine.bytes_of("rank", seen)


def test_a_machine_is_given_back_by_its_own_times(seen, bare, truth, monkeypatch):
    """Engines that take as long as they are simulated to: every figure is found again."""
    steps = []
    monkeypatch.setattr(engine, "sample", lambda spec, policy, threads, pace: timed(like(seen, spec, policy), truth))
    found = engine.with_engine_figures(bare, MODELS, 1, FEW, lambda: steps.append(1))
    assert len(steps) == 10
    for kind, program in (truth.programs | {"score": Program.plain(LAUNCH_S, BPS)}).items():
        assert found.programs[kind].sizes == pytest.approx(program.sizes, rel=0.01), kind
        assert found.programs[kind].seconds == pytest.approx(program.seconds, rel=1e-3), kind
    for name in ("layer_s", "token_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), abs=2 * engine.LEAST_S)
    for name in ("plan_s", "balance_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02)
    told = {name: getattr(found, name) for name in ("programs", "layer_s", "token_s", "plan_s", "balance_s")}
    assert replace(bare, **told) == found


def test_own_work_is_what_the_simulator_leaves(seen, truth):
    shallow, deep = (timed(like(seen, replace(NARROW, layers=layers)), truth) for layers in (2, 4))
    assert engine.own_work(shallow, deep, truth) == pytest.approx((1e-4, 2e-4), abs=2 * engine.LEAST_S)
    slower = replace(deep, token_s=deep.token_s + 1e-3)  # as if each of two more layers took half of it
    assert engine.own_work(shallow, slower, truth)[0] == pytest.approx(6e-4, abs=2 * engine.LEAST_S)
    instant = (replace(sample, token_s=1e-9) for sample in (shallow, deep))
    layer_s, token_s = engine.own_work(*instant, replace(truth, programs={}))
    assert layer_s == engine.LEAST_S <= token_s


def test_a_curve_begins_where_the_narrow_model_is_and_rises_whatever_was_measured(seen, bare):
    larger = [like(seen, spec) for spec in MODELS.neurons]
    instant = [replace(sample, token_s=1e-9) for sample in larger]
    found = engine.with_curve(bare, "hot", seen, instant).programs["hot"]
    assert found.sizes == tuple(engine.bytes_of("hot", sample) for sample in (seen, *larger))
    assert found.fixed_s == LAUNCH_S + found.sizes[0] / BPS
    rates = np.diff(found.sizes) / np.diff(found.seconds)
    assert rates == pytest.approx(engine.MOST_GAIN * BPS)
    falling = [timed(larger[0], bare), instant[1]]  # a larger one that was faster
    assert (np.diff(engine.with_curve(bare, "hot", seen, falling).programs["hot"].seconds) > 0).all()


def test_a_curve_leaves_other_programs_alone(seen, truth):
    other = Program.plain(0.5, 1e9)
    sample = timed(like(seen, MODELS.vocabulary), truth)
    found = engine.with_curve(engine.with_program(truth, "head", other), "head", seen, [sample])
    assert found.programs["head"].seconds == pytest.approx(truth.programs["head"].seconds, rel=1e-3)
    assert engine.with_program(found, "head", truth.programs["head"]) == truth


@pytest.mark.parametrize(("figure", "policy"), [("plan_s", "lru"), ("balance_s", "dynamic")])
def test_plans_take_what_a_token_takes_longer(seen, truth, figure, policy):
    sample = timed(like(seen, MODELS.deep, policy), truth)
    found = engine.with_plans(replace(truth, **{figure: 1e-9}), figure, sample)
    assert getattr(found, figure) == pytest.approx(getattr(truth, figure), rel=1e-3)
    assert replace(found, **{figure: getattr(truth, figure)}) == truth
    quick, slow = (engine.with_plans(truth, figure, replace(sample, token_s=each)) for each in (1e-9, 1.0))
    assert getattr(quick, figure) == engine.LEAST_S
    assert getattr(slow, figure) == pytest.approx(engine.MOST_PLAN_S, rel=1e-3)


def test_what_is_solved_is_the_figure_asked_for_and_within_its_bounds(seen, truth):
    sample = timed(like(seen, NARROW), truth)

    def machine_of(value):
        return replace(truth, token_s=value)

    assert engine.solved(machine_of, sample, 1e-6, 1e-2) == pytest.approx(2e-4, rel=1e-4)
    later = replace(sample, token_s=sample.token_s + 1e-4)
    assert engine.solved(machine_of, later, 1e-6, 1e-2) == pytest.approx(3e-4, rel=1e-4)
    assert engine.solved(machine_of, sample, 1e-3, 1e-2) == 1e-3
    assert engine.solved(machine_of, sample, 1e-6, 1e-4) == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.parametrize("models", [engine.LARGE, engine.SMALL])
def test_models_are_larger_in_what_they_are_for(seen, models):
    assert models.deep.layers > models.narrow.layers
    for kind, specs in pairs(models).items():
        sizes = [engine.bytes_of(kind, like(seen, spec)) for spec in (models.narrow, *specs)]
        assert sizes == sorted(set(sizes)), kind


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
