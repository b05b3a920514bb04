"""What `plan --hardware` expects: bounds, monotony, what binds, and closed forms. No figure here was measured."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from dynajax.config import Activation, ModelSpec, PolicyConfig
from dynajax.errors import UsageError
from dynajax.sim import estimate
from dynajax.sim.decode import drawn_config
from dynajax.sim.estimate import Asked, Running, drawn, expected, recipe_of
from dynajax.sim.hardware import Hardware, Program, load_hardware
from dynajax.sim.synthetic import RECIPES, biases

SPEC = ModelSpec(
    layers=6, hidden=512, ffn=1024, heads=8, kv_heads=8, head_dim=64, vocab=1000, max_positions=1024, dtype="float16"
)
SILU, FATRELU = Activation(kind="silu"), Activation(kind="fatrelu", threshold=0.01)
FIGURES = {
    "device_bytes": 2**30, "device_bps": 2e10, "device_flops": 1e13, "link_bps": 4e9, "host_bps": 1e10, "cores": 4,
    "cpu_bps": {"float16": 8e9}, "cpu_flops": 1e11, "gather_bps": 5e9, "launch_s": 4e-6, "t0_s": 4e-6, "call_s": 1e-6,
    "sync_s": 4e-6, "dispatch_s": 2e-6, "layer_s": 2e-6, "token_s": 1e-5, "plan_s": 4e-6, "plan_unit_s": 1e-9,
    "balance_s": 1e-6, "systems": {},
}  # fmt: skip
MACHINE = replace(load_hardware("pc-low"), name="toy", reserved_bytes=0, **FIGURES)
GATES = 1024 * 512 * 4.5 / 8  # bytes of a layer's 4-bit gates
SLACK = 1.03  # where a draw decides


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Half of the tokens that are drawn."""
    monkeypatch.setattr(estimate, "TOKENS", 12)
    monkeypatch.setattr(estimate, "SIDE_TOKENS", 6)


def running(share=0.5, *, sparsity="exact", policy="dynamic", activation=None, **changes) -> Running:
    spec = SPEC if activation is None else replace(SPEC, activation=activation)
    bits = (4,) * spec.layers
    skip, place = bits if sparsity == "predicted" else (), bits if policy == "dynamic" else ()
    programs = bool(skip) + bool(place)
    asked = Asked(read=programs * GATES, programs=programs, skip_bits=skip, place_bits=place)
    known = {"dtype": "float16", "host_dtype": "float16", "ctx": 1024, "chunk": 128, "resident": False}
    slots = (round(share * spec.ffn),) * spec.layers
    return Running(spec=spec, slots=slots, sparsity=sparsity, policy=policy, asked=asked, **(known | changes))


def slower(name: str, factor: float = 100.0) -> Hardware:
    value = getattr(MACHINE, name)
    if isinstance(value, dict):
        return replace(MACHINE, **{name: {dtype: rate / factor for dtype, rate in value.items()}})
    return replace(MACHINE, **{name: value * factor if name.endswith("_s") else value / factor})


# --- figures ------------------------------------------------------------------------------------------


CASES = [
    *product((None, FATRELU), ("exact", "predicted", "dense"), ("dynamic", "static", "none")),
    *((SILU, "predicted", policy) for policy in ("dynamic", "static", "none")),
    *((SILU, "dense", policy) for policy in ("static", "none")),
]


@pytest.mark.parametrize(("activation", "sparsity", "policy"), CASES)
def test_the_range_holds_what_is_expected(activation, sparsity, policy):
    density = 0.5 if activation is SILU and sparsity == "predicted" else None
    share = 0.0 if policy == "none" else 0.4
    found = expected(running(share, sparsity=sparsity, policy=policy, activation=activation, density=density), MACHINE)
    low, high = found.decode_range
    assert 0 < low <= found.decode_tok_s <= high
    assert low < high
    assert found.prefill_tok_s > found.decode_tok_s
    assert found.to_json() == {
        "decode_tok_s": found.decode_tok_s,
        "decode_range": [low, high],
        "prefill_tok_s": found.prefill_tok_s,
        "bound_by": found.bound_by,
        "simulated": True,
    }


def test_equal_plans_have_equal_estimates():
    assert expected(running(), MACHINE) == expected(running(), MACHINE)


@pytest.mark.parametrize("sparsity", ["exact", "predicted"])
@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_more_device_memory_is_not_slower(sparsity, policy):
    machine = replace(MACHINE, device_bps=2e11)  # else reading a larger pool may take longer than the host would
    found = [expected(running(s, sparsity=sparsity, policy=policy), machine) for s in (0.1, 0.4, 0.65, 0.9)]
    for less, more in pairwise(found):
        assert more.decode_tok_s * SLACK > less.decode_tok_s
        assert more.decode_range[1] * SLACK > less.decode_range[1]
        assert more.prefill_tok_s >= less.prefill_tok_s
    assert found[-1].decode_tok_s > 1.5 * found[0].decode_tok_s


RATES = ("link_bps", "host_bps", "cpu_bps", "device_bps", "cpu_flops", "device_flops")


@pytest.mark.parametrize("name", [*RATES, "sync_s"])
def test_a_slower_machine_is_not_faster(name):
    usual, worse = (expected(running(), machine) for machine in (MACHINE, slower(name, 4.0)))
    assert worse.decode_tok_s < usual.decode_tok_s * SLACK
    assert worse.prefill_tok_s <= usual.prefill_tok_s
    if name in ("host_bps", "cpu_bps", "device_bps"):
        assert worse.decode_tok_s < 0.8 * usual.decode_tok_s


def test_skipping_more_is_faster_and_statistics_help():
    machine = slower("cpu_bps", 4.0)
    exact, predicted = (expected(running(sparsity=name), machine) for name in ("exact", "predicted"))
    assert predicted.decode_tok_s > 1.2 * exact.decode_tok_s
    frequency = drawn(running(), None).frequency
    known, unknown = (expected(running(policy="static", sparsity="predicted"), machine, f) for f in (frequency, None))
    assert known.decode_tok_s > 1.1 * unknown.decode_tok_s
    assert unknown.decode_tok_s == pytest.approx(unknown.decode_range[0], rel=0.5)


def test_a_guarded_policy_gives_up_what_does_not_pay():
    machine = replace(MACHINE, plan_s=1e-3)  # plans are always late
    guarded, bare = (expected(running(guarded=on), machine).decode_tok_s for on in (True, False))
    assert guarded > 1.05 * bare


def test_a_machine_that_was_not_measured_with_the_type_is_refused():
    with pytest.raises(UsageError, match="toy has host rates for float16, not for float32: choose with --dtype"):
        expected(running(dtype="float32", host_dtype="float32"), MACHINE)


# --- what binds -----------------------------------------------------------------------------------------

SENDING = PolicyConfig(swap_rule="paper", window_s=1.0)  # plans do not mind what sending costs


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("device_bps", "device memory bandwidth"),
        ("host_bps", "host memory bandwidth"),
        ("cpu_bps", "compute"),
        ("launch_s", "latency"),
        ("sync_s", "latency"),
        ("dispatch_s", "latency"),
    ],
)
def test_what_gets_a_hundred_times_slower_binds(name, bound):
    usual = replace(MACHINE, device_bps=1e11) if name == "device_bps" else MACHINE
    assert expected(running(), usual).bound_by != bound
    assert expected(running(), slower(name)).bound_by == bound


def test_a_link_binds_only_plans_that_ask_too_much_of_it():
    greedy = running(knobs=SENDING)
    assert expected(greedy, MACHINE).bound_by != "link"
    assert expected(greedy, slower("link_bps")).bound_by == "link"
    assert expected(running(), slower("link_bps")).bound_by != "link"  # these send what hides behind computing


# --- closed forms -----------------------------------------------------------------------------------------


def test_a_resident_model_reads_everything_for_every_token():
    whole = running(1.0, policy="static", resident=True)
    found, layers = expected(whole, MACHINE), SPEC.layers
    weights = layers * (4 * 512 * 512 + 2 * 512 + 3 * 512 * 1024) + 1000 * 512
    cache = layers * 2 * 256 * 512  # 140 tokens are in the prefix of 256
    read_s = 2 * (weights + cache) / 2e10
    fixed_s = 1e-5 + 2e-6 + (2 * layers + 1) * 4e-6
    assert found.decode_tok_s == pytest.approx(1 / (read_s + fixed_s))
    assert found.decode_range == pytest.approx((found.decode_tok_s, 1 / read_s))
    assert found.bound_by == "device memory bandwidth"
    assert expected(whole, slower("launch_s")).bound_by == "latency"
    assert expected(replace(whole, host_dtype="bfloat16"), MACHINE) == found  # no host, no rate of it


def test_programs_that_were_measured_apart_count():
    whole = running(1.0, policy="static", resident=True)
    slow = {kind: Program.plain(4e-6, 2e8) for kind in ("attend", "hot", "head")}
    found, usual = expected(whole, replace(MACHINE, programs=slow)), expected(whole, MACHINE)
    assert found.decode_range[1] == pytest.approx(usual.decode_range[1] / 100)
    late = {kind: Program.plain(4e-3, 2e10) for kind in ("attend", "hot", "head")}
    assert expected(running(), replace(MACHINE, programs=late)).bound_by == "latency"


def test_only_what_a_program_takes_beyond_its_start_is_reading():
    """A curve that begins at 4 us and is flat as far as a layer's neurons reach: they are read for nothing."""
    whole, size = running(1.0, policy="static", resident=True), SPEC.ffn * 3 * 512 * 2
    flat = {"hot": Program(sizes=(0.0, float(size), 2.0 * size), seconds=(4e-6, 4e-6, 1.0))}
    found, usual = expected(whole, replace(MACHINE, programs=flat)), expected(whole, MACHINE)
    saved = 1 / usual.decode_tok_s - 1 / found.decode_tok_s
    assert saved == pytest.approx(SPEC.layers * size / 2e10)
    assert 1 / usual.decode_range[1] - 1 / found.decode_range[1] == pytest.approx(saved)


def test_scores_that_rank_are_programs_of_their_own():
    slow = {kind: replace(MACHINE, programs={kind: Program.plain(1e-3, 2e10)}) for kind in ("score", "rank")}
    for activation, density, kind in ((None, None, "score"), (SILU, 0.4, "rank")):
        asks = running(sparsity="predicted", policy="static", activation=activation, density=density)
        assert asks.load.ranks == (kind == "rank")
        usual = 1 / expected(asks, MACHINE).decode_tok_s
        more = {name: 1 / expected(asks, machine).decode_tok_s - usual for name, machine in slow.items()}
        assert more.pop(kind) == pytest.approx(SPEC.layers * (1e-3 - MACHINE.launch_s))
        assert set(more.values()) == {0.0}


def test_balancing_thresholds_takes_time_where_it_is_done():
    machine = replace(MACHINE, balance_s=5e-4)
    for policy in ("dynamic", "macro+micro"):
        found, usual = (expected(running(sparsity="predicted", policy=policy), each) for each in (machine, MACHINE))
        assert (found.decode_tok_s < 0.99 * usual.decode_tok_s) == (policy == "dynamic")
        assert (found == usual) == (policy == "macro+micro")


def prefill_s(device: float, host: float, fixed: float, tokens: int = 512) -> float:
    return tokens / (1e-5 + SPEC.layers * (max(device, host) + fixed))


def test_prefill_is_the_slower_side_of_every_layer():
    attention, unit, fixed = 4 * 512 * 512 + 2 * 512, 3 * 512, 2e-6 + 4 * 2 * 6e-6  # four chunks, two programs each
    device = 4 * 2 * (attention + 512 * unit) / 2e10  # every chunk reads them
    assert device > 2 * (attention + 512 * unit) * 512 / 1e13
    host = 2 * 512 * unit * 512 / 1e11 + 1e-6 + 4e-6
    assert expected(running(), MACHINE).prefill_tok_s == pytest.approx(prefill_s(device, host, fixed))
    quick = replace(MACHINE, cpu_flops=1e14, cpu_bps={"float16": 1e10})  # whose host reads its neurons once
    host = 2 * 512 * unit / 1e10 + 1e-6 + 4e-6
    assert device > host
    assert expected(running(), quick).prefill_tok_s == pytest.approx(prefill_s(device, host, fixed))
    slow = slower("device_flops")  # whose products take longer than reading
    device = 2 * (attention + 512 * unit) * 512 / 1e11
    host = 2 * 512 * unit * 512 / 1e11 + 1e-6 + 4e-6
    assert device > host
    assert expected(running(), slow).prefill_tok_s == pytest.approx(prefill_s(device, host, fixed))
    short = expected(running(ctx=128), MACHINE).prefill_tok_s
    device, host = 2 * (attention + 512 * unit) / 2e10, 2 * 512 * unit * 128 / 1e11 + 1e-6 + 4e-6
    assert short == pytest.approx(prefill_s(device, host, 2e-6 + 2 * 6e-6, tokens=128))


def test_nothing_is_sent_for_a_prompt():
    asks, faster = running(0.1), replace(MACHINE, link_bps=1e15, gather_bps=1e15)
    assert expected(asks, faster).prefill_tok_s == expected(asks, MACHINE).prefill_tok_s
    held = running(1.0)  # what is on the device is computed there, and the host does nothing
    assert expected(held, slower("cpu_flops")).prefill_tok_s == expected(held, MACHINE).prefill_tok_s


# --- activity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [Activation(), FATRELU, Activation(kind="drelu"), SILU])
def test_a_recipe_is_that_of_the_activation_at_any_depth(activation):
    spec = replace(SPEC, layers=7, activation=activation)
    name = "prosparse-7b" if activation.kind in ("fatrelu", "drelu") else "relullama-7b"
    alike, recipe = RECIPES[name], recipe_of(spec, 0.3 if activation is SILU else None)
    found, published = biases(recipe), biases(alike)
    assert (recipe.layers, recipe.ffn, found.mean.shape) == (7, 1024, (7,))
    assert recipe.density == (0.3 if activation is SILU else alike.density)
    assert found.spread[[0, -1]] == pytest.approx(published.spread[[0, -1]])
    assert published.spread.min() <= found.spread.min()
    assert found.spread.max() <= published.spread.max()


def test_a_model_with_statistics_is_live_as_they_say():
    frequency = np.tile(np.linspace(0, 1, SPEC.ffn, dtype=np.float32), (SPEC.layers, 1))
    found = drawn(running(), frequency)
    assert found.frequency == pytest.approx(frequency, abs=2e-3)
    live = np.concatenate([run.live for run in found.runs]).mean(axis=0)  # 24 tokens
    assert np.corrcoef(live.ravel(), frequency.ravel())[0, 1] > 0.9
    assert not live[:, 0].any()
    assert live[:, -1].all()


def test_wide_layers_are_sampled_and_dense_ones_all_live():
    wide = running()
    wide = replace(wide, spec=replace(SPEC, ffn=5000), slots=(2500,) * SPEC.layers)
    found = drawn(wide, np.full((SPEC.layers, 5000), 0.3, np.float32))
    assert (found.stride, found.shape) == (4, (SPEC.layers, 1250))
    assert found.runs[0].live.mean() == pytest.approx(0.3, abs=0.05)
    assert all(run.live.all() for run in drawn(replace(wide, sparsity="dense"), None).runs)
    ranked = drawn(running(sparsity="predicted", activation=SILU, density=0.4), None)
    scores = np.concatenate([run.skip for run in ranked.runs])
    assert (scores >= 128).mean() == pytest.approx(0.4, abs=0.03)


def test_scores_that_nobody_asks_are_not_there():
    still = drawn(running(policy="static", sparsity="exact"), None).runs[0]
    assert still.place is None
    assert not still.placed.any()
    assert still.skip is None
    assert drawn(running(sparsity="predicted"), None).runs[0].skip is not None


def test_a_window_counts_the_neurons_that_are_drawn():
    asked = PolicyConfig(window_units=40)
    assert drawn_config(asked, 4) == PolicyConfig(window_units=10)
    assert drawn_config(asked, 1) == asked
    assert drawn_config(PolicyConfig(), 4) == PolicyConfig()
