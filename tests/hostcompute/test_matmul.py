"""Products with a whole matrix, 16-bit or packed: the kernels, their threads, and the custom call inside programs."""

import ctypes

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hostcompute import HostPool, library
from hostcompute.ffi import DOT_ROWS, SUM_ROWS, dot_each_ffi, dot_rows_ffi, sum_rows_ffi
from hostcompute.packed import row_type, row_values, widened
from tests.hostcompute.cases import ISAS, pack_random

CODES = {"float16": 1, "bfloat16": 2}
ALL_CODES = {**CODES, "int8": 3, "int4": 4}
TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOKENS = (1, 2, 3, 4, 9, 16, 33, 128)
SHAPES = ((1, 1), (7, 5), (37, 33), (130, 65), (300, 576), (70, 1100), (1030, 257))  # rows, width
PROGRAM_FAILED = (jax.errors.JaxRuntimeError, ValueError)
needs_ffi = pytest.mark.usefixtures("handler")
dot_rows, sum_rows = jax.jit(dot_rows_ffi), jax.jit(sum_rows_ffi)


def operands(dtype: str, rows: int, width: int, tokens: int, *, sums: bool) -> tuple[np.ndarray, np.ndarray]:
    """x and weights; sparse x where rows are summed, as after a relu, so that some rows are not read.

    Packed rows are as wide as the groups that `width` takes.
    """
    rng = np.random.default_rng(rows * width + tokens)
    if dtype in TYPES:
        weights = rng.standard_normal((rows, width), np.float32).astype(TYPES[dtype])
    else:
        weights = pack_random(rng, (rows, 1, 1, width), dtype)[:, 0, 0]
    x = rng.standard_normal((tokens, rows if sums else row_values(weights)), np.float32)
    return np.maximum(x, 0) if sums else x, weights


class Matrix(ctypes.Structure):
    """hc_matrix of src/api.h."""

    _fields_ = (("weights", ctypes.c_void_p), ("rows", ctypes.c_int64), ("y", ctypes.c_void_p))


def products(pool: HostPool | None, x: np.ndarray, matrices: list[np.ndarray]) -> list[np.ndarray]:
    """With all rows of each, by the C interface, in the pool's threads and with its kernels; None: in those that
    programs use."""
    results = [np.full((len(x), len(weights)), np.nan, np.float32) for weights in matrices]
    table = (Matrix * len(matrices))(
        *((w.ctypes.data, len(w), y.ctypes.data) for w, y in zip(matrices, results, strict=True))
    )
    width, kind = row_values(matrices[0]), ALL_CODES[row_type(matrices[0])]
    handle, call = None if pool is None else pool.handle, library.load_library().hc_dot_rows
    assert call(handle, x.ctypes.data, len(x), ctypes.addressof(table), len(matrices), width, kind) == 0
    return results


def product(pool: HostPool | None, x: np.ndarray, weights: np.ndarray, *, sums: bool) -> np.ndarray:
    """The same with one matrix; or its rows, summed."""
    if not sums:
        return products(pool, x, [weights])[0]
    y = np.full((len(x), row_values(weights)), np.nan, np.float32)
    matrix = Matrix(weights.ctypes.data, len(weights), y.ctypes.data)
    handle, call = None if pool is None else pool.handle, library.load_library().hc_sum_rows
    kind = ALL_CODES[row_type(weights)]
    assert call(handle, x.ctypes.data, len(x), ctypes.addressof(matrix), row_values(weights), kind) == 0
    return y


def assert_product(y: np.ndarray, x: np.ndarray, weights: np.ndarray, *, sums: bool) -> None:
    wide = widened(weights).astype(np.float64)
    wanted = x.astype(np.float64) @ (wide if sums else wide.T)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(initial=0))


# --- the kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", ALL_CODES)
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_equal_the_reference_and_threads_change_no_bit(pool_of, isa, dtype, sums):
    for rows, width in SHAPES:
        for tokens in TOKENS:
            x, weights = operands(dtype, rows, width, tokens, sums=sums)
            y = product(pool_of(isa, 1), x, weights, sums=sums)
            assert_product(y, x, weights, sums=sums)
            for threads in (2, 3, 3):
                np.testing.assert_array_equal(product(pool_of(isa, threads), x, weights, sums=sums), y)


@pytest.mark.parametrize("dtype", ALL_CODES)
@pytest.mark.parametrize("isa", ISAS)
def test_several_matrices_at_once_change_no_bit(pool_of, isa, dtype):
    for tokens in (1, 2, 9, 40):
        pairs = [operands(dtype, rows, 160, tokens, sums=False) for rows in (1, 300, 37, 130)]
        x, matrices = pairs[0][0], [weights for _, weights in pairs]
        matrices.insert(2, matrices[0][:0])  # without rows
        for threads in (1, 3):
            together = products(pool_of(isa, threads), x, matrices)
            for y, weights in zip(together, matrices, strict=True):
                assert_product(y, x, weights, sums=False)
                np.testing.assert_array_equal(y, product(pool_of(isa, 2), x, weights, sums=False))


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_in_integers_is_exact_in_every_group(pool_of, isa):
    """Groups of very different size: row g has codes beside zero in group g alone, so that nothing hides behind the
    largest. The comparison notices a unit that all groups share. What is no number stays none."""
    rng = np.random.default_rng(3)
    groups = 18
    codes, scales = np.full((groups, groups, 16), 0x88, np.uint8), np.ones((groups, groups), np.float16)
    codes[np.arange(groups), np.arange(groups)] = rng.integers(0, 256, (groups, 16), np.uint8)
    weights = np.concatenate([codes.reshape(groups, -1), scales.view(np.uint8)], axis=1).reshape(groups, groups, 18)
    sizes = 2.0 ** rng.integers(-60, 60, (groups, 1))
    wide, pool = widened(weights).astype(np.float64), pool_of(isa, 1)
    for x in (sizes * rng.uniform(-1, 1, (groups, 32)), sizes * rng.integers(-9, 10, (groups, 32))):
        token = x.astype(np.float32).reshape(1, -1)
        largest = np.abs(token.reshape(groups, 32)).max(axis=1).astype(np.float64)
        bound = largest * 2.0**-22 * np.abs(wide).sum(axis=1) * 1.5
        wanted = wide @ token[0].astype(np.float64)
        assert (np.abs(product(pool, token, weights, sums=False)[0] - wanted) <= bound).all()
        unit = largest.max() * 2.0**-22
        assert (np.abs(wide @ (np.rint(token[0] / unit) * unit) - wanted) > bound).any()
    assert not product(pool, np.zeros((1, groups * 32), np.float32), weights, sums=False).any()
    for bad in (np.nan, np.inf, -np.inf):
        token = np.ones((1, groups * 32), np.float32)
        token[0, 77] = bad
        assert not np.isfinite(product(pool, token, weights, sums=False)).any()


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", ALL_CODES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_large_matrices(pool, dtype, tokens, sums):
    """As many pieces as there may be, and rows that are cut."""
    x, weights = operands(dtype, 3000, 2100, tokens, sums=sums)
    y = product(pool, x, weights, sums=sums)
    assert_product(y, x, weights, sums=sums)
    np.testing.assert_array_equal(product(pool, x, weights, sums=sums), y)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("fault", ["transposed", "another type", "a row less", "a token lost"])
def test_the_comparison_notices(pool, fault, tokens, sums):
    x, weights = operands("float16", 96, 96, tokens, sums=sums)
    right = x, weights
    if fault == "transposed":
        weights = np.ascontiguousarray(weights.T)
    elif fault == "another type":
        weights = weights.view(TYPES["bfloat16"])
    elif fault == "a row less":
        weights = np.concatenate([weights[:-1], np.zeros_like(weights[:1])])
    else:
        x = np.concatenate([x[:-1], np.zeros_like(x[:1])])
    with pytest.raises(AssertionError):
        assert_product(product(pool, x, weights, sums=sums), *right, sums=sums)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("fault", ["codes", "scales", "groups"])
def test_the_comparison_notices_another_packing(pool, fault, dtype, tokens, sums):
    x, weights = operands(dtype, 96, 96, tokens, sums=sums)
    wrong = weights.reshape(96, -1).copy()
    if fault == "codes":
        wrong[:, 5] ^= 0x88  # one byte of each row
    elif fault == "scales":
        wrong[:, -1] ^= 0x80  # the sign of the last group
    else:
        wrong[:, :16] = wrong[:, 16:32]
    with pytest.raises(AssertionError):
        assert_product(product(pool, x, wrong.reshape(weights.shape), sums=sums), x, weights, sums=sums)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "width"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (8, 0, 4), (8, 3, 0)])
def test_nothing_to_add_up_gives_zeros(pool, tokens, rows, width, sums):
    x, weights = operands("float16", rows, width, tokens, sums=sums)
    assert not product(pool, x, weights, sums=sums).any()


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_row_that_no_token_weighs_is_not_read(pool, tokens):
    x, weights = operands("float16", 300, 40, tokens, sums=True)
    x[:, ::7] = 0
    weights[~x.any(axis=0)] = np.nan
    assert not x.any(axis=0).all()
    assert np.isfinite(product(pool, x, weights, sums=True)).all()
    x[0, 7], weights[7] = 1, np.nan
    assert np.isnan(product(pool, x, weights, sums=True)[0]).all()


def test_numbers_of_every_kind(pool):
    """Every float16 and bfloat16 there is, times one. XLA lets its threads flush numbers below 1e-38 to zero."""
    for dtype in CODES:
        weights = np.arange(2**16, dtype=np.uint16).reshape(-1, 1).view(TYPES[dtype])
        with np.errstate(invalid="ignore"):
            wanted = weights[:, 0].astype(np.float32)
        for tokens in (1, 8):
            y = product(pool, np.ones((tokens, 1), np.float32), weights, sums=False)
            usual = ~(np.abs(wanted) < np.finfo(np.float32).tiny)
            np.testing.assert_array_equal(y[:, usual], np.broadcast_to(wanted, y.shape)[:, usual])
            np.testing.assert_allclose(y[:, ~usual], np.broadcast_to(wanted, y.shape)[:, ~usual], atol=1.2e-38)


# --- inside programs ----------------------------------------------------------------------------------


@needs_ffi
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", [*ALL_CODES, "uint16"])
def test_programs_compute_the_same_bits(dtype, tokens):
    for sums, run in ((False, dot_rows), (True, sum_rows)):
        x, weights = operands("bfloat16" if dtype == "uint16" else dtype, 300, 130, tokens, sums=sums)
        given = jnp.asarray(weights.view(np.uint16) if dtype == "uint16" else weights)
        assert row_type(np.asarray(given)) == dtype
        wanted = product(None, x, weights, sums=sums)
        np.testing.assert_array_equal(run(x, given), wanted)
        compiled = run.lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, given))).compile()
        np.testing.assert_array_equal(compiled(x, given), wanted)
        assert compiled.memory_analysis().temp_size_in_bytes <= 64  # no copy of anything


@needs_ffi
def test_it_works_under_control_flow_and_vmap():
    x, weights = operands("float16", 48, 48, 3, sums=False)

    @jax.jit
    def run(x, weights):
        def step(carry, _):
            y = jax.lax.cond(carry[0, 0] > 0, sum_rows_ffi, dot_rows_ffi, carry, weights) / 8
            return y, y

        return jax.lax.scan(step, x, length=5)[1]

    found = np.asarray(run(x, weights))
    for step, y in enumerate(found):
        sums = bool(x[0, 0] > 0)
        np.testing.assert_array_equal(y, product(None, x, weights, sums=sums) / np.float32(8), err_msg=str(step))
        x = y
    many = np.stack([found[0], found[1]])
    each = jax.jit(jax.vmap(dot_rows_ffi, in_axes=(0, None)))(many, weights)
    np.testing.assert_array_equal(each[1], product(None, many[1], weights, sums=False))


@needs_ffi
@pytest.mark.parametrize(
    ("message", "x", "weights"),
    [
        (r"weights must be a matrix of float16, .*, got float32 \[3, 4\]", (2, 4), np.zeros((3, 4), np.float32)),
        (r"weights must be a matrix of float16, .*, got float16 \[3\]", (2, 3), np.zeros(3, np.float16)),
        (r"or packed in uint8 \[O,groups,34 or 18\], got uint8 \[3, 2, 20\]", (2, 64), np.zeros((3, 2, 20), np.uint8)),
        (r"x must be float32 \[T,64\], got float32 \[2, 2\]", (2, 2), np.zeros((3, 2, 18), np.uint8)),
        (r"x must be float32 \[T,4\], got float32 \[2, 3\]", (2, 3), np.zeros((3, 4), np.float16)),
        (r"x must be float32 \[T,4\], got float32 \[4\]", (4,), np.zeros((3, 4), np.float16)),
    ],
)
def test_a_wrong_operand_is_named_while_tracing(message, x, weights):
    with pytest.raises(ValueError, match=message):
        dot_rows_ffi(jnp.zeros(x, jnp.float32), jnp.asarray(weights))


@needs_ffi
def test_several_matrices_in_a_program():
    x, weights = operands("int4", 96, 64, 3, sums=False)
    run = jax.jit(dot_each_ffi)
    for y, rows in zip(run(x, (weights, weights[:5])), (weights, weights[:5]), strict=True):
        np.testing.assert_array_equal(y, product(None, x, np.ascontiguousarray(rows), sums=False))
    assert run.lower(x, (weights, weights[:5])).as_text().count(DOT_ROWS) == 1
    for other in (weights[:, :1], weights.view(np.float16).reshape(96, -1)[:, :64]):
        with pytest.raises(ValueError, match="matrices must be alike but for their rows, got uint8"):
            run(x, (weights, other))


@needs_ffi
@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("weights must be matrices of float16, bfloat16 or its bits", {"weights": np.zeros((3, 4), np.float32)}),
        ("weights must be matrices", {"weights": np.zeros(12, np.float16)}),
        ("weights must be a matrix", {"weights": np.zeros(12, np.float16), "target": SUM_ROWS}),
        (r".* or packed in uint8 \[rows, groups, 34 or 18\]", {"weights": np.zeros((3, 1, 20), np.uint8)}),
        (r".* or packed in uint8 \[rows, groups, 34 or 18\]", {"weights": np.zeros((3, 34), np.uint8)}),
        ("x must be 32 wide, got 4", {"weights": np.zeros((3, 1, 18), np.uint8)}),
        ("x must be 4 wide, got 3", {"x": np.zeros((2, 3), np.float32)}),
        ("x must be 3 wide, got 4", {"target": SUM_ROWS}),
        (r"y must be \[2, 3\]", {"y": (2, 4)}),
        ("expected F32 but got F16", {"x": np.zeros((2, 4), np.float16)}),
    ],
)
def test_the_handler_names_what_is_wrong(message, bad):
    good = {"x": np.zeros((2, 4), np.float32), "weights": np.zeros((3, 4), np.float16), "y": (2, 3), "target": DOT_ROWS}
    case = good | bad
    call = jax.ffi.ffi_call(case["target"], jax.ShapeDtypeStruct(case["y"], np.float32))
    with pytest.raises(PROGRAM_FAILED, match=f"{case['target']}: {message}" if "expected" not in message else message):
        jax.jit(call)(case["x"], case["weights"]).block_until_ready()


@needs_ffi
@pytest.mark.parametrize("others", [[], [np.zeros((3, 5), np.float16)], [np.zeros((3, 4), ml_dtypes.bfloat16)]])
def test_the_handler_refuses_matrices_that_are_not_alike(others):
    matrices = [np.zeros((3, 4), np.float16), *others]
    call = jax.ffi.ffi_call(DOT_ROWS, (jax.ShapeDtypeStruct((2, 3), np.float32),) * 2)
    message = "matrices must be alike" if others else "each matrix needs a y"
    with pytest.raises(PROGRAM_FAILED, match=message):
        jax.block_until_ready(jax.jit(call)(np.zeros((2, 4), np.float32), *matrices))
