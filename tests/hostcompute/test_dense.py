"""Experts by a library's matrix products: each of them against the reference, and what happens without one."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from hostcompute import HostPool, NumpyPool, blas, dense, library, onednn, open_pool
from hostcompute.ffi import HostTable
from tests.hostcompute.cases import DTYPES, TYPES, Case, admitting, make_case, routed

KINDS = [("relu", 2), ("relu", 3), ("fatrelu", 3), ("silu", 2), ("silu", 3), ("drelu", 3)]


def available(name: str) -> str:
    if (reason := dense.unavailable(name)) is not None:
        pytest.skip(f"no {name}: {reason}")
    return name


@pytest.fixture(scope="module", params=["own", "blas", "onednn"])
def each(request: pytest.FixtureRequest) -> Iterator[HostPool]:
    with HostPool(2, available(request.param)) as pool:
        yield pool


@pytest.fixture(params=["blas", "onednn"])
def products(request: pytest.FixtureRequest) -> dense.Products:
    opened = dense.open_products(available(request.param), 2)
    assert opened is not None
    return opened


def case_of(activation: str = "silu", parts: int = 3, *, batch: int = 9, inner: int = 19, **options) -> Case:
    threshold = 0.5 if activation == "fatrelu" else 0.0
    case = make_case(
        1, batch=batch, shape=(7, parts, inner, 33), count=6, activation=activation, threshold=threshold, **options
    )
    return routed(case, 3)


def run(pool: HostPool | NumpyPool, case: Case, **options):
    return pool.ffn(case.x, case.bundle, case.units, **case.kind, admit=case.admit, weights=case.weights, **options)


@pytest.mark.parametrize("batch", [1, 2, 9, 70])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("activation", "parts"), KINDS)
def test_it_equals_the_reference(each, dtype, activation, parts, batch):
    case = case_of(activation, parts, batch=batch, dtype=dtype)
    for one in (case, admitting(case, 0.6)):
        wanted, live = one.reference()
        marks, out = np.full(live.shape, 7, np.uint8), np.full(case.x.shape, np.nan, np.float32)
        result = run(each, one, live=marks, out=out, skip_zeros=False)
        assert result.y is out
        np.testing.assert_allclose(out, wanted, rtol=0, atol=one.tolerance())
        np.testing.assert_array_equal(marks, live)
        np.testing.assert_array_equal(result.live_count, one.live_count())
        pairs = one.weights != 0 if one.admit is None else (one.weights != 0) & (one.admit != 0)
        assert result.bytes_read == pairs.any(axis=0).sum() * case.bundle[0].nbytes


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("fault", ["weights", "parts", "units"])
def test_the_comparison_notices_another_operand(each, batch, fault):
    case = case_of(batch=batch)
    wrong = {
        "weights": replace(case, weights=np.ascontiguousarray(case.weights[:, ::-1])),
        "parts": replace(case, bundle=np.ascontiguousarray(case.bundle[:, [0, 2, 1]])),
        "units": replace(case, units=np.roll(case.units, 1)),
    }[fault]
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(run(each, wrong).y, case.reference()[0], rtol=0, atol=case.tolerance())


def test_zeros_of_relu_change_nothing(each):
    """They are skipped by the own tiles only."""
    case = case_of("relu", batch=1)
    answers = [run(each, case, skip_zeros=skip) for skip in (True, False)]
    np.testing.assert_allclose(answers[0].y, answers[1].y, rtol=0, atol=case.tolerance())
    np.testing.assert_array_equal(answers[0].live_count, answers[1].live_count)
    assert (answers[0].bytes_read < answers[1].bytes_read) == (each.dense == "own")


def test_what_nobody_wants_is_never_read(each):
    case = replace(case_of(batch=4), units=np.arange(6, dtype=np.int32))
    case.weights[:, 2], case.weights[1:, 3], case.weights[0, 3] = 0, 0, 1
    case.bundle[2:4] = np.nan
    case.bundle[6] = np.nan
    y = run(each, case).y
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


def test_values_of_units_of_one_row(each):
    case = case_of("relu", inner=1)
    marks = np.full(case.weights.shape, np.nan, np.float32)
    run(each, case, values=marks)
    own = np.empty_like(marks)
    run(NumpyPool(1), case, values=own)
    np.testing.assert_allclose(marks, own, rtol=1e-5, atol=1e-6)


def test_neurons_are_computed_as_ever(each, pool):
    """Without weights the choice changes nothing."""
    case = make_case(3, batch=3, shape=(50, 3, 1, 24), count=40)
    answers = [one.ffn(case.x, case.bundle, case.units, **case.kind) for one in (each, pool)]
    np.testing.assert_array_equal(answers[0].y, answers[1].y)
    assert answers[0].bytes_read == answers[1].bytes_read


def test_no_rows_no_units_and_nothing_wanted(each):
    for batch, count in ((0, 5), (2, 0), (3, 5)):
        case = make_case(6, batch=batch, shape=(5, 3, 4, 30), count=count)
        result = run(each, replace(case, weights=np.zeros((batch, count), np.float32)))
        assert result.y.shape == (batch, 30) and not result.y.any()
        assert result.live_count.tolist() == [0] * batch and result.bytes_read == 0


def test_a_unit_out_of_range_is_named(each):
    case = case_of()
    case.units[2] = 7
    with pytest.raises(ValueError, match=r"units must be in \[0, 7\), got 7 at index 2"):
        run(each, case)


def test_the_answer_may_overwrite_the_input(each):
    case = case_of()
    wanted, _ = case.reference()
    assert run(each, case, out=case.x).y is case.x
    np.testing.assert_allclose(case.x, wanted, rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 17, 150])
def test_products_equal_those_of_float64(products, dtype, rows):
    """Several pieces of a matrix, and rows that are padded."""
    rng = np.random.default_rng(rows)
    x, matrix = (
        rng.standard_normal((rows, 1500), np.float32),
        rng.standard_normal((400, 1500), np.float32).astype(dtype),
    )
    h = rng.standard_normal((rows, 400), np.float32)
    wide = matrix.astype(np.float64)
    np.testing.assert_allclose(products.dot_rows(x, matrix), x @ wide.T, rtol=0, atol=2e-3)
    np.testing.assert_allclose(products.sum_rows(h, matrix), h @ wide, rtol=0, atol=1e-3)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(products.dot_rows(x, matrix[::-1].copy()), x @ wide.T, rtol=0, atol=2e-3)


def test_blas_leaves_the_number_of_threads_as_it_was():
    available("blas")
    functions = blas._threads_functions()
    assert functions is not None
    before = functions[0]()
    opened = blas.open_products(2)
    seen = []
    opened._get, opened._set = functions[0], lambda threads: (seen.append(threads), functions[1](threads))
    opened.dot_rows(np.ones((2, 3), np.float32), np.ones((4, 3), np.float32))
    assert seen == [1, before] and functions[0]() == before


def test_rows_are_padded_to_few_numbers():
    assert [onednn.padded(n) for n in (1, 4, 5, 16, 17, 128, 129, 500)] == [1, 4, 8, 16, 32, 128, 192, 512]


@pytest.mark.parametrize("open_it", [HostPool, NumpyPool, open_pool])
def test_an_unknown_name_is_refused(open_it: Callable):
    with pytest.raises(ValueError, match="dense must be one of own, blas, onednn, got 'mkl'"):
        open_it(1, "mkl")


@pytest.mark.parametrize("open_it", [HostPool, NumpyPool, open_pool])
@pytest.mark.parametrize("name", ["blas", "onednn"])
def test_what_is_missing_is_refused_with_the_remedy(monkeypatch, caplog, open_it, name):
    """And nothing else is taken in its place."""
    module = dense.LIBRARIES[name]
    monkeypatch.setattr(module, "unavailable", lambda: "it is not there")
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError) as caught:
        open_it(1, name)
    assert str(caught.value) == f"dense={name!r} cannot be used here: it is not there; {module.REMEDY}, or use 'own'"
    assert not caplog.records


def test_without_the_package_onednn_says_so(monkeypatch):
    def missing(name):
        raise onednn.PackageNotFoundError(name)

    monkeypatch.setattr(onednn, "distribution", missing)
    monkeypatch.setattr(onednn, "_load", onednn._load.__wrapped__)
    assert onednn.unavailable.__wrapped__() == "the package onednn is not installed"


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "libodd.so").write_text("not a library")
    with pytest.raises(RuntimeError, match=r"libodd\.so cannot be loaded: .*libodd\.so"):
        onednn.load_beside(tmp_path, "libodd.so")
    with pytest.raises(RuntimeError, match=r"libnone\.so cannot be loaded: .*No such file"):
        onednn.load_beside(tmp_path, "libnone.so")


def test_a_blas_of_unknown_make_is_not_used(monkeypatch):
    monkeypatch.setattr(blas, "_threads_functions", lambda: None)
    assert blas.unavailable.__wrapped__() == "NumPy does not use the OpenBLAS of its wheel"


@pytest.mark.parametrize("name", ["own", "blas"])
def test_the_pool_without_a_compiler_takes_it_too(monkeypatch, name):
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    case = case_of()
    with open_pool(1, available(name)) as pool:
        assert isinstance(pool, NumpyPool) and pool.dense == name
        np.testing.assert_allclose(run(pool, case).y, case.reference()[0], rtol=0, atol=case.tolerance())


def test_programs_compute_experts_with_the_own_tiles_only():
    available("blas")
    case = case_of()
    with HostPool(1, "blas") as pool:
        with pytest.raises(ValueError, match="pool must have dense 'own' to compute experts in programs, got 'blas'"):
            HostTable(1).attach(pool, [case.bundle], [case.units], activation="silu")
        neurons = make_case(3, batch=3, shape=(5, 3, 1, 24), count=4)
        HostTable(1).attach(pool, [neurons.bundle], [neurons.units], activation="relu")
