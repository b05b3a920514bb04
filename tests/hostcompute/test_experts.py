"""Units that rows are routed to, with weights: every kernel against the reference."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostcompute import HostPool, NumpyPool, ffn_reference
from tests.hostcompute.cases import DTYPES, ISAS, TYPES, Case, admitting, cases, check, make_case, routed

PROPERTY = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, print_blob=True
)
KINDS = [("relu", 2), ("relu", 3), ("fatrelu", 3), ("silu", 2), ("silu", 3), ("drelu", 3)]


def case_of(
    activation: str = "silu",
    parts: int = 3,
    *,
    batch: int = 8,
    top_k: int = 2,
    shape: tuple[int, int] = (75, 72),  # of a part: several blocks for each of two threads
    dtype: type = np.float32,
) -> Case:
    case = make_case(
        batch,
        batch=batch,
        shape=(9, parts, *shape),
        count=8,
        dtype=dtype,
        activation=activation,
        threshold=0.5 if activation == "fatrelu" else 0.0,
    )
    return routed(case, top_k)


@pytest.fixture(params=[*ISAS, "numpy"])
def each(request: pytest.FixtureRequest, pool_of: Callable[[str, int], HostPool]) -> HostPool | NumpyPool:
    return NumpyPool(2) if request.param == "numpy" else pool_of(request.param, 2)


@st.composite
def routed_cases(draw: st.DrawFn) -> Case:
    """What `cases` draws, with any share of the pairs routed, and sometimes not admitted."""
    case = draw(cases())
    return routed(case, draw(st.sampled_from([0, 1, 2, 1000])), draw(st.integers(0, 2**32 - 1)))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
@PROPERTY
@given(case=routed_cases(), skip_zeros=st.booleans())
def test_native_pool_equals_the_reference(pool_of, isa, threads, case, skip_zeros):
    check(pool_of(isa, threads), case, skip_zeros=skip_zeros)


@PROPERTY
@given(case=routed_cases(), skip_zeros=st.booleans())
def test_numpy_pool_equals_the_reference(case, skip_zeros):
    check(NumpyPool(1), case, skip_zeros=skip_zeros)


@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 40])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("activation", "parts"), KINDS)
def test_experts_of_every_form(each, dtype, activation, parts, batch, skip_zeros):
    check(each, case_of(activation, parts, batch=batch, dtype=dtype), skip_zeros=skip_zeros)


@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu", "drelu"])
@pytest.mark.parametrize("shape", [(1, 33), (2, 1), (3, 16), (7, 129), (130, 65), (300, 17)])
def test_widths_that_fit_no_vector(each, shape, activation, skip_zeros):
    for batch in (1, 3, 21):
        check(each, case_of(activation, batch=batch, shape=shape), skip_zeros=skip_zeros)


@pytest.mark.parametrize("tokens", [*range(1, 16), 100])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_every_number_of_rows_for_one_expert(each, activation, tokens):
    """All rows want the same one, and nobody another; the first row wants nothing."""
    case = case_of(activation, batch=tokens + 1)
    case.weights[...] = 0
    case.weights[1:, 5] = np.linspace(-1, 2, tokens) + 0.01
    for skip_zeros in (True, False):
        check(each, case, skip_zeros=skip_zeros)


def test_equal_rows_get_equal_answers(each):
    case = case_of("silu", batch=6)
    case.x[...] = case.x[0]
    case.weights[...] = case.weights[0]
    check(each, case, skip_zeros=True)
    y = each.ffn(case.x, case.bundle, case.units, **case.kind, weights=case.weights).y
    np.testing.assert_allclose(y, y[:1].repeat(6, axis=0), rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_row_does_not_depend_on_its_company(each, activation):
    case = case_of(activation, batch=30)
    together = each.ffn(case.x, case.bundle, case.units, **case.kind, weights=case.weights)
    for row in range(30):
        one = slice(row, row + 1)
        alone = each.ffn(case.x[one], case.bundle, case.units, **case.kind, weights=case.weights[one])
        np.testing.assert_allclose(alone.y[0], together.y[row], rtol=0, atol=case.tolerance())
        assert alone.live_count[0] == together.live_count[row]


@pytest.mark.parametrize("batch", [1, 2, 20])
@pytest.mark.parametrize("activation", ["relu", "silu", "drelu"])
@pytest.mark.parametrize("skip_zeros", [True, False])
def test_what_nobody_wants_is_never_read(each, batch, activation, skip_zeros):
    """Nor what a row wants and does not admit; and a row takes nothing from a unit that only others want."""
    case = replace(case_of(activation, batch=batch, top_k=3), units=np.arange(8, dtype=np.int32))
    case = admitting(case, 0.7)
    case.weights[0, 3], case.weights[1:, 3] = 1, 0
    case.admit[:, 3] = 1
    nobody = ~((case.weights != 0) & (case.admit != 0)).any(axis=0)
    case.bundle[:8][nobody] = np.nan
    case.bundle[3] = np.nan
    options = {"admit": case.admit, "weights": case.weights, "skip_zeros": skip_zeros}
    y = each.ffn(case.x, case.bundle, case.units, **case.kind, **options).y
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


@pytest.mark.parametrize("batch", [1, 5])
def test_a_weight_that_is_no_number_shows(each, batch):
    case = case_of("silu", batch=batch)
    case.weights[0, 0] = np.nan
    y = each.ffn(case.x, case.bundle, case.units, **case.kind, weights=case.weights).y
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


@pytest.mark.parametrize("batch", [1, 2, 20])
@pytest.mark.parametrize("fault", ["no weights", "one weight", "rows swapped", "units swapped", "parts swapped"])
def test_the_comparison_notices_other_weights(each, batch, fault):
    case = case_of("silu", batch=batch, top_k=3)
    wanted, _ = case.reference()
    wrong = replace(case, weights=case.weights.copy())
    if fault == "no weights":
        wrong.weights[...] = 1
    elif fault == "one weight":
        wrong.weights[-1, np.abs(case.weights[-1]).argmax()] *= 1.01
    elif fault == "rows swapped":
        wrong = replace(wrong, weights=np.ascontiguousarray(case.weights[::-1, ::-1]))
    elif fault == "units swapped":
        wrong = replace(wrong, units=np.roll(case.units, 1))
    else:
        wrong = replace(wrong, bundle=np.ascontiguousarray(case.bundle[:, [0, 2, 1]]))
    y = each.ffn(wrong.x, wrong.bundle, wrong.units, **wrong.kind, weights=wrong.weights).y
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("batch", [1, 2, 40])
def test_zeros_of_relu_are_skipped(each, batch):
    """Half of the neurons are dead for each row; those that are dead for all are not read."""
    case = case_of("relu", batch=batch)
    results = [
        each.ffn(case.x, case.bundle, case.units, **case.kind, weights=case.weights, skip_zeros=skip)
        for skip in (True, False)
    ]
    np.testing.assert_allclose(results[0].y, results[1].y, rtol=0, atol=case.tolerance())
    np.testing.assert_array_equal(results[0].live_count, results[1].live_count)
    wanted = int((case.weights != 0).any(axis=0).sum())
    assert results[1].bytes_read == wanted * case.bundle[0].nbytes
    assert results[0].bytes_read < results[1].bytes_read or batch > 2


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 4, 30])
def test_equal_calls_give_equal_bits(threads, batch):
    case = case_of("silu", batch=batch)
    case = replace(case, x=np.random.default_rng(0).standard_normal(case.x.shape).astype(np.float32))
    answers = set()
    for _ in range(2):
        with HostPool(threads) as pool:
            for _ in range(3):
                answers.add(pool.ffn(case.x, case.bundle, case.units, **case.kind, weights=case.weights).y.tobytes())
    assert len(answers) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 4, 13])
@pytest.mark.parametrize("width", [2048, 5003])
def test_real_sizes_stay_within_a_few_parts_in_a_million(each, width, batch, dtype):
    """Rows longer than what a tile handles at a time."""
    rng = np.random.default_rng(1)
    bundle = (rng.standard_normal((3, 3, 90, width), np.float32) / 40).astype(dtype)
    x, units = rng.standard_normal((batch, width), np.float32), np.array([2, 0], np.int32)
    weights = rng.uniform(0.1, 1, (batch, 2)).astype(np.float32)
    wanted, _ = ffn_reference(x, bundle, units, "silu", weights=weights)
    for skip_zeros in (True, False):
        y = each.ffn(x, bundle, units, activation="silu", weights=weights, skip_zeros=skip_zeros).y
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    y = each.ffn(x, np.roll(bundle, 1, axis=3), units, activation="silu", weights=weights).y
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_the_answer_may_overwrite_the_input(each):
    case = case_of("silu", batch=9)
    wanted, _ = case.reference()
    x = case.x.copy()
    assert each.ffn(x, case.bundle, case.units, **case.kind, weights=case.weights, out=x).y is x
    np.testing.assert_allclose(x, wanted, rtol=0, atol=case.tolerance())


def test_no_rows_no_units_and_nothing_wanted(each):
    for batch, count in ((0, 5), (2, 0), (3, 5)):
        case = make_case(6, batch=batch, shape=(5, 3, 4, 30), count=count)
        result = each.ffn(case.x, case.bundle, case.units, **case.kind, weights=np.zeros((batch, count), np.float32))
        assert result.y.shape == (batch, 30) and not result.y.any()
        assert result.live_count.tolist() == [0] * batch and result.bytes_read == 0


def test_many_rows_are_added_up_by_all_threads():
    case = case_of("silu", batch=150, shape=(20, 300))
    with HostPool(3) as pool:
        check(pool, case, skip_zeros=True)
