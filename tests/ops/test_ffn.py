"""The FFN over a pool, and the write into one, each against its plain reference."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dynajax.config import Activation
from dynajax.ops.ffn import (
    activate,
    as_weights,
    combine,
    counted_pool_ffn,
    pool_ffn,
    pool_ffn_products,
    pool_ffn_reference,
    write_slots,
    write_slots_reference,
)

ACTIVATIONS = {
    "relu": Activation(),
    "fatrelu": Activation(kind="fatrelu", threshold=0.5),
    "silu": Activation(kind="silu"),
    "drelu": Activation(kind="drelu"),
}
# uint16 holds the bits of bfloat16. Relative to the largest output.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.5e-2, "uint16": 1.5e-2}


def as_pool(array, pool_type):
    """float32 numbers as a pool of this type."""
    if pool_type == "uint16":
        return jnp.asarray(array.astype(ml_dtypes.bfloat16).view(np.uint16))
    return jnp.asarray(array, pool_type)


def case(pool_type, seed=0, slots=24, hidden=16):
    """h [T,D] and gate, up, down [G,D]; half of the gates are positive. Slot 3 weighs more and is live in row 0, slot 5
    is empty."""
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((3, slots, hidden)).astype(np.float32) / np.float32(hidden**0.5)
    h = rng.standard_normal((6, hidden)).astype(np.float32)
    parts[:, 3] *= 2
    parts[:2, 3] *= np.sign(parts[:2, 3] @ h[0])[:, None]
    parts[:, 5] = 0
    return jnp.asarray(h), tuple(as_pool(part, pool_type) for part in parts)


def assert_ffn(found, expected, pool_type):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[pool_type] * scale)


@pytest.mark.parametrize("pool_type", TOLERANCE)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_pool_ffn(kind, pool_type):
    activation = ACTIVATIONS[kind]
    run = jax.jit(partial(pool_ffn, activation=activation))
    for seed in range(3):
        h, parts = case(pool_type, seed)
        y, live = run(h, parts)
        assert (y.dtype, y.shape) == (jnp.float32, h.shape)
        assert_ffn(y, pool_ffn_reference(h, parts, activation), pool_type)
        gate = np.asarray(h, np.float64) @ np.asarray(as_weights(parts[0])).astype(np.float64).T
        border = activation.threshold if kind == "fatrelu" else 0.0
        sure = np.abs(gate - border) > 0.02
        expected_live = gate != 0 if kind == "silu" else gate > border
        if kind == "drelu":
            up = np.asarray(h, np.float64) @ np.asarray(as_weights(parts[1])).astype(np.float64).T
            sure, expected_live = sure & (np.abs(up) > 0.02), expected_live & (up > 0)
        assert live.dtype == jnp.bool_ and live.shape == gate.shape
        np.testing.assert_array_equal(np.asarray(live)[sure], expected_live[sure])
        assert not live[:, 5].any()  # a slot of zeros is never live


@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_what_the_host_computes_is_what_the_products_give(kind, skip_zeros):
    """Of few tokens and of many; what is not admitted adds nothing, and counts as not live."""
    activation, admit = ACTIVATIONS[kind], np.random.default_rng(1).random((6, 24)) < 0.5
    host = partial(pool_ffn, activation=activation, skip_zeros=skip_zeros)
    h, parts = case("float32")
    for tokens in (1, 6):
        few, some = h[:tokens], jnp.asarray(admit[:tokens])
        for marks in (None, some):
            y, live = jax.jit(host)(few, parts, admit=marks)
            expected = pool_ffn_products(few, parts, marks, activation=activation)
            assert_ffn(y, expected[0], "float32")
            np.testing.assert_array_equal(live, expected[1])
        assert not live[~some].any() and live.any()
        y, counts = jax.jit(partial(counted_pool_ffn, activation=activation, skip_zeros=skip_zeros))(few, parts)
        live = pool_ffn_products(few, parts, activation=activation)[1]
        assert counts.tolist() == live.sum(axis=1).tolist() and counts.dtype == jnp.int32
        np.testing.assert_array_equal(y, host(few, parts)[0])
        with pytest.raises(AssertionError):
            assert_ffn(host(few, parts, admit=~some)[0], expected[0], "float32")


def test_gradients_are_those_of_the_products():
    activation, (h, parts) = ACTIVATIONS["relu"], case("float32")

    def loss(ffn, h, parts):
        return jnp.sum(ffn(h, parts, activation=activation)[0] ** 2)

    found, expected = (jax.grad(partial(loss, ffn), argnums=(0, 1))(h, parts) for ffn in (pool_ffn, pool_ffn_products))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.abs(other).max() > 0.1


def float64_ffn(h, parts, activation):
    h, *ups, down = (np.asarray(array).astype(np.float64) for array in (h, *map(as_weights, parts)))
    first, *up = (h @ part.T for part in ups)
    keep = {"relu": first > 0, "fatrelu": first >= activation.threshold, "silu": 1 / (1 + np.exp(-first))}
    if activation.kind == "drelu":
        return (np.maximum(first, 0) * np.maximum(up[0], 0)) @ down
    return (first * keep[activation.kind] * (up[0] if up else 1)) @ down


@pytest.mark.parametrize("pool_type", TOLERANCE)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_reference_is_right(kind, pool_type):
    h, parts = case(pool_type)
    expected = float64_ffn(h, parts, ACTIVATIONS[kind])
    assert_ffn(pool_ffn_reference(h, parts, ACTIVATIONS[kind]), expected, "float32")


@pytest.mark.parametrize("pool_type", TOLERANCE)
@pytest.mark.parametrize("kind", ["relu", "fatrelu", "silu"])
def test_without_a_gate(kind, pool_type):
    """The activation is on up, and what it lets through is what is added up."""
    activation = ACTIVATIONS[kind]
    h, (_, *parts) = case(pool_type)
    y, live = jax.jit(partial(pool_ffn, activation=activation))(h, tuple(parts))
    expected = pool_ffn_reference(h, tuple(parts), activation)
    assert_ffn(expected, float64_ffn(h, parts, activation), "float32")
    assert_ffn(y, expected, pool_type)
    assert live.shape == (6, 24) and live.any() and not live[:, 5].any()
    for wrong in ((parts[1], parts[0]), tuple(part.at[3].set(0) for part in parts)):
        with pytest.raises(AssertionError):
            assert_ffn(pool_ffn(h, wrong, activation)[0], expected, pool_type)


def test_the_column_behind_a_row_is_its_bias():
    """Units of a model with FFN biases are wider: h has a one there, up the neuron's bias, down a zero."""
    rng = np.random.default_rng(0)
    h, up, down = rng.standard_normal((6, 16)), rng.standard_normal((24, 16)), rng.standard_normal((24, 16))
    bias = rng.standard_normal(24)
    wide = [np.zeros((rows, 48), np.float32) for rows in (6, 24, 24)]
    for array, narrow, column in zip(wide, (h, up, down), (1, bias, 0), strict=True):
        array[:, :16], array[:, 16] = narrow, column
    y, live = pool_ffn(jnp.asarray(wide[0]), tuple(map(jnp.asarray, wide[1:])), Activation())
    products = h @ up.T + bias
    assert_ffn(y[:, :16], np.maximum(products, 0) @ down, "float32")
    assert not y[:, 16:].any()
    np.testing.assert_array_equal(live, products > 0)


def test_combine():
    first, up = jnp.asarray([[-1.0, 2.0, 2.0, 0.25, 2.0]]), jnp.asarray([[3.0, -3.0, 3.0, 3.0, 0.0]])
    expected = {
        "relu": ([0, -6, 6, 0.75, 0], [0, 1, 1, 1, 1]),
        "fatrelu": ([0, -6, 6, 0, 0], [0, 1, 1, 0, 1]),
        "drelu": ([0, 0, 6, 0.75, 0], [0, 0, 1, 1, 0]),
    }
    for kind, (values, live) in expected.items():
        found = combine(first, up, ACTIVATIONS[kind])
        assert (found[0].tolist(), found[1].tolist()) == ([values], [[bool(flag) for flag in live]])
    values, live = combine(first, None, Activation())
    assert (values.tolist(), live.tolist()) == ([[0, 2, 2, 0.25, 2]], [[False, True, True, True, True]])
    values, live = combine(first, up, ACTIVATIONS["silu"])
    np.testing.assert_allclose(values, first / (1 + np.exp(-first)) * up, rtol=1e-6)
    assert live.all()


WRONG = {
    "gate and up swapped": lambda h, parts, act: pool_ffn(h, (parts[1], parts[0], parts[2]), act),
    "up and down swapped": lambda h, parts, act: pool_ffn(h, (parts[0], parts[2], parts[1]), act),
    "one slot lost": lambda h, parts, act: pool_ffn(h, tuple(part.at[3].set(0) for part in parts), act),
    "one slot twice": lambda h, parts, act: pool_ffn(h, tuple(jnp.concatenate([p, p[3:4]]) for p in parts), act),
    "a part moved by a slot": lambda h, parts, act: pool_ffn(h, (parts[0], jnp.roll(parts[1], 1, 0), parts[2]), act),
    "another row's input": lambda h, parts, act: pool_ffn(h[::-1], parts, act),
}


@pytest.mark.parametrize("pool_type", TOLERANCE)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("fault", WRONG)
def test_the_tolerance_notices(fault, kind, pool_type):
    if (fault, kind) == ("gate and up swapped", "drelu"):
        return  # the two are treated alike
    h, parts = case(pool_type)
    y, _ = WRONG[fault](h, parts, ACTIVATIONS[kind])
    with pytest.raises(AssertionError):
        assert_ffn(y, pool_ffn_reference(h, parts, ACTIVATIONS[kind]), pool_type)


@pytest.mark.parametrize("pool_type", TOLERANCE)
def test_the_tolerance_notices_another_activation(pool_type):
    h, parts = case(pool_type)
    found = {kind: pool_ffn(h, parts, activation)[0] for kind, activation in ACTIVATIONS.items()}
    for kind, activation in ACTIVATIONS.items():
        for other in found.keys() - {kind}:
            with pytest.raises(AssertionError):
                assert_ffn(found[other], pool_ffn_reference(h, parts, activation), pool_type)


def test_bits_are_not_numbers():
    """A uint16 pool read as integers would be far off, not merely imprecise."""
    part = as_pool(np.array([[1.0, -2.5]], np.float32), "uint16")
    assert part.tolist() == [[0x3F80, 0xC020]]
    assert as_weights(part).tolist() == [[1.0, -2.5]] and as_weights(part).dtype == jnp.bfloat16
    assert as_weights(jnp.ones(2, jnp.float16)).dtype == jnp.float16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activations(dtype):
    x = jnp.asarray([-3.0, -0.25, -0.0, 0.0, 0.25, 0.5, 0.75, 3.0], dtype)
    fat = activate(x, ACTIVATIONS["fatrelu"])
    assert fat.tolist() == [0, 0, 0, 0, 0, 0.5, 0.75, 3]  # from the threshold on, unshifted
    assert activate(x, ACTIVATIONS["relu"]).tolist() == [0, 0, 0, 0, 0.25, 0.5, 0.75, 3]
    wide = np.asarray(x).astype(np.float64)
    silu = np.asarray(activate(x, ACTIVATIONS["silu"])).astype(np.float64)
    np.testing.assert_allclose(silu, wide / (1 + np.exp(-wide)), rtol=TOLERANCE[dtype])
    assert fat.dtype == x.dtype
    with pytest.raises(ValueError, match="gelu"):
        activate(x, Activation(kind="gelu"))


PAIRS = [  # host type, pool type: all that the engine allows
    ("float32", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("bfloat16", "uint16"),
]


def rows_of(host_type, count=4, width=1, seed=0):
    kind = ml_dtypes.bfloat16 if host_type == "bfloat16" else np.dtype(host_type)
    return np.random.default_rng(seed).standard_normal((count, 3, width, 8)).astype(kind)


def pool_of(pool_type, slots=10, width=1):
    drawn = np.random.default_rng(9).standard_normal((3, slots * width, 8)).astype(np.float32)
    return tuple(as_pool(part, pool_type) for part in drawn)


@pytest.mark.parametrize(("host_type", "pool_type"), PAIRS)
@pytest.mark.parametrize("compiled", [False, True])
def test_write_slots(host_type, pool_type, compiled):
    rows, pool = rows_of(host_type), pool_of(pool_type)
    slots = np.array([7, 0, 9, 4], np.int32)
    run = jax.jit(write_slots) if compiled else write_slots
    written, fence = run(pool, jnp.asarray(rows), jnp.asarray(slots))
    same_type = rows.view(np.uint16) if pool_type == "uint16" else rows.astype(pool_type)
    expected = write_slots_reference(pool, same_type, slots)
    for found, part in zip(written, expected, strict=True):
        assert found.dtype == jnp.dtype(pool_type)
        np.testing.assert_array_equal(found, part)
    assert fence.tolist() == [7]
    with pytest.raises(AssertionError):  # the reference depends on which row goes where
        np.testing.assert_array_equal(written[0], write_slots_reference(pool, same_type, slots[::-1])[0])
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(written[1], written[0])


@pytest.mark.parametrize("width", [1, 3])
def test_write_slots_of_any_width(width):
    """NumPy, row by row; a unit's W rows lie side by side in each part."""
    rows, pool = rows_of("float32", count=3, width=width), pool_of("float32", width=width)
    slots = np.array([8, 2, 5], np.int32)
    expected = [np.array(part) for part in pool]
    for index, slot in enumerate(slots):
        for part in range(3):
            for row in range(width):
                expected[part][slot * width + row] = rows[index, part, row]
    written, _ = write_slots(pool, jnp.asarray(rows), jnp.asarray(slots))
    for found, part in zip(written, expected, strict=True):
        np.testing.assert_array_equal(found, part)


def test_numbers_survive_the_conversion():
    """Every 16-bit number is a float32; the way to uint16 keeps the bits, a NaN's too.

    Compiled as for users: the emitters that most tests do without (tests/conftest.py) keep a NaN's bits, others not.
    """
    usual = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters=false" in os.environ.get("XLA_FLAGS", "") else {}
    write = jax.jit(write_slots, compiler_options=usual)
    bits = np.arange(0, 2**16, dtype=np.uint16).reshape(-1, 1, 1, 8)
    rows = np.broadcast_to(bits, (bits.shape[0], 3, 1, 8)).copy()
    slots = jnp.arange(len(rows), dtype=jnp.int32)
    pool = tuple(jnp.zeros((len(rows), 8), jnp.uint16) for _ in range(3))
    (found, _, _), _ = write(pool, jnp.asarray(rows.view(ml_dtypes.bfloat16)), slots)
    np.testing.assert_array_equal(np.asarray(found).ravel(), np.arange(2**16))
    wide = tuple(jnp.zeros((len(rows), 8), jnp.float32) for _ in range(3))
    (found, _, _), _ = write(wide, jnp.asarray(rows.view(np.float16)), slots)
    np.testing.assert_array_equal(np.asarray(found), rows[:, 0, 0].view(np.float16).astype(np.float32))
