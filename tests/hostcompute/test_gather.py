import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostcompute import NumpyPool, gather_reference
from tests.hostcompute.cases import ISAS, TYPES, make_case

PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", [*ISAS, "numpy"])
@PROPERTY
@given(
    seed=st.integers(0, 2**32 - 1),
    unit=st.tuples(st.sampled_from([1, 3]), st.one_of(st.integers(1, 70), st.just(1000))),  # (W, D)
    count=st.sampled_from([0, 1, 2, 20]),
    dtype=st.sampled_from(TYPES),
    offset=st.sampled_from([0, 4, 32, 60]),
)
def test_gather_equals_the_reference(pool_of, isa, threads, seed, unit, count, dtype, offset):
    """Into a target that begins anywhere in a cache line, and not a byte beyond it."""
    case = make_case(seed, batch=1, shape=(7, 3, *unit), count=count, dtype=dtype)
    wanted = gather_reference(case.bundle, case.units)
    raw = np.full(wanted.nbytes + offset + 128, 0xA5, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    out = raw[begin : begin + wanted.nbytes].view(wanted.dtype).reshape(wanted.shape)
    pool = NumpyPool(threads) if isa == "numpy" else pool_of(isa, threads)
    assert pool.gather(case.bundle, case.units, out) is out
    np.testing.assert_array_equal(out, wanted)
    assert (raw[:begin] == 0xA5).all() and (raw[begin + wanted.nbytes :] == 0xA5).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_read_sum_reads_every_word_once(pool_of, isa, threads):
    words = np.random.default_rng(0).integers(0, 2**63, 1003, np.uint64)
    with np.errstate(over="ignore"):
        assert pool_of(isa, threads).read_sum(words) == int(words.sum(dtype=np.uint64))
