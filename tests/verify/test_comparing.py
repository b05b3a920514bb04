"""How far is too far: errors of hidden states and logits, and weights one by one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from dynajax.config import Activation
from dynajax.sim.experts.shapes import MIXTURES as SIM_SHAPES
from dynajax.testing import TINY, TINY_TIED
from dynajax.verify.comparing import TOLERANCES, allowed_error, cosines, hidden_errors, jumps, logits_error
from dynajax.verify.weights import FLUSHED, QUANTISED_TOLERANCE, differing, slack

KINDS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
HELD = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


# --- hidden states and logits -------------------------------------------------------------------------------------


def test_the_worst_position_counts_or_the_middle_one():
    wanted = np.ones((3, 4))
    got = wanted * [[1.0], [1.5], [1.01]]
    assert hidden_errors([got, wanted], [wanted, wanted], middle=False) == [0.5, 0.0]
    assert hidden_errors([got], [wanted], middle=True) == [pytest.approx(0.01)]
    assert logits_error(got, 2 * wanted, middle=False) == 0.5
    assert logits_error(got, wanted, middle=True) == pytest.approx(0.01)


def test_a_scaled_state_is_off_although_its_cosine_is_one():
    wanted = np.random.default_rng(0).standard_normal((5, 8))
    assert cosines([1.01 * wanted], [wanted]) == [pytest.approx(1)]
    assert hidden_errors([1.01 * wanted], [wanted], middle=False) == [pytest.approx(0.01)]
    assert cosines([wanted, -wanted], [wanted, wanted]) == pytest.approx([1, -1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("middle", [False, True])
def test_what_is_not_finite_is_infinitely_far(bad, middle):
    wanted = np.ones((3, 2), np.float32)
    got = wanted.copy()
    got[1, 1] = bad
    assert hidden_errors([got], [wanted], middle=middle) == [np.inf]
    assert logits_error(got, wanted, middle=middle) == np.inf
    assert cosines([got], [wanted]) == [-1]


def test_a_layer_that_reads_only_zeros_is_right_if_they_are_zeros():
    zeros = np.zeros((2, 4), np.float32)
    assert hidden_errors([zeros, zeros + 1], [zeros, zeros], middle=False) == [0.0, pytest.approx(2e30)]


def checkpoint(units, rest="F32", spec=TINY):
    """As much of a checkpoint as says of what types its tensors are."""
    parts = {"q": rest, "norm": rest, "head": rest, "embed": rest if spec.tied else units, "gate": units, "down": units}
    return cast(
        "Any", SimpleNamespace(spec=spec, tensors={(p, None): SimpleNamespace(dtype=d) for p, d in parts.items()})
    )


@pytest.mark.parametrize(
    ("dtype", "host", "units", "allowed"),
    [
        ("float32", "float32", "F32", "float32"),
        ("float32", "float16", "F16", "float32"),  # nothing is rounded
        ("float32", "bfloat16", "BF16", "float32"),
        ("float32", "bfloat16", "F16", "bfloat16"),
        ("float32", "float16", "F32", "float16"),
        ("float32", "float16", "Q4_1", "float16"),
        ("float32", "float32", "Q4_1", "float32"),
        ("float16", "float16", "F16", "float16"),
        ("bfloat16", "bfloat16", "BF16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("spec", [TINY, TINY_TIED])
def test_what_rounds_decides_what_is_allowed(dtype, host, units, allowed, spec):
    model = checkpoint(units, spec=spec)
    assert allowed_error(dtype, host, model, model, None) == TOLERANCES[allowed]


@pytest.mark.parametrize(
    ("mine", "theirs", "tolerance", "allowed"),
    [
        ("F32", "F32", None, 1e-4),
        ("F16", "F32", None, 0.02),
        ("F32", "F16", None, 0.02),
        ("F16", "BF16", None, 0.1),
        ("F16", "Q4_1", None, 0.1),
        ("F32", "F32", 0.01, 0.1),
        ("F16", "Q4_1", 0.001, 0.1),
    ],
)
def test_another_copy_may_be_a_rounding_of_the_same_weights(mine, theirs, tolerance, allowed):
    assert allowed_error("float32", "float32", checkpoint(mine), checkpoint(theirs), tolerance) == allowed


def test_only_a_threshold_or_a_router_and_16_bits_make_a_position_jump():
    fatrelu, experts = replace(TINY, activation=Activation(kind="fatrelu", threshold=0.01)), SIM_SHAPES["tiny-moe"]
    for spec in (fatrelu, experts):
        assert jumps(spec, TOLERANCES["bfloat16"]) and not jumps(spec, TOLERANCES["float32"])
    for kind in ("relu", "silu", "drelu", "fatrelu"):
        assert not jumps(replace(TINY, activation=Activation(kind=kind)), TOLERANCES["bfloat16"])


# --- weights ------------------------------------------------------------------------------------------------------


def weights(shape=(64, 96), spread=2.0, seed=0):
    """Values of very different sizes, as trained weights are; some below what float16 resolves."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10 ** rng.normal(-2, spread, shape)).clip(-6e4, 6e4).astype(np.float32)


def rounded(values, kind):
    return values.astype(KINDS[kind]).astype(np.float32)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("mine", KINDS)
def test_two_roundings_of_one_weight_are_the_same_and_twice_as_far_is_not(mine, theirs, held):
    for seed in range(5):
        truth, type_ = weights(seed=seed), KINDS[HELD[held]]
        engine, wanted = (rounded(truth, kind).astype(type_) for kind in (mine, theirs))
        relative, absolute = slack(mine, theirs, held)
        assert differing(engine, wanted, relative, absolute, None) == (0, 0.0)
        worst = max({mine, theirs, HELD[held]}, key=lambda kind: slack(kind, "", "")[0])
        last_digit = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}[worst]
        engine[3, 4], wanted[3, 4] = 1 + 6 * last_digit, 1
        assert differing(engine, wanted, relative, absolute, None)[0] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_bit_is_found_where_nothing_was_rounded(kind):
    wanted = rounded(weights(), kind).astype(KINDS[kind])
    wanted[5, 7] = 0.01
    bits = np.dtype(f"u{wanted.itemsize}")
    for bit in range(8 * wanted.itemsize):
        held = wanted.copy()
        held.view(bits)[5, 7] ^= bits.type(1 << bit)
        count, error = differing(held, wanted, *slack(kind, kind, next(t for t, k in HELD.items() if k == kind)), None)
        assert count == 1 and error > 0, bit


@pytest.mark.parametrize("held", HELD)
def test_a_flipped_exponent_is_found_between_types(held):
    truth = weights((576, 576), spread=0.1)
    mine, theirs = truth.astype(np.float16), rounded(truth, "BF16")
    relative, absolute = slack("F16", "BF16", held)
    for bit in range(10, 14):
        damaged = mine.copy()
        damaged.view(np.uint16)[100, 200] ^= np.uint16(1 << bit)
        engine, wanted = damaged.astype(KINDS[HELD[held]]), theirs.astype(KINDS[HELD[held]])
        assert differing(engine, wanted, relative, absolute, None)[0] == 1, bit


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_what_is_not_finite_is_off(bad, tolerance):
    wanted = weights()
    held = wanted.copy()
    held[0, 0] = bad
    assert differing(held, wanted, 1.0, 1.0, tolerance) == (1, np.inf)


def test_numbers_that_a_device_may_flush_are_forgiven_and_larger_ones_are_not():
    wanted = np.full(8, 1e-39, np.float32)
    assert differing(np.zeros(8, np.float32), wanted, *slack("BF16", "BF16", "bfloat16"), None) == (0, 0.0)
    assert differing(np.zeros(8, np.float32), 2 * wanted + FLUSHED, 0.0, FLUSHED, None) == (8, 1.0)


def test_the_error_is_of_the_whole_tensor():
    wanted = np.array([3.0, 4.0], np.float32)
    assert differing(np.array([3.0, 4.5], np.float32), wanted, 0.0, 0.0, None) == (1, pytest.approx(0.1))
    assert differing(np.array([1.0, 0.0], np.float32), 0 * wanted, 0.0, 0.0, None) == (1, 1.0)


def quantised(values, kind):
    chosen = GGMLQuantizationType[kind]
    return dequantize(quantize(values, chosen), chosen)


@pytest.mark.parametrize(("kind", "tolerance"), [("Q8_0", QUANTISED_TOLERANCE), ("Q5_1", 0.1), ("Q4_0", 0.2)])
def test_quantisation_is_forgiven_within_the_tolerance_and_damage_is_not(kind, tolerance):
    truth = np.random.default_rng(1).standard_t(5, (256, 512)).astype(np.float32)  # tails as heavy as trained ones
    copy = quantised(truth, kind)
    held, theirs = truth.astype(np.float16), copy.astype(np.float16)
    limits = slack("F16", kind, "float16")
    assert differing(held, theirs, *limits, None)[0] > 1000
    assert differing(held, theirs, *limits, tolerance) == (0, 0.0)
    count, error = differing(held, theirs, *limits, tolerance / 8)
    assert count > 1000 and tolerance / 8 < error < tolerance
    held[7, 7] += np.float16(64 * 1.5 * tolerance)  # one value of 131,072
    assert differing(held, theirs, *limits, tolerance)[0] > 1000


def test_a_copy_on_the_same_grid_is_told_from_damage_to_the_last_value():
    """A folder made from a quantised file holds its values, rounded."""
    file = quantised(weights((256, 512), spread=0.1), "Q4_1")
    folder = file.astype(np.float16)
    limits = slack("F16", "Q4_1", "float16")
    assert differing(folder, file.astype(np.float16), *limits, QUANTISED_TOLERANCE) == (0, 0.0)
    folder[9, 9] *= 2
    assert differing(folder, file.astype(np.float16), *limits, QUANTISED_TOLERANCE)[0] == 1
