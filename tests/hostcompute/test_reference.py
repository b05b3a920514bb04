"""The reference itself, on numbers small enough to check by hand."""

import numpy as np
import pytest

from hostcompute import ffn_reference, gather_reference
from hostcompute.packed import row_type, row_values, unpack
from hostcompute.reference import activate, values_reference

X = np.array([[1, 2]], np.float32)
UNITS = np.array([1, 0], np.int32)
BUNDLE = np.array(
    [
        [[[1, 1]], [[2, 0]], [[1, 10]]],  # gate.x = 3, up.x = 2: adds 6 * down
        [[[1, -1]], [[5, 5]], [[7, 7]]],  # gate.x = -1
    ],
    np.float32,
)


def test_relu_keeps_what_is_positive():
    y, live = ffn_reference(X, BUNDLE, UNITS, "relu")
    assert y.tolist() == [[6, 60]]
    assert live.tolist() == [[False, True]]


def test_fatrelu_keeps_values_from_the_threshold_on_unshifted():
    assert activate(np.array([-1, 2.9, 3, 4]), "fatrelu", 3.0).tolist() == [0, 0, 3, 4]


def test_silu_of_a_hand_worked_value():
    y, live = ffn_reference(X, BUNDLE[:1], UNITS[1:], "silu")
    np.testing.assert_allclose(y, np.array([[6, 60]]) / (1 + np.exp(-3)))
    assert live.all()


def test_drelu_is_live_where_gate_and_up_are_positive():
    one = BUNDLE[:1]
    gates = np.array([1, 1, -1, -1], np.float32)  # times 3
    ups = np.array([1, -1, 1, -1], np.float32)  # times 2
    bundle = np.repeat(one, 4, axis=0)
    bundle[:, 0] *= gates[:, None, None]
    bundle[:, 1] *= ups[:, None, None]
    for unit, wanted in enumerate([[6, 60], [0, 0], [0, 0], [0, 0]]):
        y, live = ffn_reference(X, bundle, np.array([unit], np.int32), "drelu")
        assert y.tolist() == [wanted]
        assert live.tolist() == [[unit == 0]]


def test_drelu_needs_a_gate_and_an_up():
    with pytest.raises(ValueError, match=r"bundle must have 3 parts \(gate, up, down\) with drelu, got 2"):
        ffn_reference(X, np.ascontiguousarray(BUNDLE[:, 1:]), UNITS, "drelu")


def test_two_parts_have_no_gate():
    y, _ = ffn_reference(X, np.ascontiguousarray(BUNDLE[:, 1:]), UNITS, "relu")
    assert y.tolist() == [[2 * 1 + 15 * 7, 2 * 10 + 15 * 7]]


def test_a_unit_of_several_rows_is_live_if_one_of_them_is():
    both = BUNDLE.transpose(2, 1, 0, 3).copy()  # one unit of two rows
    y, live = ffn_reference(X, both, np.zeros(1, np.int32), "relu")
    assert y.tolist() == [[6, 60]]
    assert live.tolist() == [[True]]


def test_a_unit_named_twice_counts_twice():
    y, _ = ffn_reference(X, BUNDLE, np.array([0, 0], np.int32), "relu")
    assert y.tolist() == [[12, 120]]


def test_a_unit_that_a_row_does_not_admit_is_zero_for_it():
    admit = np.array([[7, 0], [0, 1]], np.uint8)
    y, live = ffn_reference(np.repeat(X, 2, axis=0), BUNDLE, UNITS, "silu", admit=admit)
    expected = np.array([-15 * np.array([7, 7]) / (1 + np.exp(1)), np.array([6, 60]) / (1 + np.exp(-3))])
    np.testing.assert_allclose(y, expected)
    assert live.tolist() == [[True, False], [False, True]]


def test_values_are_what_down_is_multiplied_with():
    for activation, wanted in (("relu", [[0], [6]]), ("drelu", [[0], [6]])):
        values, _ = values_reference(X, BUNDLE, UNITS, activation)
        assert values.tolist() == [wanted]


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation must be relu, fatrelu, silu or drelu, got 'gelu'"):
        ffn_reference(X, BUNDLE, UNITS, "gelu")


def test_gather_takes_units_in_order():
    np.testing.assert_array_equal(gather_reference(BUNDLE, UNITS), BUNDLE[::-1])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("name", "size"), [("int8", 34), ("int4", 18)])
def test_packed_rows_are_codes_then_scales(name, size, groups):
    """Value by value: byte j of a group holds columns j, j + n, ..., the first in its lowest bits."""
    bits, count = {"int8": 8, "int4": 4}[name], size - 2
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (2, 1, groups, size), np.uint8)
    raw = packed.reshape(2, groups * size)
    scales = rng.standard_normal((2, groups)).astype(np.float16)
    raw[:, groups * count :] = scales.view(np.uint8)
    wide = unpack(packed)
    assert (row_type(packed), row_values(packed), wide.shape) == (name, groups * 32, (2, 1, groups * 32))
    for row in range(2):
        for column in range(groups * 32):
            group, inside = divmod(column, 32)
            code = int(raw[row, group * count + inside % count]) >> (inside // count * bits) & (2**bits - 1)
            assert wide[row, 0, column] == (code - 2 ** (bits - 1)) * float(scales[row, group])
