"""The FFN over a pool's parts, which are arrays of a program, as a custom call; against the pool's own answer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcompute import HostPool, ffn_reference
from hostcompute.ffi import pool_ffn_ffi, unavailable
from hostcompute.packed import unpack
from tests.hostcompute.cases import DTYPES, Case, make_case

BATCHES = (1, 2, 4, 7)
KINDS = [("relu", 0.0, 3), ("fatrelu", 0.5, 3), ("silu", 0.0, 3), ("drelu", 0.0, 3), ("relu", 0.0, 2), ("silu", 0.0, 2)]


@pytest.fixture(scope="module", autouse=True)
def handler() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no FFI handler: {reason}")


def case_of(kind=KINDS[0], dtype=np.float32, batch=2, slots=150, width=40) -> Case:
    """Every unit of the bundle, in order: more than a block for two threads."""
    activation, threshold, parts = kind
    shape = (slots, parts, 1, width)
    case = make_case(batch, batch=batch, shape=shape, count=slots, dtype=dtype, activation=activation,
                     threshold=threshold)  # fmt: skip
    return Case(case.x, case.bundle, np.arange(slots, dtype=np.int32), activation, threshold)


def parts_of(case: Case) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(np.ascontiguousarray(case.bundle[:, part, 0])) for part in range(case.bundle.shape[1]))


def run(case: Case, parts=None, admit=None, *, skip_zeros=True) -> tuple[np.ndarray, np.ndarray]:
    call = jax.jit(partial(pool_ffn_ffi, **case.kind, skip_zeros=skip_zeros))
    y, live, counts = call(jnp.asarray(case.x), parts_of(case) if parts is None else parts, admit)
    np.testing.assert_array_equal(counts, np.asarray(live).sum(axis=1))
    return np.asarray(y), np.asarray(live)


def some_admitted(case: Case) -> np.ndarray:
    return np.random.default_rng(1).random((len(case.x), len(case.bundle))) < 0.4


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_pools_answer(pool: HostPool, kind, dtype, batch):
    """Up to rounding: the pool of the programs may have other threads. Whoever is admitted, zeros skipped or not."""
    case = case_of(kind, dtype, batch)
    for admit in (None, some_admitted(case)):
        for skip_zeros in (True, False):
            marks = None if admit is None else admit.astype(np.uint8)
            expected_live = np.zeros((batch, len(case.units)), np.uint8)
            told = {"skip_zeros": skip_zeros, "live": expected_live, "admit": marks}
            expected = pool.ffn(case.x, case.bundle, case.units, **case.kind, **told)
            y, live = run(case, admit=None if admit is None else jnp.asarray(admit), skip_zeros=skip_zeros)
            np.testing.assert_allclose(y, expected.y, rtol=0, atol=case.tolerance())
            np.testing.assert_array_equal(live, expected_live)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_right(kind, batch):
    case = case_of(kind, batch=batch)
    y, live = run(case)
    expected_y, expected_live = case.reference()
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=case.tolerance())
    np.testing.assert_array_equal(live, expected_live)
    wrong = (*parts_of(case)[:-1], jnp.roll(parts_of(case)[-1], 1, axis=0))
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(run(case, wrong)[0], expected_y, rtol=0, atol=case.tolerance())


def test_the_bits_of_bfloat16_are_read_as_such():
    case = case_of(dtype=DTYPES[2])
    bits = tuple(jax.lax.bitcast_convert_type(part, jnp.uint16) for part in parts_of(case))
    for found, expected in zip(run(case, bits), run(case), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_empty_pool_gives_zeros():
    y, live, counts = pool_ffn_ffi(jnp.ones((2, 8)), (jnp.zeros((0, 8)),) * 3, activation="relu")
    assert not y.any() and live.shape == (2, 0) and counts.tolist() == [0, 0]


def test_it_keeps_off_what_it_cannot_read():
    h, part = jnp.ones((2, 8), jnp.float32), jnp.ones((5, 8), jnp.float32)
    call = partial(pool_ffn_ffi, activation="relu")
    with pytest.raises(ValueError, match="h must be float32"):
        call(h.astype(jnp.float16), (part,) * 3)
    for parts in ((part,), (part,) * 4, (part, part[:4]), (part, part.astype(jnp.float16))):
        with pytest.raises(ValueError, match="2 or 3 equal ones"):
            call(h, parts)
    for wrong in (part[:, :4], part.astype(jnp.int8), part[:, None]):
        with pytest.raises(ValueError, match=r"parts must be \[G,8\] of float32, float16"):
            call(h, (wrong,) * 3)
    for admit in (jnp.ones((2, 4), jnp.bool_), jnp.ones((2, 5), jnp.uint8)):
        with pytest.raises(ValueError, match="admit must be bool"):
            call(h, (part,) * 3, admit)
    with pytest.raises(ValueError, match="activation must be one of"):
        pool_ffn_ffi(h, (part,) * 3, activation="gelu")
    with pytest.raises(ValueError, match="3 parts"):
        pool_ffn_ffi(h, (part,) * 2, activation="drelu")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("batch", BATCHES)
def test_packed_parts(pool: HostPool, batch, bits):
    """The answer of the pool for the packed bundle, which is that of what the packed rows stand for."""
    rng = np.random.default_rng(bits)
    rows, groups = 150, 3
    codes = rng.integers(0, 256, (rows, 3, 1, groups * 4 * bits), np.uint8)
    scales = rng.uniform(0.01, 0.05, (rows, 3, 1, groups)).astype(np.float16)
    bundle = np.concatenate([codes, scales.view(np.uint8)], axis=3).reshape(rows, 3, 1, groups, 4 * bits + 2)
    x, units = rng.standard_normal((batch, groups * 32)).astype(np.float32), np.arange(rows, dtype=np.int32)
    parts = tuple(jnp.asarray(bundle[:, part, 0].copy()) for part in range(3))
    expected = pool.ffn(x, bundle, units, activation="relu")
    y, live, counts = map(np.asarray, jax.jit(partial(pool_ffn_ffi, activation="relu"))(jnp.asarray(x), parts))
    np.testing.assert_allclose(y, expected.y, rtol=0, atol=1e-6 * np.abs(expected.y).max())
    np.testing.assert_array_equal(live.sum(axis=1), expected.live_count)
    np.testing.assert_array_equal(counts, expected.live_count)
    plain, _ = ffn_reference(x, unpack(bundle), units, "relu", 0.0)
    scale = np.abs(plain).max()
    np.testing.assert_allclose(y, plain, rtol=0, atol=1e-5 * scale)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(y, np.roll(plain, 1, axis=1), rtol=0, atol=1e-5 * scale)
    with pytest.raises(ValueError, match="or packed"):
        pool_ffn_ffi(jnp.asarray(x[:, :-1]), parts, activation="relu")
