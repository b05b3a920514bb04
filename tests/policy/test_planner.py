"""The planner: the paper's example, what every knob changes, and books that stay right whatever happens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.config import PolicyConfig
from dynajax.plan import LayerPlan, Placement
from dynajax.policy.costs import Costs
from dynajax.policy.planner import NeuronPlanner

COSTS = Costs(t0_s=1e-9, t_gather_s=1e-9, t_trans_s=1e-9, t_gpu_s=1e-6, t_cpu_s=4e-6, t_sync_s=1e-6)
POLICIES = ("dynamic", "macro+micro", "macro", "micro", "static", "lru", "none")
PAPER = PolicyConfig(lam=1.0, decay=0.97, swap_rule="paper", keep_share=0.0, theta=0.5)


def planner_of(bucket, frequency, policy="macro+micro", config=PAPER, mass=None):
    """One layer; `frequency` of its units."""
    placement = Placement((np.array(bucket, np.int32),), len(frequency))
    weights = None if mass is None else np.array([mass], np.float32)
    return NeuronPlanner(placement, np.array([frequency], np.float32), policy, config, weights)


def scores_of(units, **p):
    """uint8 scores of `units` units; u4=0.9 gives unit 4 the probability 0.9, the others have 0."""
    scores = np.zeros(units, np.uint8)
    for name, probability in p.items():
        scores[int(name[1:])] = round(255 * probability)
    return scores


def moves(planner, plan):
    """[(unit that comes, unit that goes)] of a plan for layer 0 that is not applied yet."""
    return list(zip(plan.units.tolist(), planner.bucket(0)[plan.slots].tolist(), strict=True))


# --- the paper's example ---

PREDICTED = scores_of(10, u1=0.9, u2=0.8, u3=0.45, u4=0.95, u5=0.85, u6=0.4, u7=0.01, u8=0.52)
FREQUENCY = [0, 0.6, 0.2, 0.5, 0.5, 0.3, 0.4, 0.1, 0.1, 0.1]


def test_the_papers_example():
    """Device 1 3 6 7, host 2 4 5 8 9, predicted 1 2 4 5 8, one swap."""
    planner = planner_of([1, 3, 6, 7], FREQUENCY, "dynamic")
    plan = planner.plan(0, PREDICTED, 1, COSTS)
    assert moves(planner, plan) == [(4, 7)]
    planner.applied(0, plan)
    on_device = np.isin(np.arange(10), planner.bucket(0))
    assert set(planner.bucket(0)) == {1, 3, 4, 6}
    computed = PREDICTED >= np.where(on_device, plan.theta_g, plan.theta_c)
    assert np.flatnonzero(computed & on_device).tolist() == [1, 3, 4, 6]  # theta_g lowered: 3 and 6 as well
    assert np.flatnonzero(computed & ~on_device).tolist() == [2, 5]  # theta_c raised: 8 no longer
    assert plan.theta_g < plan.theta == 128 < plan.theta_c
    assert (plan.n_gpu, plan.n_cpu) == (4, 2)


def test_without_thresholds_the_host_computes_eight_too():
    plan = planner_of([1, 3, 6, 7], FREQUENCY, "macro+micro").plan(0, PREDICTED, 1, COSTS)
    assert (plan.theta_g, plan.theta_c, plan.n_gpu, plan.n_cpu) == (128, 128, 2, 3)


# --- policies ---


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("dynamic", [(4, 0)]),  # the predicted one for the one least frequent in this sequence
        ("macro+micro", [(4, 0)]),
        ("macro", [(3, 0)]),  # the one most frequent in this sequence
        ("micro", [(4, 2)]),  # for the one least frequent in the statistics
        ("lru", [(4, 1)]),  # for the one that was not used for longest
        ("static", []),
        ("none", []),
    ],
)
def test_what_each_policy_looks_at(policy, expected):
    planner = planner_of([0, 1, 2], [0.3, 0.2, 0.1, 0.0, 0.3], policy, replace(PAPER, decay=0.9))
    for live in 6 * [[1, 2, 3]] + [[0, 2, 3]] + 2 * [[2, 3]]:
        planner.observe(0, np.isin(np.arange(5), live))
    assert moves(planner, planner.plan(0, scores_of(5, u4=0.9), 1, COSTS)) == expected


def test_only_policies_that_follow_the_sequence_change_f():
    for policy in POLICIES:
        planner = planner_of([0], [0.5, 0.5], policy)
        planner.start_sequence(np.array([[10, 0]]), 10)
        planner.observe(0, np.array([True, False]))
        assert (planner.frequency(0)[0] != 0.5) == (policy in ("dynamic", "macro+micro", "macro", "lru")), policy


def test_a_sequence_starts_from_statistics_and_prompt():
    planner = planner_of([0], [0.5, 0.1], "macro", replace(PAPER, decay=0.9))
    planner.observe(0, np.array([False, True]))
    planner.start_sequence()
    np.testing.assert_allclose(planner.frequency(0), [0.5, 0.1])
    planner.start_sequence(np.array([[0, 10]]), 10)
    np.testing.assert_allclose(planner.frequency(0), [0.25, 0.55])
    assert moves(planner, planner.plan(0, None, 1, COSTS)) == [(1, 0)]


def test_rows_of_a_batch_count_together():
    one, two = planner_of([0], [0.3, 0.3, 0.3]), planner_of([0], [0.3, 0.3, 0.3])
    rows = np.stack([scores_of(3, u1=0.9), scores_of(3, u2=0.8)])
    assert asdict_of(one.plan(0, rows, 2, COSTS)) == asdict_of(two.plan(0, rows.max(axis=0), 2, COSTS))
    one.observe(0, rows > 0)
    two.observe(0, (rows > 0).any(axis=0))
    np.testing.assert_array_equal(one.frequency(0), two.frequency(0))


def asdict_of(plan):
    return {name: np.asarray(getattr(plan, name)).tolist() for name in LayerPlan.__dataclass_fields__}


# --- knobs: each changes the plan on a case made for it ---

BUCKET, SCORES = [0, 1, 2, 3], scores_of(8, u0=0.2, u4=0.9, u5=0.6, u6=0.3)
F = [0.9, 0.1, 0.05, 0.3, 0.02, 0.3, 0.8, 0.0]


def plan_with(policy="macro+micro", costs=COSTS, window=8, scores=SCORES, **settings):
    planner = planner_of(BUCKET, F, policy, replace(PAPER, **settings))
    plan = planner.plan(0, scores, window, costs)
    return moves(planner, plan), plan


def test_lam():
    assert plan_with(window=1, lam=0)[0] == [(4, 1)]  # prediction only: of the unpredicted, the first slot goes
    assert plan_with(window=1, lam=1000)[0] == [(6, 2)]  # frequency only
    assert plan_with(window=1, lam=1)[0] == [(6, 2)] and plan_with(window=1, lam=0.5)[0] == [(4, 2)]


def test_decay():
    for decay, expected in ((0.5, [(2, 0)]), (0.99, [])):
        planner = planner_of([0, 1], [0.6, 0.9, 0.1], "macro", replace(PAPER, decay=decay))
        for _ in range(2):
            planner.observe(0, np.array([False, True, True]))
        assert moves(planner, planner.plan(0, None, 1, COSTS)) == expected


def test_window_units():
    assert [len(plan_with(window=window)[0]) for window in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert len(plan_with(window=3, window_units=1)[0]) == 1  # the smaller limit
    assert plan_with(window=None, window_units=0)[0] == []
    assert len(plan_with(window=None, window_units=2)[0]) == 2


def test_window_s():
    costs = replace(COSTS, t0_s=1e-3, t_gather_s=1e-3, t_trans_s=1e-3)
    assert [len(plan_with(window=None, window_s=s, costs=costs)[0]) for s in (0, 2.9e-3, 3.1e-3, 5.1e-3)] == [
        0,
        0,
        1,
        2,
    ]


def test_lead_makes_the_window():
    """Two units reach theta on the host: 2 x 4 us + 1 us behind which to hide 4.5 us per unit."""
    costs = replace(COSTS, t_gather_s=4e-6, t_trans_s=4e-6)
    assert [len(plan_with(window=None, lead=lead, costs=costs)[0]) for lead in (0, 1, 2)] == [0, 1, 2]


def test_keep_share():
    settings = {"lam": 0.0, "window": 4, "scores": scores_of(8, u4=0.9, u5=0.6, u6=0.5, u7=0.4)}
    assert sorted(gone for _, gone in plan_with(**settings)[0]) == [0, 1, 2, 3]
    assert sorted(gone for _, gone in plan_with(**settings, keep_share=0.5)[0]) == [1, 2]  # 0 and 3 are frequent
    assert plan_with(**settings, keep_share=1.0)[0] == []


def test_theta_and_density():
    def counted(**settings):
        plan = plan_with(window=0, **settings)[1]
        return int(plan.theta), plan.n_gpu, plan.n_cpu

    assert counted() == (128, 0, 2)
    assert counted(theta=0.25) == (64, 0, 3)
    assert counted(theta=0.0) == (0, 4, 4)
    assert counted(density=0.25)[1:] == (0, 2)
    assert counted(density=0.5)[1:] == (1, 3)


def test_theta_matters_to_the_flag_ranking_alone():
    assert (
        plan_with(window=2, lam=0.01, ranking="flag", theta=0.25)[0] != plan_with(window=2, lam=0.01, ranking="flag")[0]
    )
    assert plan_with(window=2, lam=0.01, theta=0.25)[0] == plan_with(window=2, lam=0.01)[0]


def test_err_scale():
    counts = [plan_with("dynamic", window=0, err_scale=scale)[1].n_cpu for scale in (0.0, 1.0, 3.0)]
    assert counts == [3, 2, 1]  # all that can be live; as many as with theta; the error of theta three times over


def test_swap_rule():
    dear = replace(COSTS, t_trans_s=30e-6)  # ten uses
    assert plan_with(window=4, costs=dear)[0] == [(6, 2), (4, 1)]
    assert plan_with(window=4, costs=dear, swap_rule="gain")[0] == [(6, 2)]  # the only frequent one: 0.75 x 33 uses
    assert plan_with(window=4, costs=replace(COSTS, t_cpu_s=1e-6), swap_rule="gain")[0] == []  # nothing to save
    assert plan_with(window=4, costs=replace(dear, t0_s=1.0), swap_rule="gain")[0] == []


# --- books ---


def test_units_on_their_way_are_neither_fetched_again_nor_evicted():
    planner = planner_of([0, 1], [0.3, 0.2, 0.1, 0.1])
    first = planner.plan(0, scores_of(4, u2=0.9), 1, COSTS)
    assert moves(planner, first) == [(2, 1)]
    second = planner.plan(0, scores_of(4, u1=0.9, u2=0.9, u3=0.8), 2, COSTS)
    assert moves(planner, second) == [(3, 0)]  # 1 is leaving and cannot come, 2 is coming
    third = planner.plan(0, scores_of(4, u1=0.9), 2, COSTS)
    assert moves(planner, third) == []
    planner.check()
    planner.applied(0, second)
    planner.dropped(0, first)
    planner.check()
    assert planner.bucket(0).tolist() == [3, 1]
    with pytest.raises(AssertionError, match="layer 0: this plan is not pending"):
        planner.applied(0, first)


def test_thresholds_count_with_pending_swaps_as_done():
    planner = planner_of([0, 1], [0.3, 0.2, 0.1, 0.1])
    scores = scores_of(4, u2=0.9, u3=0.8)
    assert [planner.plan(0, scores, 1, COSTS).n_gpu for _ in range(3)] == [1, 2, 2]


def test_a_plan_is_frozen():
    plan = plan_with()[1]
    with pytest.raises(ValueError, match="read-only"):
        plan.units[0] = 7
    with pytest.raises(AttributeError):
        plan.theta_g = 0


def test_the_books_notice():
    for spoil, message in (
        (lambda p: p._bucket[0].__setitem__(0, 1), "two slots"),
        (lambda p: p._slot_of[0].__setitem__(3, 0), "slot_of knows"),
        (lambda p: p._slot_of[0].__setitem__(1, 0), "disagree"),
        (lambda p: p._where[0].__setitem__(3, 2), "pending plans"),
    ):
        planner = planner_of([0, 1], [0.3, 0.2, 0.1, 0.1])
        spoil(planner)
        with pytest.raises(AssertionError, match=message):
            planner.check()


def test_refusals():
    with pytest.raises(ValueError, match="policy must be one of dynamic, .*, got 'greedy'"):
        planner_of([0], [0.1, 0.2], "greedy")
    with pytest.raises(ValueError, match=r"frequency must have shape \(1, 2\), got \(1, 3\)"):
        NeuronPlanner(Placement((np.array([0], np.int32),), 2), np.zeros((1, 3), np.float32), "macro", PAPER)
    with pytest.raises(ValueError, match="mass must have shape"):
        planner_of([0], [0.1, 0.2], mass=[1.0])
    with pytest.raises(ValueError, match="prompt_live_counts must have shape"):
        planner_of([0], [0.1, 0.2]).start_sequence(np.zeros((1, 3)), 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_slots_and_all_slots(policy):
    for bucket in ([], [0, 1, 2]):
        planner = planner_of(bucket, [0.1, 0.2, 0.3], policy)
        plan = planner.plan(0, scores_of(3, u1=0.9), 3, COSTS)
        assert len(plan.units) == 0 and plan.n_gpu + plan.n_cpu >= 1
        planner.applied(0, plan)
        planner.dropped(0, plan)  # nothing to report: both are allowed
        planner.check()


def run(seed, policy, settings, steps):
    """A random life of two layers; checks the invariants at every step and gives back all plans."""
    rng = np.random.default_rng(seed)
    units = int(rng.integers(2, 60))
    buckets = tuple(np.sort(rng.permutation(units)[: rng.integers(0, units + 1)]).astype(np.int32) for _ in range(2))
    frequency = rng.random((2, units)).astype(np.float32)
    config = PolicyConfig(**settings)
    planner = NeuronPlanner(Placement(buckets, units), frequency, policy, config, rng.random((2, units)))
    pending, made = [], []
    for step in range(steps):
        layer = int(rng.integers(2))
        scores = None if rng.random() < 0.1 else rng.integers(0, 256, units).astype(np.uint8)
        window = None if rng.random() < 0.3 else int(rng.integers(0, units + 1))
        bucket, f = planner.bucket(layer), planner.frequency(layer)
        plan = planner.plan(layer, scores, window, COSTS)
        made.append(asdict_of(plan))
        assert len(plan.units) == 0 or (0 <= plan.units.min() and plan.units.max() < units)
        assert not np.isin(plan.units, bucket).any()
        assert window is None or len(plan.units) <= window
        if policy != "lru" and len(plan.units):
            best = np.argsort(-f[bucket], kind="stable")[: int(config.keep_share * len(bucket))]
            assert not np.isin(plan.slots, best).any()
        if len(plan.units):
            pending.append((layer, plan))
        while pending and rng.random() < 0.5:
            at, settled = pending.pop(int(rng.integers(len(pending))))
            (planner.applied if rng.random() < 0.7 else planner.dropped)(at, settled)
        planner.observe(layer, rng.random(units) < 0.3)
        planner.check()
        if step % 7 == 6:
            planner.start_sequence(rng.integers(0, 5, (2, units)), 5)
    for at, settled in pending:
        planner.applied(at, settled)
    planner.check()
    return made


SETTINGS = st.fixed_dictionaries(
    {
        "lam": st.floats(0, 20),
        "decay": st.floats(0, 0.999),
        "keep_share": st.floats(0, 1),
        "theta": st.floats(0, 1),
        "err_scale": st.floats(0, 2),
        "ranking": st.sampled_from(["score", "flag"]),
        "swap_rule": st.sampled_from(["gain", "paper"]),
    }
)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(POLICIES), chosen=SETTINGS)
def test_books_stay_right_and_plans_are_repeatable(seed, policy, chosen):
    assert run(seed, policy, chosen, 25) == run(seed, policy, chosen, 25)
