"""What each cache gives up and brings in: by hand, and for every cache at random."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.policy.experts.caches import CACHES, best_pairs, given_up
from dynajax.policy.experts.config import ExpertConfig
from tests.policy.experts.cases import COSTS

CONFIG = ExpertConfig()


def cache_of(name, experts=4, config=CONFIG, layers=1):
    return CACHES[name](layers, experts, config)


def array(*values):
    return np.array(values, np.int32)


def bools(*values):
    return np.array(values, np.bool_)


def swaps(cache, bucket, absent, limit=9, costs=COSTS):
    """[(unit, slot)] of layer 0."""
    units, slots = cache.swaps(0, bucket, absent, limit, costs)
    assert units.dtype == slots.dtype == np.int32
    return list(zip(units.tolist(), slots.tolist(), strict=True))


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(8))
def test_every_cache_keeps_its_promises(name, seed):
    rng = np.random.default_rng(seed)
    experts, slots = 12, int(rng.integers(0, 8))
    cache = cache_of(name, experts, layers=2)
    cache.begin(None if seed % 2 else rng.dirichlet(np.ones(experts), 2))
    for _ in range(int(rng.integers(0, 9))):
        for layer in range(2):
            cache.observe(layer, rng.integers(0, 3, experts))
    bucket = rng.permutation(experts)[:slots].astype(np.int32)
    absent = np.ones(experts, np.bool_)
    absent[bucket] = False
    absent &= rng.random(experts) < 0.8
    bucket[rng.random(slots) < 0.2] = -1
    tokens = rng.integers(0, 2, experts)
    before = bucket.copy(), absent.copy(), tokens.copy()
    victims = cache.victims(1, bucket, tokens)
    assert victims.dtype == np.int32 and len(set(victims.tolist())) == len(victims)
    assert (bucket[victims] >= 0).all() and (tokens[bucket[victims]] == 0).all()
    if name != "static":
        assert len(victims) == sum(unit >= 0 and tokens[unit] == 0 for unit in bucket)
    units, taken = cache.swaps(1, bucket, absent, 3, COSTS)
    assert len(units) == len(taken) == len(set(units.tolist())) == len(set(taken.tolist())) <= 3
    assert absent[units].all() and (bucket[taken] >= 0).all()
    for now, then in zip((bucket, absent, tokens), before, strict=True):
        np.testing.assert_array_equal(now, then)
    stays = cache.stays(1, units, bucket[taken], tokens)
    assert stays.shape == units.shape and stays.dtype == np.bool_


@pytest.mark.parametrize("name", CACHES)
def test_layers_do_not_mix(name):
    mixed, alone = cache_of(name, layers=2), cache_of(name, layers=2)
    for tokens in ([3, 0, 1, 0], [0, 2, 0, 0], [1, 0, 0, 1], [0, 0, 4, 0]):
        mixed.observe(0, array(*tokens))
        alone.observe(0, array(*tokens))
        mixed.observe(1, array(*tokens[::-1]))
    bucket, none = array(0, 1, 2), np.zeros(4, np.int64)
    np.testing.assert_array_equal(mixed.victims(0, bucket, none), alone.victims(0, bucket, none))


def test_given_up_by_value_then_slot_and_none_that_is_live_or_spoken_for():
    bucket, value = array(4, 7, 2, -1, 3), np.array([0, 0, 0.1, 0.3, 0.3, 0, 0, 0.2])
    tokens = np.zeros(8, np.int64)
    assert given_up(bucket, tokens, value).tolist() == [2, 1, 0, 4]
    tokens[7] = 1
    assert given_up(bucket, tokens, value).tolist() == [2, 0, 4]


def test_best_pairs_is_the_example_of_its_docstring():
    value = np.array([0, 0.5, 0.9, 0, 0, 0, 0, 1.0])
    absent = bools(0, 1, 1, 0, 0, 0, 0, 0)
    units, slots = best_pairs(array(4, 7), absent, value, 1)
    assert (units.tolist(), slots.tolist()) == ([2], [0])
    assert [part.tolist() for part in best_pairs(array(4, 7), absent, value, 9)] == [[2, 1], [0, 1]]


def test_lru_lfu_and_ema_give_up_different_experts():
    """0 twice long ago, 1 just now, 2 in between with most tokens."""
    order = {}
    for name in ("lru", "lfu", "ema"):
        cache = cache_of(name)
        for tokens in ([1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 9, 0], [0, 1, 9, 0]):
            cache.observe(0, array(*tokens))
        order[name] = cache.victims(0, array(0, 1, 2), np.zeros(4, np.int64)).tolist()
    assert order == {"lru": [0, 1, 2], "lfu": [1, 0, 2], "ema": [1, 0, 2]}


def test_ema_is_of_the_share_of_the_traffic():
    """A step of 100 tokens counts as much as one of 2."""
    cache = cache_of("ema", config=replace(CONFIG, ema_decay=0.5))
    cache.observe(0, array(50, 50, 0, 0))
    cache.observe(0, array(0, 0, 2, 0))
    assert cache.victims(0, array(2, 0, 1), np.zeros(4, np.int64)).tolist() == [1, 2, 0]


def test_static_moves_nothing():
    cache = cache_of("static")
    cache.observe(0, array(9, 0, 0, 0))
    assert len(cache.victims(0, array(1, 2), array(1, 0, 0, 0))) == 0
    assert swaps(cache, array(1, 2), bools(1, 0, 0, 1)) == []


# --- the window of DALI ---


def test_dali_swaps_at_the_windows_end_and_starts_anew():
    cache = cache_of("dali", config=replace(CONFIG, w_size=2, u_size=1))
    bucket, absent = array(0, 1), bools(0, 0, 1, 1)
    cache.observe(0, array(2, 1, 0, 0))
    assert swaps(cache, bucket, absent) == []
    cache.observe(0, array(0, 0, 3, 4))
    assert swaps(cache, bucket, absent) == [(3, 1)]
    assert swaps(cache, bucket, absent) == []
    cache.observe(0, array(0, 0, 0, 0))
    cache.observe(0, array(0, 9, 0, 0))
    assert swaps(cache, bucket, absent) == [(2, 0)]  # sums of this window only, and no better than what goes


def test_dali_does_not_ask_whether_the_newcomer_is_better():
    cache = cache_of("dali", config=replace(CONFIG, w_size=1, u_size=2))
    cache.observe(0, array(5, 4, 0, 0))
    assert swaps(cache, array(0, 1), bools(0, 0, 1, 1)) == [(2, 1), (3, 0)]


def test_dali_forgets_a_window_that_nobody_asked_about_and_a_sequence():
    cache = cache_of("dali", config=replace(CONFIG, w_size=1, u_size=1))
    cache.observe(0, array(0, 0, 9, 0))
    cache.observe(0, array(0, 0, 0, 1))
    assert swaps(cache, array(0, 1), bools(0, 0, 1, 1)) == [(3, 0)]
    cache.observe(0, array(0, 0, 9, 0))
    cache.begin(None)
    assert swaps(cache, array(0, 1), bools(0, 0, 1, 1)) == []


# --- the default ---

EAGER = replace(CONFIG, decay=0.5, move_price=0.0)


def test_decayed_swaps_only_what_is_strictly_better():
    cache = cache_of("decayed", config=EAGER)
    cache.observe(0, array(1, 2, 2, 1))
    assert swaps(cache, array(0, 1), bools(0, 0, 1, 1)) == [(2, 0)]
    assert swaps(cache, array(2, 1), bools(1, 0, 0, 1)) == []


def test_decayed_weighs_tokens_and_forgets():
    cache = cache_of("decayed", config=EAGER)
    for tokens in ([8, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 1]):
        cache.observe(0, array(*tokens))
    assert cache.victims(0, array(0, 1, 2, 3), np.zeros(4, np.int64)).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize("price", [0.1, 0.5, 2.0, 8.0])
def test_decayed_pays_for_a_move(price):
    """New and old differ by one expected token a step; the rule by its own words."""
    config = replace(CONFIG, decay=0.9, move_price=price)
    cache = cache_of("decayed", 2, config)
    for _ in range(400):
        cache.observe(0, array(1, 2))
    costs = replace(COSTS, cpu_s=1e-3, cpu_token_s=1e-4, t_trans_s=4e-3)
    saved = (costs.cpu_s - costs.gpu_s) * (np.exp(-1) - np.exp(-2)) + costs.cpu_token_s - costs.gpu_token_s
    pays = saved / (1 - 0.9) > price * costs.copy_s
    assert swaps(cache, array(0), bools(0, 1), costs=costs) == ([(1, 0)] if pays else [])
    assert pays == (price < 1)


def test_decayed_moves_nothing_where_the_host_is_no_slower():
    cache = cache_of("decayed", config=replace(EAGER, move_price=1e-6))
    cache.observe(0, array(0, 0, 9, 0))
    assert swaps(cache, array(0, 1), bools(0, 0, 1, 1)) == [(2, 0)]
    quick_host = replace(COSTS, cpu_s=1e-9, cpu_token_s=1e-9)
    assert swaps(cache, array(0, 1), bools(0, 0, 1, 1), costs=quick_host) == []
    assert swaps(cache, array(2), bools(1, 1, 0, 1), costs=quick_host) == []


def test_decayed_starts_from_what_is_known():
    cache = cache_of("decayed")
    cache.begin(np.array([[0.1, 0.2, 0.4, 0.3]]))
    assert cache.victims(0, array(0, 1, 2, 3), np.zeros(4, np.int64)).tolist() == [0, 1, 3, 2]
    cache.begin(None)  # nothing new is known
    assert cache.victims(0, array(0, 1, 2, 3), np.zeros(4, np.int64)).tolist() == [0, 1, 3, 2]


def test_a_fetched_expert_stays_if_it_is_better_by_the_step_that_is_running():
    cache = cache_of("decayed", config=replace(CONFIG, decay=0.9))
    cache.begin(np.array([[0.3, 0.05, 0.0, 0.65]]))
    tokens = array(0, 0, 1, 1)  # expert 2 gets 0.1 * 1 / 2 of the traffic
    assert cache.stays(0, array(2, 2), array(0, 1), tokens).tolist() == [False, True]
    assert cache_of("lru").stays(0, array(2), array(0), tokens).tolist() == [True]
    assert cache_of("dali").stays(0, array(2), array(0), tokens).tolist() == [False]


def test_a_step_without_tokens_changes_nothing():
    cache = cache_of("decayed")
    cache.begin(np.array([[0.1, 0.2, 0.4, 0.3]]))
    cache.observe(0, np.zeros(4, np.int64))
    assert cache.victims(0, array(0, 1, 2, 3), np.zeros(4, np.int64)).tolist() == [0, 1, 3, 2]
