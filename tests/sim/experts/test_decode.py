"""Mixtures in simulated time: a layer-step against `makespan` for all assignments, cases worked out by hand, prompts
against a flow shop with two buffers, and books that add up."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.experts.records import assigned, makespan
from dynajax.policy.experts.synthetic import RECIPES
from dynajax.sim.experts import decode
from dynajax.sim.experts.activity import draw_mixture
from dynajax.sim.experts.decode import MixtureSimulation, simulate
from dynajax.sim.experts.lanes import Lanes
from dynajax.sim.experts.shapes import MIXTURES, MixtureWeights
from dynajax.sim.experts.sides import Sides
from dynajax.sim.experts.systems import ENGINE_ORDER, RIVALS, Order, as_engine
from dynajax.sim.hardware import load_hardware
from tests.policy.experts.cases import all_choices
from tests.sim.cases import TINY
from tests.sim.experts.cases import UNITS, Rooflines, placed, routed, small_load, small_machine, system


@pytest.fixture(autouse=True)
def plans_take_no_time(monkeypatch):
    monkeypatch.setattr(decode, "PLAN_S", TINY)
    monkeypatch.setattr(decode, "PLAN_LIVE_S", 0.0)


def seconds(hardware, tokens, resident, on_gpu=None, **settings) -> tuple[float, MixtureSimulation]:
    """A layer-step with tokens [E], in ms: all live experts as `on_gpu` says, or as the policy has it."""
    load = small_load()
    lanes = Lanes(load, hardware, Sides.of(load, hardware))
    run = MixtureSimulation(lanes, system(**settings), routed([tokens]), placed(resident), None)
    if on_gpu is not None:
        run.planner._assign = lambda work, costs: assigned(work, on_gpu)
    lanes.simulation.start(run.main([None]))
    lanes.simulation.run()
    return 1e3 * run.tally.seconds, run


@pytest.mark.parametrize("seed", range(12))
def test_a_layer_step_takes_its_makespan_whoever_computes_what(seed):
    rng = np.random.default_rng(seed)
    changes = {"t0_s": rng.uniform(0, 2), "sync_s": rng.uniform(0, 2), "call_s": rng.uniform(0, 1),
               "link_bps": rng.uniform(10, 200), "cpu_flops": rng.uniform(3, 60)}  # fmt: skip
    hardware = small_machine(**{name: max(value, TINY) for name, value in changes.items()})
    tokens = rng.integers(0, 9, UNITS)
    tokens[rng.integers(UNITS)] = 3
    resident = np.flatnonzero(rng.random(UNITS) < 0.4)
    resident = resident if len(resident) else np.array([0])
    costs = Rooflines(Sides.of(small_load(), hardware))
    _, run = seconds(hardware, tokens, resident)
    work = run.planner.plan_step(0, tokens, run.estimator.costs(), transit=UNITS).work
    work = replace(work, resident=np.isin(work.experts, resident))
    found = set()
    for on_gpu in all_choices(work):
        took, _ = seconds(hardware, tokens, resident, on_gpu)
        expected = hardware.sync_s / 2 + float(makespan(work, on_gpu, costs))
        assert took == pytest.approx(1e3 * expected, rel=1e-6)
        found.add(round(took, 6))
    assert len(found) > 2  # the assignments differ


def test_both_sides_and_the_link_by_hand():
    """Expert 0 is here with 5 tokens: 1.5 ms. Experts 1 and 2 with 2 tokens each come in 4 and 8 ms and take 1 ms;
    the host takes 10 ms for expert 3."""
    took, run = seconds(small_machine(), [5, 2, 2, 1, 0, 0], [0])
    figures = run.tally.figures(100.0)
    assert took == pytest.approx(10.0)
    assert figures["hits"] == 0.25 and figures["weighted_hits"] == 0.5
    assert figures["loads_per_layer_step"] == 2 and figures["moved_gb"] == pytest.approx(2e-7)
    assert figures["busy_link"] == pytest.approx(0.8) and figures["busy_device"] == pytest.approx(0.35)
    assert figures["idle_host"] == pytest.approx(0.0, abs=1e-6) and figures["over_best"] == pytest.approx(1.0)
    assert figures["host_share"] == pytest.approx(10 / 13.5) and figures["computed_hot_share"] == pytest.approx(0.9)


def test_copies_and_the_host_share_its_memory():
    tokens, resident = [5, 2, 2, 1, 0, 0], [0]
    alone, _ = seconds(small_machine(), tokens, resident)
    shared, _ = seconds(small_machine(host_bps=20.0), tokens, resident)  # 25 for the link and 10 for the host are asked
    assert alone == pytest.approx(10.0) and shared > 1.4 * alone


def test_a_fetched_expert_that_is_computed_late_costs_what_it_takes():
    on_gpu = np.array([True, False])
    tokens = [0, 30, 1, 0, 0, 0]  # fetched in 4 ms, 9 ms to compute; 10 ms on the host
    hardware = small_machine()
    ideal, _ = seconds(hardware, tokens, [0], on_gpu, order=Order())
    engine, _ = seconds(hardware, tokens, [0], on_gpu, order=ENGINE_ORDER)
    assert (ideal, engine) == (pytest.approx(13.0), pytest.approx(19.0))


def test_without_buffers_only_slots_take_what_is_fetched():
    tokens = [1, 1, 1, 1, 1, 0]
    _, run = seconds(small_machine(link_bps=1e3), tokens, [0, 5], assign="fetch-all", transit=0)
    assert run.tally.moved["fetched"] == 1 and run.tally.hot_pairs == 2  # for expert 5, which is idle
    _, run = seconds(small_machine(link_bps=1e3), tokens, [0, 5], assign="fetch-all", transit=2)
    assert run.tally.moved["fetched"] == 3
    _, run = seconds(small_machine(link_bps=1e3), tokens, [0, 5], assign="fetch-all")
    assert run.tally.moved["fetched"] == 4 and run.tally.hot_pairs == 5


# --- looking ahead ---

AHEAD = [[2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 6]]


@pytest.mark.parametrize(("link", "late"), [(100.0, False), (4.0, True)])
def test_what_is_foretold_is_there_or_late(link, late):
    """Layer 1 will need expert 5; it comes while the host computes layer 0's expert, in 10 ms, or too late in 25."""
    hardware, order = small_machine(link_bps=link, device_bps=1e4, device_flops=1e4), Order(early=not late)
    activity = routed(AHEAD, foretold=[AHEAD])
    tally = simulate(small_load(2), hardware, system(prefetch="gate", assign="resident", order=order), activity,
                     placed([1], [0]))  # fmt: skip
    figures = tally.figures(1.0)
    assert tally.moved["prefetched"] == 1 and figures["foretold_recall"] == 1.0
    assert figures["foretold_top1"] == (1.0 if late else None)  # nothing was absent
    assert (figures["prefetch_useful"], figures["prefetch_late"]) == ((0.0, 1.0) if late else (1.0, 0.0))
    assert 1e3 * tally.seconds == pytest.approx((10 + 24 if late else 10), rel=0.02)


def test_what_cannot_arrive_in_time_is_left_alone():
    hardware = small_machine(link_bps=4.0, device_bps=1e4, device_flops=1e4)
    activity = routed(AHEAD, foretold=[AHEAD])
    ways = system(prefetch="gate", assign="resident", cache="static")
    assert simulate(small_load(2), hardware, ways, activity, placed([1], [0])).moved.total() == 0


def test_wrong_predictions_bring_the_wrong_expert():
    hardware, wrong = small_machine(link_bps=100.0), [AHEAD[0], AHEAD[1][::-1]]
    wrong[1] = [0, 6, 0, 0, 0, 0]
    activity = routed(AHEAD, foretold=[wrong])
    tally = simulate(small_load(2), hardware, system(prefetch="gate", assign="resident"), activity, placed([1], [2]))
    assert tally.moved["prefetched"] == 1 and tally.useful == 0 and tally.foretold_hits == 0


def test_background_swaps_follow_the_traffic():
    activity = routed(*[[[0, 0, 0, 3, 3, 0]]] * 30)
    still = simulate(small_load(), small_machine(), system("static"), activity, placed([0, 1]))
    moved = simulate(small_load(), small_machine(), system(assign="resident"), activity, placed([0, 1]))
    assert still.hits == 0 and moved.moved["swapped"] == 2 and moved.hits > 0.8 * moved.live
    assert moved.seconds < 0.3 * still.seconds


# --- prompts ---


def two_buffers(tokens, hardware) -> float:
    """Milliseconds until all are computed: a copy waits until the buffer's last expert has been."""
    sides, link, device, done = Sides.of(small_load(), hardware), 0.0, 0.0, []
    for index, count in enumerate(tokens):
        link = max(link, done[index - 2] if index > 1 else 0.0) + sides.copy_fixed_s + sides.copy_busy_s
        device = max(device, link) + float(sides.device_s(np.array(count)))
        done.append(device)
    return 1e3 * device


@pytest.mark.parametrize("flops", [100.0, 3.0])
def test_a_prompt_streams_through_two_buffers(flops):
    hardware = small_machine(device_flops=flops)  # 4 ms a copy; up to 2.7 ms to compute, or 90
    prompt = [9, 8, 7, 2, 1, 1]
    activity = routed([[2, 0, 0, 0, 0, 0]], prompts=[[prompt]])
    tally = simulate(small_load(), hardware, system("lru"), activity, placed([3]))
    streamed = [9, 8, 7, 1, 1]
    expected = two_buffers(streamed, hardware) + (20 if flops < 10 else 0)  # behind the resident one's 20 ms
    assert 1e3 * tally.prompt_s == pytest.approx(expected, rel=0.02) and tally.prompt_tokens == 14
    assert tally.moved["prefetched"] == tally.moved["streamed"] == 0  # prompts are not decoding


def test_a_prompt_on_both_sides_at_once_or_one_after_the_other():
    activity = routed([[2, 0, 0, 0, 0, 0]], prompts=[[[9, 8, 7, 6, 5, 5]]])
    both = simulate(small_load(), small_machine(), system(), activity, placed([3]))
    serial = simulate(small_load(), small_machine(), system(order=Order(overlaps=False)), activity, placed([3]))
    still = simulate(small_load(), small_machine(), system("static"), activity, placed([3]))
    told = [1e3 * tally.prompt_s for tally in (both, serial, still)]
    assert told == pytest.approx([20, 36, 136])  # 4 of 5 are streamed, the host takes 4 ms a token


def test_the_engine_leaves_out_a_prompts_last_layer():
    prompt = [[3, 3, 0, 0, 0, 0], [0, 0, 3, 3, 0, 0]]
    activity = routed([[2, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]], prompts=[prompt])
    whole = simulate(small_load(2), small_machine(), system("static"), activity, placed([0], [0]))
    early = simulate(small_load(2), small_machine(), system("static", order=ENGINE_ORDER), activity, placed([0], [0]))
    assert [1e3 * tally.prompt_s for tally in (whole, early)] == pytest.approx([12 + 24, 12])


def test_many_tokens_are_offloaded():
    """llama.cpp's op offload: from so many tokens on all that is absent goes through the device, in any phase."""
    few, many = routed([[1, 1, 0, 0, 0, 0]]), routed([[8, 8, 8, 8, 8, 8]])
    ways = system("layer-split", offload_from=20)
    assert simulate(small_load(), small_machine(), ways, few, placed([])).moved.total() == 0
    tally = simulate(small_load(), small_machine(), ways, many, placed([]))
    assert tally.moved["streamed"] == 6 and tally.host_s == 0 and tally.hot_pairs == 48
    assert 1e3 * tally.seconds == pytest.approx(6 * 4 + 2.4)


# --- whole models ---


def test_a_model_that_fits_is_one_program():
    activity = routed([[1, 1, 0, 0, 0, 0]] * 2)
    hardware = small_machine(layer_s=1.0, dispatch_s=1.0, sync_s=5.0)
    tally = simulate(small_load(2), hardware, system("auto"), activity, placed(range(UNITS), range(UNITS)))
    assert 1e3 * tally.seconds == pytest.approx(2 * 2) and tally.hits == tally.live == 4 and tally.moved.total() == 0


@pytest.fixture(scope="module")
def drawn():
    return {batch: draw_mixture(MIXTURES["tiny-moe"], RECIPES["repeating"], "tiny", batch=batch, prompt=16, steps=24)
            for batch in (1, 8)}  # fmt: skip


@pytest.mark.parametrize("name", [*RIVALS, "ours-engine"])
@pytest.mark.parametrize("batch", [1, 8])
def test_every_system_keeps_its_books(drawn, name, batch):
    spec = MIXTURES["tiny-moe"]
    load = MixtureWeights(spec=spec, dtype="bfloat16", host_dtype="bfloat16").mixture_load()
    ways = as_engine(RIVALS["ours"], spec) if name == "ours-engine" else RIVALS[name]
    placement = replace(placed(*[[0, 3, 7, 9]] * 6), units=16)
    tallies = [simulate(load, load_hardware("dali-pc"), ways, drawn[batch], placement) for _ in range(2)]
    first, second = (tally.figures(load.host_unit) for tally in tallies)
    assert first == second  # nothing is left to chance
    tally = tallies[0]
    assert (tally.steps, tally.rows, tally.layer_steps) == (24, 24 * batch, 144)
    assert tally.pairs == 144 * batch * 4 >= tally.hot_pairs >= 0
    assert tally.useful + tally.late <= tally.moved["prefetched"]
    assert tally.seconds == pytest.approx(sum(tally.step_s))
    assert first["over_best"] is None or first["over_best"] >= 1
    for lane in ("device", "host", "link"):
        assert 0 <= first[f"busy_{lane}"] <= 1 + 1e-9 and first[f"idle_{lane}"] == max(0, 1 - first[f"busy_{lane}"])
    if not ways.moves:
        assert tally.moved.total() == 0 and first["weighted_hits"] == first["computed_hot_share"]


def test_costs_are_learned_from_what_happens(drawn):
    """A link that is four times as slow as it says: who goes by fixed costs fetches too much."""
    spec = replace(MIXTURES["tiny-moe"], hidden=2048, experts=replace(MIXTURES["tiny-moe"].experts, width=768))
    load = MixtureWeights(spec=spec, dtype="bfloat16", host_dtype="bfloat16").mixture_load()
    usual = load_hardware("dali-pc")
    told = Sides.of(load, usual).fitted(range(1, 9))
    slow, placement = replace(usual, link_bps=usual.link_bps / 8), replace(placed(*[[0, 3, 7, 9]] * 6), units=16)
    fixed = simulate(load, slow, RIVALS["ours"], drawn[8], placement, costs=told)
    learned = simulate(load, slow, replace(RIVALS["ours"]), drawn[8], placement)
    assert learned.moved["fetched"] < fixed.moved["fetched"] and learned.seconds < fixed.seconds
