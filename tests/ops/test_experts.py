"""The experts of a pool against the plain reference, and what must not reach the sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.config import Activation, RouterSpec
from dynajax.ops.experts import grouped_experts, grouped_experts_reference, routed_experts, write_rows
from dynajax.ops.routing import all_experts, route, router_logits, spread

EXPERTS, WIDTH, HIDDEN = 6, 10, 16
SILU, RELU = Activation(kind="silu"), Activation(kind="relu")
grouped = jax.jit(grouped_experts, static_argnames=("width", "activation"))
routed = jax.jit(routed_experts, static_argnames=("width", "activation"))


def parts_of(count, dtype="float32", seed=0, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    parts = tuple(jnp.asarray(rng.standard_normal((experts * WIDTH, HIDDEN)), dtype) for _ in range(count))
    return tuple(jax.lax.bitcast_convert_type(p, jnp.uint16) for p in parts) if dtype == "bfloat16" else parts


def inputs_of(tokens, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, HIDDEN)), "float32")


GROUPS = (
    np.array([4, 1, 0], np.int32),
    np.array([[0, 3], [2, 0], [1, 1]], np.int32),
    np.array([[0.5, 0.2], [0.3, 0.0], [1.0, 0.0]], np.float32),
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("count", "activation"), [(3, SILU), (3, RELU), (2, RELU)])
def test_groups_equal_the_reference(dtype, count, activation):
    parts, h = parts_of(count, dtype), inputs_of(5)
    y = grouped(h, parts, *GROUPS, width=WIDTH, activation=activation)
    expected = grouped_experts_reference(h, parts, *GROUPS, width=WIDTH, activation=activation)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5 * float(np.abs(expected).max()))
    assert not np.asarray(y[4]).any()  # nobody sent it anywhere


def test_the_comparison_can_fail():
    parts, h = parts_of(3), inputs_of(5)
    moved = (GROUPS[0][[1, 0, 2]], *GROUPS[1:])
    y = grouped(h, parts, *moved, width=WIDTH, activation=SILU)
    expected = grouped_experts_reference(h, parts, *GROUPS, width=WIDTH, activation=SILU)
    assert np.abs(y - expected).max() > 1e-2 * np.abs(expected).max()


def test_weight_zero_hides_whatever_there_is():
    parts = tuple(part.at[WIDTH : 2 * WIDTH].set(jnp.nan) for part in parts_of(3))
    h = inputs_of(5).at[4].set(jnp.nan)
    slots, rows = np.array([4, 1], np.int32), np.array([[0, 4], [2, 0]], np.int32)
    weights = np.array([[0.5, 0.0], [0.0, 0.0]], np.float32)
    y = np.asarray(grouped(h, parts, slots, rows, weights, width=WIDTH, activation=SILU))
    assert np.isfinite(y[:4]).all() and y[0].any()


@pytest.mark.parametrize("tokens", [1, 2, 9])  # pair by pair, and with 9 x 2 pairs expert by expert
def test_experts_by_id_equal_all_experts(tokens):
    parts, h, rng = parts_of(3), inputs_of(tokens), np.random.default_rng(2)
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :2].astype(np.int32)
    weights = rng.random((tokens, 2)).astype(np.float32)
    slot_of = np.array([3, 0, 5, 1, 4, 2], np.int32)
    placed = tuple(part.reshape(EXPERTS, WIDTH, HIDDEN)[np.argsort(slot_of)].reshape(-1, HIDDEN) for part in parts)
    y = routed(h, placed, slot_of, ids, weights, width=WIDTH, activation=SILU)
    expected = all_experts(h, parts, spread(ids, weights, EXPERTS), SILU)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_rows_are_written_where_they_belong():
    part, rows = parts_of(3)[0], inputs_of(4, seed=5)
    expected = np.asarray(part).copy()
    expected[7:11] = rows
    written, fence = jax.jit(write_rows, donate_argnums=0)(part, rows, np.int32(7))
    np.testing.assert_array_equal(written, expected)
    assert int(fence) == 7


# --- routing, against loops ---


def routed_by_loops(logits, bias, router):
    ids, weights = [], []
    for row in np.asarray(logits, np.float64):
        exps = np.exp(row - row.max())
        scores = {"softmax": exps / exps.sum(), "sigmoid": 1 / (1 + np.exp(-row)), "chosen": row}[router.score]
        choosing = scores + (0 if bias is None else bias)
        size = len(row) // router.groups
        if router.groups > 1:
            groups = choosing.reshape(router.groups, size)
            rank = np.sort(groups, axis=1)[:, -2:].sum(axis=1) if router.group_rank == "top2" else groups.max(axis=1)
            kept = np.argsort(-rank, kind="stable")[: router.top_groups]
            inside = np.isin(np.arange(len(row)) // size, kept)
            choosing = np.where(inside, choosing, -np.inf)
        chosen = np.argsort(-choosing, kind="stable")[: router.top_k]
        mine = scores[chosen]
        if router.score == "chosen":
            mine = np.exp(mine - mine.max()) / np.exp(mine - mine.max()).sum()
        if router.renormalise:
            mine = mine / (mine.sum() + router.epsilon)
        ids.append(chosen)
        weights.append(mine * router.scale)
    return np.array(ids), np.array(weights)


ROUTERS = {
    "mixtral": RouterSpec(experts=8, top_k=2, renormalise=True),
    "qwen2": RouterSpec(experts=8, top_k=3),
    "granite": RouterSpec(experts=8, top_k=3, score="chosen"),
    "deepseek-v3": RouterSpec(
        experts=12, top_k=3, score="sigmoid", selection_bias=True, groups=4, top_groups=2, group_rank="top2",
        renormalise=True, epsilon=1e-20, scale=2.5,
    ),
    "deepseek-v2": RouterSpec(experts=12, top_k=3, groups=3, top_groups=2, scale=16.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_loops(name):
    router, rng = ROUTERS[name], np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((40, router.experts)), "float32")
    bias = jnp.asarray(rng.standard_normal(router.experts), "float32") if router.selection_bias else None
    ids, weights = route(logits, bias, router)
    expected = routed_by_loops(logits, None if bias is None else np.asarray(bias, np.float64), router)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


def test_of_equal_scores_the_first_expert_wins():
    ids, weights = route(jnp.zeros((2, 8)), None, ROUTERS["mixtral"])
    np.testing.assert_array_equal(ids, [[0, 1], [0, 1]])
    np.testing.assert_allclose(weights, 0.5)


def test_a_selection_bias_chooses_and_does_not_weigh():
    router = RouterSpec(experts=4, top_k=1, score="sigmoid", selection_bias=True)
    ids, weights = route(jnp.asarray([[3.0, 0.0, 0.0, 0.0]]), jnp.asarray([0.0, 0.0, 5.0, 0.0]), router)
    assert int(ids[0, 0]) == 2 and float(weights[0, 0]) == pytest.approx(0.5)


def test_router_logits_may_be_float32_whatever_the_weights():
    rng = np.random.default_rng(4)
    h, weight = (
        jnp.asarray(rng.standard_normal((3, 16)), "float32"),
        jnp.asarray(rng.standard_normal((4, 16)), "bfloat16"),
    )
    logits = router_logits(h, weight, jnp.arange(4, dtype=jnp.bfloat16), RouterSpec(experts=4, top_k=1, float32=True))
    expected = np.asarray(h, np.float64) @ np.asarray(weight, np.float64).T + np.arange(4)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
