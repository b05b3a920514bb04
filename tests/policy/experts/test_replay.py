"""The replay's sums by hand, its clock, the published skew of synthetic routing, and what the default is held to."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.experts.bounds import lru_on_demand, weighted_bypass
from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.presets import PRESETS, expert_policy
from dynajax.policy.experts.replay import replay
from dynajax.policy.experts.synthetic import RECIPES, draw_routing
from tests.policy.experts.cases import COSTS

E, K = 64, 6
QUICK_LINK = replace(COSTS, t0_s=1e-9, t_trans_s=1e-6)


def planner_of(buckets, policy, experts, config=None, frequency=None, **parts):
    arrays = [np.array(bucket, np.int32) for bucket in buckets]
    config = config or ExpertConfig()
    return ExpertPlanner(len(arrays), experts, expert_policy(policy, **parts), config, arrays, frequency)


# --- sums ---


def test_static_by_hand():
    trace = np.array([[[2, 0, 1], [0, 1, 0]], [[0, 3, 0], [1, 1, 1]]])
    tally = replay(trace, planner_of([[0], [1]], "static", 3), COSTS)
    assert tally.live.tolist() == [3, 4] and tally.hits.tolist() == [1, 2]
    assert tally.tokens.tolist() == [6, 4] and tally.hit_tokens.tolist() == [2, 2]
    host = COSTS.cpu(1) + COSTS.cpu(3) + 2 * COSTS.t_sync_s
    np.testing.assert_allclose(tally.host_s, [host, 2 * COSTS.cpu(1) + COSTS.t_sync_s])
    np.testing.assert_allclose(tally.gpu_s, [COSTS.gpu(2), 2 * COSTS.gpu(1)])
    np.testing.assert_allclose(tally.makespan_s, [host, 2 * COSTS.cpu(1) + COSTS.t_sync_s + COSTS.gpu(1)])
    figures = tally.figures(unit_bytes=10)
    assert figures["hits"] == 3 / 7 and figures["weighted_hits"] == 0.4 and figures["loads"] == 0
    assert figures["layer_s"] == pytest.approx(tally.makespan_s.sum() / 4)


def test_lru_by_hand():
    """Slots 0 and 1; 2 comes for 0 (used longest ago), then 0 for 1."""
    trace = np.array([[[0, 1, 0]], [[0, 1, 1]], [[1, 0, 1]]])
    tally = replay(trace, planner_of([[0, 1]], "lru", 3), QUICK_LINK)
    assert (tally.hits[0], tally.fetched[0], tally.swapped[0]) == (3, 2, 0)
    figures = tally.figures(unit_bytes=10)
    assert figures["fetched"] == pytest.approx(2 / 3) and figures["load_bytes"] == pytest.approx(20 / 3)
    assert figures["link_busy"] == pytest.approx(2 * QUICK_LINK.copy_s / tally.makespan_s.sum())


def test_transit_is_fetched_and_never_there():
    trace = np.ones((4, 1, 3), np.int64)
    tally = replay(trace, planner_of([[0]], "scan", 3), QUICK_LINK, transit=2)
    assert tally.fetched[0] == 8 and tally.hits[0] == 4


def test_swaps_come_over_an_idle_link_only_and_are_there_in_the_next_step():
    trace = np.tile(np.array([[[0, 0, 1]]]), (6, 1, 1))
    config = ExpertConfig(move_price=0.0, decay=0.5)
    for dense_s, hits in ((0.0, 0), (2 * COSTS.copy_s, 5)):
        planner = planner_of([[0, 1]], "scan", 3, config, assign="resident")
        tally = replay(trace, planner, COSTS, dense_s=dense_s)
        assert (tally.hits[0], tally.swapped[0]) == (hits, hits > 0)


def test_prefetch_must_arrive_in_time_and_is_counted():
    """Two layers; layer 1 always uses the expert that is not there."""
    trace = np.zeros((5, 2, 3), np.int64)
    trace[:, 0, 0], trace[:, 1, 2] = 1, 1
    config = ExpertConfig(confidence=1.0, move_price=1e6)

    def predict(step, layer):
        return trace[step, layer].astype(float)

    for dense_s, ahead in ((0.0, 0), (2 * COSTS.copy_s, 1)):
        planner = planner_of([[0], [1]], "scan", 3, config, assign="resident")
        tally = replay(trace, planner, COSTS, dense_s=dense_s, predict=predict)
        assert tally.prefetched.tolist() == [0, ahead] == tally.useful.tolist()
        assert tally.hits.tolist() == [5, 5 * ahead]


def test_scan_is_the_best_in_its_own_situations_and_greedy_is_not():
    trace = draw_routing(RECIPES["measured-lru"], 40, 1, E, K, 8, np.random.default_rng(0))
    buckets = [np.arange(16)]
    best = replay(trace, planner_of(buckets, "scan", E), COSTS, transit=8).figures()
    greedy = replay(trace, planner_of(buckets, "dali", E), COSTS, transit=8).figures()
    assert best["over_best"] == 1 and greedy["over_best"] > 1.01
    assert best["layer_s"] < greedy["layer_s"]


# --- synthetic routing ---


@pytest.fixture(scope="module")
def repeating():
    """[L, steps, E]: layers are drawn independently, so they are as good as other seeds."""
    trace = draw_routing(RECIPES["repeating"], 1200, 8, 128, 8, 1, np.random.default_rng(1))
    return trace.transpose(1, 0, 2)


def test_every_token_chooses_its_experts():
    trace = draw_routing(RECIPES["repeating"], 5, 3, E, K, 4, np.random.default_rng(0))
    assert trace.shape == (5, 3, E) and (trace.sum(axis=2) == 4 * K).all() and trace.max() <= 4
    again = draw_routing(RECIPES["repeating"], 5, 3, E, K, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(trace, again)


def test_half_of_the_experts_carry_95_percent_of_the_traffic(repeating):
    carried = []
    for layer in repeating:
        traffic = np.sort(layer.sum(axis=0))[::-1].cumsum()
        carried.append((np.searchsorted(traffic, 0.95 * traffic[-1]) + 1) / 128)
    assert np.mean(carried) == pytest.approx(0.525, abs=0.025)


def test_neighbours_share_twice_as_many_experts_as_strangers(repeating):
    rng = np.random.default_rng(0)
    neighbours = np.minimum(repeating[:, 1:], repeating[:, :-1]).sum(axis=2).mean()
    one, other = rng.integers(0, repeating.shape[1], (2, 2000))
    strangers = np.minimum(repeating[:, one], repeating[:, other]).sum(axis=2).mean()
    assert neighbours / strangers == pytest.approx(2.0, abs=0.2)


def test_lru_hits_as_often_as_reported():
    trace = draw_routing(RECIPES["measured-lru"], 600, 3, 128, 8, 1, np.random.default_rng(2))
    hits = []
    for share in (0.15, 0.25, 0.35, 0.40, 0.45):
        slots = round(128 * share)
        start = np.arange(slots, dtype=np.int32)
        hits.append(sum(lru_on_demand(trace[:, i], start, slots).hits for i in range(3)) / trace.sum())
    np.testing.assert_allclose(hits, [0.600, 0.742, 0.845, 0.864, 0.885], atol=0.03)


# --- what the default is held to (synthetic) ---


def default_and_lru(recipe, rows, share, steps, seed):
    """(hits of the default cache with background swaps alone, LRU's, the bound's; by tokens; loads per step)."""
    trace = draw_routing(RECIPES[recipe], steps, 1, 128, 8, rows, np.random.default_rng(seed))
    first = steps // 5
    slots = round(128 * share)
    statistics, trace = trace[:first].sum(axis=0), trace[first:]
    bucket = np.argsort(-statistics[0], kind="stable")[:slots].astype(np.int32)
    planner = planner_of([bucket], "scan", 128, frequency=statistics / first, assign="resident")
    figures = replay(trace, planner, COSTS, dense_s=2e-4).figures()
    total = trace.sum()
    lru, most = (bound(trace[:, 0], bucket, slots).tokens / total for bound in (lru_on_demand, weighted_bypass))
    return figures["weighted_hits"], lru, most, figures["loads"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
def test_above_lru_at_sixteen_rows(recipe, share):
    ours, lru, most, loads = default_and_lru(recipe, 16, share, 150, 5)
    assert lru + (0.15 if share <= 0.25 else 0.0) <= ours <= most
    assert loads <= 0.5


def test_never_two_points_below_lru_at_one_row_and_a_quarter_of_the_way_to_the_bound():
    found = np.array(
        [default_and_lru(recipe, 1, share, 500, 5)[:3] for recipe in RECIPES for share in (0.125, 0.25, 0.5)]
    )
    ours, lru, most = found.T
    assert (ours - lru).min() >= -0.02
    assert (ours - lru).sum() / (most - lru).sum() >= 0.25  # of the way taken together; case by case less


def test_all_presets_run():
    trace = draw_routing(RECIPES["popular"], 12, 2, E, K, 3, np.random.default_rng(0))
    seconds = {}
    for name in PRESETS:
        planner = planner_of([np.arange(16), np.arange(16)], name, E)
        seconds[name] = replay(trace, planner, COSTS, dense_s=1e-4, transit=4).figures()["layer_s"]
    assert min(seconds, key=lambda name: seconds[name]) in ("auto", "scan")
