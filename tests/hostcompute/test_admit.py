"""Units that a row does not admit, and the values of neurons: every kernel against the reference."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hostcompute import HostPool, NumpyPool
from hostcompute.reference import values_reference
from tests.hostcompute.cases import ISAS, TYPES, Case, admitting, check, make_case

KINDS = [("relu", 2), ("relu", 3), ("fatrelu", 3), ("silu", 2), ("silu", 3), ("drelu", 3)]


def case_of(activation: str, parts: int, *, batch: int, share: float = 0.3, dtype: type = np.float32) -> Case:
    """Several blocks a thread."""
    case = make_case(
        batch,
        batch=batch,
        shape=(310, parts, 1, 72),
        count=300,
        dtype=dtype,
        activation=activation,
        threshold=0.5 if activation == "fatrelu" else 0.0,
    )
    return admitting(case, share)


@pytest.fixture(params=[*ISAS, "numpy"])
def each(request: pytest.FixtureRequest, pool_of: Callable[[str, int], HostPool]) -> HostPool | NumpyPool:
    return NumpyPool(2) if request.param == "numpy" else pool_of(request.param, 2)


@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("activation", "parts"), KINDS)
def test_admission_and_values_equal_the_reference(each, dtype, activation, parts, batch, skip_zeros):
    check(each, case_of(activation, parts, batch=batch, dtype=dtype), skip_zeros=skip_zeros)


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("activation", ["relu", "silu", "drelu"])
def test_an_expert_is_admitted_whole(each, activation, batch):
    case = make_case(3, batch=batch, shape=(40, 3, 5, 24), count=30, activation=activation)
    for skip_zeros in (True, False):
        check(each, admitting(case, 0.4), skip_zeros=skip_zeros)


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize(("activation", "parts"), KINDS)
@pytest.mark.parametrize("fault", ["all admitted", "one mark", "rows swapped"])
def test_the_comparison_notices_other_marks(each, activation, parts, batch, fault):
    case = case_of(activation, parts, batch=batch)
    marks = np.ones_like(case.admit) if fault == "all admitted" else case.admit.copy()
    if fault == "one mark":
        h, _ = values_reference(case.x, case.bundle, case.units, activation, case.threshold)
        marks[-1, np.argmax(np.abs(h[-1, :, 0]) * (marks[-1] == 0))] = 1
    elif fault == "rows swapped":
        marks = np.ascontiguousarray(marks[:, ::-1] if batch == 1 else marks[::-1])
    wanted, live = case.reference()
    h, _ = values_reference(case.x, case.bundle, case.units, activation, case.threshold, case.admit)
    found, values = np.empty(live.shape, np.uint8), np.empty(live.shape, np.float32)
    y = each.ffn(case.x, case.bundle, case.units, **case.kind, admit=marks, live=found, values=values).y
    for given, right in ((y, wanted), (found, live), (values, h[:, :, 0])):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(given, right, rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("activation", ["relu", "silu", "drelu"])
def test_marks_of_ones_and_null_pointers_give_equal_bits(pool, activation, batch):
    case = make_case(5, batch=batch, shape=(300, 3, 1, 50), count=280, activation=activation)
    values = np.empty((batch, 280), np.float32)
    plain = pool.ffn(case.x, case.bundle, case.units, **case.kind, skip_zeros=False)
    full = pool.ffn(
        case.x,
        case.bundle,
        case.units,
        **case.kind,
        skip_zeros=False,
        admit=np.ones((batch, 280), np.uint8),
        values=values,
    )
    np.testing.assert_array_equal(plain.y, full.y)
    np.testing.assert_array_equal(plain.live_count, full.live_count)
    assert plain.bytes_read == full.bytes_read and np.isfinite(values).all()


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("activation", ["relu", "silu", "drelu"])
def test_up_and_down_of_what_no_row_admits_are_not_read(each, activation, batch):
    """Nor does a row take anything from a unit that others admit, be its gate a number or not."""
    case = case_of(activation, 3, batch=batch, share=0.5)
    case = replace(case, units=np.arange(300, dtype=np.int32))
    nobody = ~case.admit.any(axis=0)
    nobody[:10], case.admit[:, :10] = True, 0
    case.bundle[:300][nobody, 1:] = np.nan
    case.bundle[11, 0], case.admit[:, 11] = np.nan, 0
    case.admit[0, 11] = 1
    values = np.empty((batch, 300), np.float32)
    y = each.ffn(case.x, case.bundle, case.units, **case.kind, admit=case.admit, values=values).y
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()
    assert np.isnan(values[0, 11]) and np.isfinite(np.delete(values, 11, axis=1)).all()


def test_no_rows_and_no_units(each):
    for batch, count in ((0, 20), (2, 0)):
        case = make_case(6, batch=batch, shape=(20, 3, 1, 30), count=count)
        admit, values = np.ones((batch, count), np.uint8), np.empty((batch, count), np.float32)
        y = each.ffn(case.x, case.bundle, case.units, **case.kind, admit=admit, values=values).y
        assert y.shape == (batch, 30) and not y.any()
