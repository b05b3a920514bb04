"""The planner: every live expert computed once, moves that stay in the books, and what each part of a policy does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.presets import PRESETS, expert_policy
from tests.policy.experts.cases import COSTS

CONFIG = ExpertConfig()
QUICK_LINK = replace(COSTS, t0_s=1e-9, t_trans_s=1e-6)  # fetching everything is best
SLOW_LINK = replace(COSTS, t_trans_s=1.0)  # fetching nothing is


def planner_of(buckets, policy="scan", experts=6, config=CONFIG, frequency=None, **parts):
    arrays = [np.array(bucket, np.int32) for bucket in buckets]
    return ExpertPlanner(len(arrays), experts, expert_policy(policy, **parts), config, arrays, frequency)


def tokens_of(experts=6, **counts):
    """e3=2: two tokens at expert 3."""
    tokens = np.zeros(experts, np.int64)
    for name, count in counts.items():
        tokens[int(name[1:])] = count
    return tokens


def sides(plan):
    return [sorted(part.tolist()) for part in (plan.hot, plan.cold, plan.units)]


# --- a step ---


def test_a_step_with_a_slow_link_fetches_nothing():
    planner = planner_of([[0, 1, 2]])
    plan = planner.plan_step(0, tokens_of(e0=1, e4=2), SLOW_LINK)
    assert sides(plan) == [[0], [4], []]
    planner.check()


def test_a_step_with_a_quick_link_fetches_into_idle_slots():
    planner = planner_of([[0, 1, 2]])
    plan = planner.plan_step(0, tokens_of(e1=1, e3=1, e4=2, e5=3), QUICK_LINK)
    assert sides(plan) == [[1], [3], [4, 5]]
    assert plan.units.tolist() == [5, 4], "heaviest first"
    assert sorted(plan.slots.tolist()) == [0, 2], "never the slot of a live expert"
    assert planner.bucket(0).tolist() == [0, 1, 2] and np.flatnonzero(planner.resident(0)).tolist() == [1]
    planner.applied(0, plan.units, plan.slots)
    assert sorted(planner.bucket(0).tolist()) == [1, 4, 5]
    planner.check()


def test_room_limits_fetches():
    plan = planner_of([[0, 1, 2]]).plan_step(0, tokens_of(e3=1, e4=2, e5=3), QUICK_LINK, room=1)
    assert plan.units.tolist() == [5]
    assert len(planner_of([[0, 1, 2]]).plan_step(0, tokens_of(e3=1), QUICK_LINK, room=0).units) == 0


def test_a_busy_link_keeps_experts_on_the_host():
    tokens = tokens_of(e3=1, e4=1, e5=1)
    link = replace(COSTS, t_trans_s=1e-4)
    assert len(planner_of([[0, 1, 2]]).plan_step(0, tokens, link).units) == 2
    assert len(planner_of([[0, 1, 2]]).plan_step(0, tokens, link, copy_busy_s=1.0).units) == 0


def test_what_is_on_its_way_is_computed_by_the_host_and_counts_as_its_work():
    planner = planner_of([[0, 1, 2]])
    first = planner.plan_step(0, tokens_of(e5=1), QUICK_LINK)
    gone = int(planner.bucket(0)[first.slots[0]])
    again = planner.plan_step(0, tokens_of(e5=2, **{f"e{gone}": 3}), QUICK_LINK)
    assert sides(again) == [[], sorted([5, gone]), []]
    assert again.work.host_busy_s == pytest.approx(QUICK_LINK.cpu(2) + QUICK_LINK.cpu(3))
    planner.check()
    planner.dropped(0, first.units, first.slots)
    assert np.flatnonzero(planner.resident(0)).tolist() == [0, 1, 2]
    planner.check()


def test_parts_of_a_plan_may_be_reported_one_by_one():
    planner = planner_of([[0, 1, 2]])
    plan = planner.plan_step(0, tokens_of(e3=1, e4=2), QUICK_LINK)
    planner.applied(0, plan.units[1:], plan.slots[1:])
    assert np.count_nonzero(planner.resident(0)) == 2
    planner.dropped(0, plan.units[:1], plan.slots[:1])
    assert np.count_nonzero(planner.resident(0)) == 3
    planner.check()


@pytest.mark.parametrize("report", ["applied", "dropped"])
def test_what_is_not_pending_cannot_be_reported(report):
    planner = planner_of([[0, 1, 2]])
    plan = planner.plan_step(0, tokens_of(e3=1), QUICK_LINK)
    with pytest.raises(AssertionError, match="expert 3 is not on its way"):
        getattr(planner, report)(0, plan.units, plan.slots + 1)
    planner = planner_of([[0, 1, 2]])
    with pytest.raises(AssertionError, match="expert 3 is not on its way"):
        getattr(planner, report)(0, plan.units, plan.slots)


def test_nothing_live_is_nothing_to_do():
    plan = planner_of([[0, 1]]).plan_step(0, tokens_of(), COSTS)
    assert sides(plan) == [[], [], []]


# --- transit ---


def test_through_transit_comes_what_is_not_worth_a_slot():
    frequency = np.array([[0.6, 0.5, 0.4, 0.3, 0.1, 0.1]])
    planner = planner_of([[0, 1, 2]], frequency=frequency, experts=6)
    plan = planner.plan_step(0, tokens_of(e3=1, e4=1), QUICK_LINK, transit=2)
    assert plan.units.tolist() == [3, 4] and plan.slots.tolist() == [-1, -1]
    assert planner.resident(0).sum() == 3
    planner.check()


def test_what_finds_no_transit_takes_a_slot():
    planner = planner_of([[0, 1, 2]], frequency=np.array([[0.6, 0.5, 0.4, 0.3, 0.1, 0.1]]))
    plan = planner.plan_step(0, tokens_of(e3=1, e4=1), QUICK_LINK, transit=1)
    assert sorted(plan.slots.tolist()) == [-1, 2]
    assert len(planner.plan_step(0, tokens_of(e5=1), QUICK_LINK, transit=1).units) == 1
    planner.check()


def test_transit_is_room_for_those_that_keep_their_slots():
    for cache in ("static", "lru", "dali"):
        planner = planner_of([[0, 1]], cache=cache)
        live = tokens_of(e0=1, e1=1, e2=1, e3=1, e4=1)
        assert len(planner.plan_step(0, live, QUICK_LINK).units) == 0
        plan = planner.plan_step(0, live, QUICK_LINK, transit=2)
        assert len(plan.units) == 2 and (plan.slots == -1).all()


def test_lru_keeps_what_it_fetches_as_far_as_slots_go():
    planner = planner_of([[0, 1]], policy="lru")
    plan = planner.plan_step(0, tokens_of(e2=1, e3=1, e4=1), QUICK_LINK, transit=4)
    assert sorted(plan.slots.tolist()) == [-1, 0, 1]


# --- background and prefetch ---


def run(planner, *steps):
    for tokens in steps:
        planner.plan_step(0, tokens, SLOW_LINK)
        planner.observe(0, tokens)


def test_background_swaps_fit_the_window():
    for window, swaps in ((0.5, 0), (1.5, 1), (9.0, 2)):
        planner = planner_of([[0, 1, 2]], config=replace(CONFIG, move_price=0.0))
        run(planner, tokens_of(e3=1, e4=2))
        found = planner.background(0, COSTS, window * COSTS.copy_s)
        assert found.units.tolist() == [4, 3][:swaps]
        planner.check()
        planner.applied(0, found.units, found.slots)
        assert planner.resident(0)[found.units].all()
        planner.check()


def test_prefetch_brings_in_the_one_that_pays():
    planner = planner_of([[0, 1, 2]], config=replace(CONFIG, confidence=1.0, prefetch_price=0.0))
    swap = planner.prefetch(0, np.array([0, 1.0, 0, 2.0, 5.0, 0]), COSTS)
    assert swap is not None and swap.units.tolist() == [4] and planner.bucket(0)[swap.slots[0]] in (0, 2)
    planner.check()
    planner.applied(0, swap.units, swap.slots)
    assert 4 in sides(planner.plan_step(0, tokens_of(e4=5), SLOW_LINK))[0]


def test_prefetch_keeps_off_a_busy_link_and_off_what_is_coming():
    predicted = np.array([0, 1.0, 0, 2.0, 5.0, 0])
    planner = planner_of([[0, 1, 2]], config=replace(CONFIG, confidence=1.0, prefetch_price=0.0))
    assert planner.prefetch(0, predicted, COSTS, copy_busy_s=1e-9) is None
    assert planner.prefetch(0, predicted, COSTS).units.tolist() == [4]
    assert planner.prefetch(0, predicted, COSTS).units.tolist() == [3]
    planner.check()


def test_prefetch_knows_what_transit_will_allow():
    """With a second fetch on demand the host has less left, so that the first one early is worth something."""
    predicted = np.array([0, 0, 5.0, 1.0, 1.0, 0])
    for transit, chosen in ((0, False), (2, True)):
        planner = planner_of([[0]], config=replace(CONFIG, confidence=1.0))
        assert (planner.prefetch(0, predicted, COSTS, transit=transit) is not None) == chosen


def test_confidence_follows_what_became_of_guesses():
    planner = planner_of([[0, 1, 2]], config=replace(CONFIG, confidence_decay=0.5, prefetch_price=1e6))
    predicted = np.array([0, 0, 0, 0, 5.0, 0])
    seen = []
    for tokens in (tokens_of(e4=1), tokens_of(e4=1), tokens_of(e3=1), tokens_of(e3=1)):
        assert planner.prefetch(0, predicted, COSTS) is None  # too dear, but a guess all the same
        planner.plan_step(0, tokens, SLOW_LINK)
        planner.plan_step(0, tokens, SLOW_LINK)  # no new guess: nothing learnt
        seen.append(planner.confidence)
    assert seen == [0.75, 0.875, 0.4375, 0.21875]


# --- what is known of a sequence ---


def test_a_sequence_starts_from_statistics_and_its_prompt():
    frequency = np.array([[0.5, 0.3, 0.2, 0.0]])
    config = replace(CONFIG, decay=0.9)  # remembers 10 tokens
    planner = planner_of([[0, 1, 2]], experts=4, config=config, frequency=frequency)
    order = [planner.plan_step(0, tokens_of(4, e3=1), QUICK_LINK).slots.tolist()]
    planner = planner_of([[0, 1, 2]], experts=4, config=config, frequency=frequency)
    planner.start_sequence(np.array([[0, 0, 8, 0]]))  # 5, 3 and 2 + 8 tokens
    order.append(planner.plan_step(0, tokens_of(4, e3=1), QUICK_LINK).slots.tolist())
    assert order == [[2], [1]]


def test_bandwidth_split_is_told_what_was_used_last():
    planner = planner_of([[0]], policy="bandwidth-split")
    run(planner, tokens_of(e3=1), tokens_of(e2=1), tokens_of(e4=1))
    plan = planner.plan_step(0, tokens_of(e2=1, e3=1, e4=1), replace(COSTS, t_trans_s=COSTS.cpu_s))
    assert plan.work.last_used.tolist() == [2, 1, 3] and plan.units.tolist() == [4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buckets": [np.arange(2)]}, "buckets must be 2 arrays, one for each layer, got 1"),
        ({"frequency": np.zeros((2, 3))}, r"frequency must have shape \(2, 4\), got \(2, 3\)"),
    ],
)
def test_wrong_shapes_are_named(arguments, message):
    given = {"buckets": [np.arange(2), np.arange(2)], "frequency": None} | arguments
    with pytest.raises(ValueError, match=message):
        ExpertPlanner(2, 4, PRESETS["scan"], CONFIG, **given)
    with pytest.raises(ValueError, match=r"counts must have shape \(1, 6\), got \(6,\)"):
        planner_of([[0]]).start_sequence(np.zeros(6, np.int64))


def test_an_expert_in_two_slots_is_noticed():
    with pytest.raises(AssertionError, match="an expert sits in two slots"):
        planner_of([[1, 1]])


# --- whatever happens ---


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_live_expert_is_computed_once_and_the_books_stay_right(data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    layers, experts = 2, int(rng.integers(2, 20))
    buckets = [rng.permutation(experts)[: rng.integers(0, experts + 1)] for _ in range(layers)]
    planner = planner_of(buckets, data.draw(st.sampled_from(sorted(PRESETS))), experts)
    costs = [COSTS, QUICK_LINK, SLOW_LINK][rng.integers(3)]
    pending, moved = [], 0
    for _ in range(25):
        layer, tokens = int(rng.integers(layers)), rng.integers(0, 3, experts)
        what = rng.integers(5)
        if what == 0:
            plan = planner.plan_step(layer, tokens, costs, transit=int(rng.integers(3)))
            computed = np.concatenate((plan.hot, plan.cold, plan.units))
            assert sorted(computed.tolist()) == np.flatnonzero(tokens).tolist()
            assert not tokens[planner.bucket(layer)[plan.slots[plan.slots >= 0]]].any()
            kept = plan.slots >= 0
            pending += [(layer, plan.units[j : j + 1], plan.slots[j : j + 1]) for j in np.flatnonzero(kept)]
            planner.observe(layer, tokens)
        elif what == 1:
            swap = planner.background(layer, costs, float(rng.integers(4)) * costs.copy_s)
            pending += [(layer, swap.units, swap.slots)] if len(swap.units) else []
        elif what == 2:
            swap = planner.prefetch(layer, rng.random(experts) * 3, costs)
            pending += [] if swap is None else [(layer, swap.units, swap.slots)]
        elif pending:
            getattr(planner, "applied" if what == 3 else "dropped")(*pending.pop(rng.integers(len(pending))))
            moved += 1
        planner.check()
    for transfer in pending:
        planner.applied(*transfer)
    planner.check()
    assert all(planner.resident(layer).sum() == len(buckets[layer]) for layer in range(layers))


def test_what_never_pays_is_asked_for_rarely_and_at_once_again_when_it_does():
    planner = ExpertPlanner(
        1, 4, expert_policy("scan", prefetch="gate"), ExpertConfig(prefetch_price=1e6), [np.arange(2)]
    )
    asked = []
    for step in range(200):
        if planner.asks(0):
            asked.append(step)
            assert planner.prefetch(0, np.array([0.0, 0.0, 1.0, 0.0]), COSTS) is None
    assert asked[:9] == [*range(8), 39] and asked[9:] == [71, 103, 135, 167, 199]
    pays = ExpertPlanner(1, 4, expert_policy("scan", prefetch="gate"), ExpertConfig(prefetch_price=0.0), [np.arange(2)])
    pays._in_vain[0] = 39
    assert (
        pays.asks(0) and pays.prefetch(0, np.array([0.0, 0.0, 9.0, 9.0]), COSTS) is not None and pays._in_vain[0] == 0
    )
