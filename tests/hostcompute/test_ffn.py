"""The kernels of every instruction set, and the NumPy pool, against the reference."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostcompute import HostPool, NumpyPool
from tests.hostcompute.cases import DTYPES, ISAS, TYPES, Case, cases, check, make_case, pack_random

PROPERTY = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, print_blob=True
)
MODES = st.sampled_from([True, False])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
@PROPERTY
@given(case=cases(), skip_zeros=MODES)
def test_native_pool_equals_the_reference(pool_of, isa, threads, case, skip_zeros):
    check(pool_of(isa, threads), case, skip_zeros=skip_zeros)


@PROPERTY
@given(case=cases(), skip_zeros=MODES)
def test_numpy_pool_equals_the_reference(case, skip_zeros):
    check(NumpyPool(1), case, skip_zeros=skip_zeros)


@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("isa", [*ISAS, "numpy"])
@pytest.mark.parametrize(("activation", "parts"), [("relu", 2), ("relu", 3), ("drelu", 3)])
def test_relu_and_drelu_of_every_form(pool_of, isa, dtype, activation, parts, batch, skip_zeros):
    """Two parts are what OPT has: the activation is that of fc1. Several blocks a thread, and a lone one."""
    pool = NumpyPool(2) if isa == "numpy" else pool_of(isa, 2)
    for count in (300, 5):
        case = make_case(batch, batch=batch, shape=(310, parts, 1, 72), count=count, dtype=dtype, activation=activation)
        check(pool, case, skip_zeros=skip_zeros)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_drelu_reads_less_than_relu_and_equals_its_dense_form(pool, batch):
    case = make_case(12, batch=batch, shape=(300, 3, 1, 64), count=300, activation="drelu")
    results = [pool.ffn(case.x, case.bundle, case.units, **case.kind, skip_zeros=skip) for skip in (True, False)]
    np.testing.assert_allclose(results[0].y, results[1].y, rtol=0, atol=case.tolerance())
    np.testing.assert_array_equal(results[0].live_count, results[1].live_count)
    relu = pool.ffn(case.x, case.bundle, case.units, activation="relu")
    assert results[0].bytes_read < relu.bytes_read < results[1].bytes_read == case.bundle.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_all_finite_and_special_weights_are_converted_as_numpy_does(pool_of, isa, dtype):
    """Subnormals too: with x = 1 in one place, the down rows come out as they are."""
    if np.dtype(dtype).itemsize == 2:
        values = np.arange(2**16, dtype=np.uint16).view(dtype)
        values = np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(0))
    else:
        values = np.array([0, 1e-45, -1e-40, 1e-38, 1, -3.4e38], np.float32)
    bundle = np.zeros((1, 2, 1, len(values)), dtype)
    bundle[0, 0, 0, 0] = 1
    bundle[0, 1, 0] = values
    x = np.zeros((1, len(values)), np.float32)
    x[0, 0] = 1
    result = pool_of(isa, 1).ffn(x, bundle, np.zeros(1, np.int32), activation="relu")
    np.testing.assert_array_equal(result.y[0], values.astype(np.float32))


@pytest.mark.parametrize("batch", [1, 3])
def test_real_sizes_stay_within_a_few_parts_in_a_million(pool, batch):
    rng = np.random.default_rng(1)
    bundle = rng.standard_normal((150, 3, 1, 4096), np.float32).astype(np.float16)
    x = rng.standard_normal((batch, 4096), np.float32)
    case = Case(x, bundle, np.arange(150, dtype=np.int32), "relu", 0.0)
    wanted, _ = case.reference()
    y = pool.ffn(x, bundle, case.units, activation="relu").y
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 12.0])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens_of_which_few_or_half_are_live(pool_of, isa, dtype, threshold, skip_zeros):
    """Several stripes of columns, and a rest; pairs of a token and a neuron that are listed, and so many that all are
    multiplied."""
    case = make_case(
        5, batch=37, shape=(140, 3, 1, 610), count=140, dtype=dtype, activation="fatrelu", threshold=threshold
    )
    share = case.reference()[1].mean()
    assert (0 < share < 0.3) == (threshold > 0)
    check(pool_of(isa, 2), case, skip_zeros=skip_zeros)
    lost = replace(case, x=np.concatenate([case.x[:36], np.zeros_like(case.x[:1])]))
    y = pool_of(isa, 2).ffn(lost.x, case.bundle, case.units, **case.kind, skip_zeros=skip_zeros).y
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, case.reference()[0], rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("swap", [(0, 1), (0, 2), (1, 2)])
def test_the_tolerance_notices_swapped_operands(pool, batch, swap):
    case = make_case(3, batch=batch, shape=(40, 3, 1, 64), count=30)
    order = [0, 1, 2]
    order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
    swapped = replace(case, bundle=np.ascontiguousarray(case.bundle[:, order]))
    wanted, _ = case.reference()
    y = pool.ffn(case.x, swapped.bundle, case.units, **case.kind).y
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("batch", [1, 9])
def test_the_tolerance_tells_drelu_from_relu(pool, batch):
    case = make_case(13, batch=batch, shape=(40, 3, 1, 64), count=30, activation="drelu")
    wanted, _ = case.reference()
    y = pool.ffn(case.x, case.bundle, case.units, activation="relu").y
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("batch", [1, 4, 9, 20])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("fault", ["a code", "a scale", "scales first"])
def test_the_tolerance_notices_another_packing(pool, fault, dtype, batch):
    case = make_case(15, batch=batch, shape=(40, 3, 1, 64), count=30, dtype=dtype)
    wanted, _ = case.reference()
    rows = case.bundle.reshape(40, 3, -1).copy()
    if fault == "a code":
        rows[:, 2, 7] ^= 0x80  # the sign of a value of each down row
    elif fault == "a scale":
        rows[:, 2, -1] ^= 0x80
    else:
        rows = np.roll(rows, 4, axis=2)
    y = pool.ffn(case.x, rows.reshape(case.bundle.shape), case.units, **case.kind).y
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=case.tolerance())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("skip_zeros", [True, False])
@pytest.mark.parametrize("packed", [None, "int8", "int4"])
def test_equal_calls_give_equal_bits(threads, batch, skip_zeros, packed):
    """With another pool too, as long as the number of threads is the same."""
    rng = np.random.default_rng(4)
    bundle = rng.standard_normal((700, 3, 1, 96), np.float32)
    if packed is not None:
        bundle = pack_random(rng, bundle.shape, packed)
    x, units = rng.standard_normal((batch, 96), np.float32), np.arange(700, dtype=np.int32)
    answers = []
    for _ in range(2):
        with HostPool(threads) as pool:
            for _ in range(5):
                result = pool.ffn(x, bundle, units, activation="relu", skip_zeros=skip_zeros)
                answers.append(result.y.tobytes())
    assert len(set(answers)) == 1


def test_a_token_does_not_depend_on_its_company(pool):
    case = make_case(5, batch=9, shape=(80, 3, 1, 50), count=80)
    together = pool.ffn(case.x, case.bundle, case.units, **case.kind)
    for row in range(9):
        alone = pool.ffn(case.x[row : row + 1], case.bundle, case.units, **case.kind)
        np.testing.assert_allclose(alone.y[0], together.y[row], rtol=0, atol=case.tolerance())
        assert alone.live_count[0] == together.live_count[row]


def test_a_large_batch_is_added_up_by_all_threads():
    case = make_case(6, batch=200, shape=(20, 3, 1, 300), count=20)
    with HostPool(3) as pool:
        check(pool, case, skip_zeros=True)


def test_no_rows_read_nothing(pool):
    case = make_case(14, batch=0, shape=(20, 3, 1, 30), count=20)
    for one in (pool, NumpyPool(1)):
        for skip_zeros in (True, False):
            result = one.ffn(case.x, case.bundle, case.units, **case.kind, skip_zeros=skip_zeros)
            assert result.y.shape == (0, 30) and result.live_count.shape == (0,)
            assert result.bytes_read == 0


def test_the_answer_may_overwrite_the_input(pool):
    case = make_case(7, batch=6, shape=(50, 3, 1, 70), count=50)
    wanted, _ = case.reference()
    x = case.x.copy()
    assert pool.ffn(x, case.bundle, case.units, **case.kind, out=x).y is x
    np.testing.assert_allclose(x, wanted, rtol=0, atol=case.tolerance())


def test_a_threshold_of_exactly_the_gate_is_live():
    x = np.ones((1, 4), np.float32)
    bundle = np.full((1, 3, 1, 4), 0.5, np.float16)  # gate.x = 2
    units = np.zeros(1, np.int32)
    for one in (HostPool(1), NumpyPool(1)):
        with one as pool:
            assert pool.ffn(x, bundle, units, activation="fatrelu", threshold=2.0).y[0, 0] == 2.0
            assert pool.ffn(x, bundle, units, activation="fatrelu", threshold=2.001).y[0, 0] == 0.0


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("activation", ["relu", "silu", "drelu"])
@pytest.mark.parametrize("skip_zeros", [True, False])
def test_a_nan_shows(pool, batch, activation, skip_zeros):
    case = make_case(8, batch=batch, shape=(10, 3, 1, 20), count=10, activation=activation)
    case.x[0, 3] = np.nan
    for one in (pool, NumpyPool(1)):
        y = one.ffn(case.x, case.bundle, case.units, **case.kind, skip_zeros=skip_zeros).y
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("skip_zeros", [True, False])
def test_a_nan_of_either_factor_of_drelu_shows(pool, batch, part, skip_zeros):
    """A gate that is not a number even where up is negative; an up where the gate lets it be read."""
    bundle = np.ones((3, 3, 1, 20), np.float32)
    bundle[:, 1 - part] *= -1 if part == 0 else 1
    bundle[1, part, 0, 2] = np.nan
    x, units = np.ones((batch, 20), np.float32), np.arange(3, dtype=np.int32)
    for one in (pool, NumpyPool(1)):
        result = one.ffn(x, bundle, units, activation="drelu", skip_zeros=skip_zeros)
        assert np.isnan(result.y).all()
        assert result.live_count.tolist() == [1 if part == 0 else 3] * batch


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("dtype", [np.float16, "int8", "int4"])
def test_rows_that_begin_anywhere_in_memory(pool, dtype, batch):
    case = make_case(9, batch=batch, shape=(30, 3, 1, 33), count=30, dtype=dtype)
    raw = np.empty(case.bundle.nbytes + 2, np.uint8)
    begin = case.bundle.itemsize  # of packed rows an odd address
    moved = raw[begin : begin + case.bundle.nbytes].view(case.bundle.dtype).reshape(case.bundle.shape)
    moved[...] = case.bundle
    check(pool, replace(case, bundle=moved), skip_zeros=True)


def test_callers_in_several_threads_take_turns(pool):
    one, other = (make_case(seed, batch=2, shape=(200, 3, 1, 64), count=200) for seed in (10, 11))
    failures: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            for _ in range(50):
                check(pool, case, skip_zeros=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in (one, other, one)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
