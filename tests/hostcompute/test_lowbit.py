"""Products with packed low-bit matrices: the kernels of every instruction set, and the custom call inside programs."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcompute import HostPool, library
from hostcompute.ffi import LOWBIT, lowbit_rows_ffi
from tests.hostcompute.cases import ISAS

BITS = (1, 2, 4, 8)
TOKENS = (0, 1, 2, 3, 8, 9)
# Rows and columns: less than a group, short last groups, groups that fill no register, rows that fill no panel.
SHAPES = ((1, 1), (7, 32), (33, 33), (130, 500), (65, 577), (16, 1024), (300, 95))
LARGE = (1100, 1043)  # for several threads
PROGRAM_FAILED = (jax.errors.JaxRuntimeError, ValueError)
needs_ffi = pytest.mark.usefixtures("handler")
lowbit_rows = jax.jit(lowbit_rows_ffi, static_argnums=3)


@dataclass(frozen=True, eq=False)
class Packed:
    x: np.ndarray  # float32 [T,D]
    codes: np.ndarray  # uint8 [O, groups * 4 * bits]
    scales: np.ndarray  # float16 [O, groups]
    bits: int

    def matrix(self) -> np.ndarray:
        """float64 [O,D], bit by bit as src/lowbit.h says."""
        rows, groups = self.scales.shape
        size = 4 * self.bits
        codes = self.codes.reshape(rows, groups, size)
        column = np.arange(32)
        code = (codes[:, :, column % size] >> (column // size * self.bits).astype(np.uint8)) & (2**self.bits - 1)
        wide = (code - (2**self.bits - 1) / 2) * self.scales.astype(np.float64)[:, :, None]
        return wide.reshape(rows, groups * 32)[:, : self.x.shape[1]]


def packed(bits: int, rows: int, width: int, tokens: int) -> Packed:
    rng = np.random.default_rng(rows * width + tokens)
    groups = -(-width // 32)
    x = rng.standard_normal((tokens, width), np.float32)
    codes = rng.integers(0, 256, (rows, groups * 4 * bits), np.uint8)
    return Packed(x, codes, rng.random((rows, groups), np.float32).astype(np.float16), bits)


def product(pool: HostPool | None, case: Packed) -> np.ndarray:
    """By the C interface, in the pool's threads and with its kernels; None: in those that programs use."""
    (tokens, width), (rows, groups) = case.x.shape, case.scales.shape
    y = np.full((tokens, rows), np.nan, np.float32)
    x_at, codes_at, scales_at, y_at = (array.ctypes.data for array in (case.x, case.codes, case.scales, y))
    handle = None if pool is None else pool.handle
    call = library.load_library().hc_lowbit
    assert call(handle, x_at, tokens, width, codes_at, scales_at, rows, groups, case.bits, y_at) == 0
    return y


def assert_product(y: np.ndarray, case: Packed) -> None:
    """Within a few millionths of what the lengths of the two rows allow."""
    wide, x = case.matrix(), case.x.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(wide, axis=1)[None, :]
    assert y.dtype == np.float32 and y.shape == lengths.shape
    off = np.abs(y - x @ wide.T)
    assert (off <= 3e-6 * lengths).all(), (off / np.maximum(lengths, 1e-30)).max()


# --- the kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_equal_the_reference_and_threads_change_no_bit(pool_of, isa, bits):
    for rows, width in (*SHAPES, LARGE):
        for tokens in TOKENS:
            case = packed(bits, rows, width, tokens)
            y = product(pool_of(isa, 1), case)
            assert_product(y, case)
            for threads in (2, 3, 3):
                np.testing.assert_array_equal(product(pool_of(isa, threads), case), y)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("fault", ["a code", "a scale", "rows swapped", "a token lost", "neighbours swapped"])
def test_the_comparison_notices(pool, fault, tokens, bits):
    case = packed(bits, 70, 96, tokens)
    x, codes, scales = case.x.copy(), case.codes.copy(), case.scales.copy()
    if fault == "a code":
        codes[69, -1] ^= 1 << (bits - 1)
    elif fault == "a scale":
        scales[0, 1] *= np.float16(1.01)
    elif fault == "rows swapped":
        codes[:2] = codes[1::-1]
    elif fault == "a token lost":
        x[-1] = 0
    else:
        x[:, 5:7] = x[:, 6:4:-1]
    with pytest.raises(AssertionError):
        assert_product(product(pool, replace(case, x=x, codes=codes, scales=scales)), case)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_and_scale(pool, bits):
    """One column a group, times one: what all codes stand for, with the smallest and the largest scales."""
    codes = np.zeros((256, 4 * bits), np.uint8)
    codes[:, 0] = np.arange(256)
    x = np.ones((1, 1), np.float32)
    for scale in (2.0**-24, 1.0, 60000.0):
        case = Packed(x, codes, np.full((256, 1), scale, np.float16), bits)
        np.testing.assert_array_equal(product(pool, case)[0], case.matrix()[:, 0].astype(np.float32))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(0, 3, 64), (2, 0, 64), (2, 3, 0), (8, 3, 0)])
def test_nothing_to_add_up_gives_zeros(pool, tokens, rows, width, bits):
    assert not product(pool, packed(bits, rows, width, tokens)).any()


@pytest.mark.parametrize("bits", BITS)
def test_a_token_does_not_depend_on_its_company(pool, bits):
    case = packed(bits, 200, 320, 7)
    together = product(pool, case)
    for row in range(7):
        alone = product(pool, replace(case, x=case.x[row : row + 1]))
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("bits", BITS)
def test_columns_behind_the_width_count_for_nothing(pool, bits):
    case = packed(bits, 50, 70, 2)
    wider = replace(case, x=np.pad(case.x, ((0, 0), (0, 26))))
    np.testing.assert_array_equal(product(pool, case), product(pool, wider))


# --- inside programs ----------------------------------------------------------------------------------


@needs_ffi
@pytest.mark.parametrize("bits", BITS)
def test_programs_compute_the_same_bits(bits):
    for tokens in (1, 8):
        case = packed(bits, *LARGE, tokens)
        operands = [jnp.asarray(array) for array in (case.x, case.codes, case.scales)]
        np.testing.assert_array_equal(lowbit_rows(*operands, bits), product(None, case))
        compiled = lowbit_rows.lower(*operands, bits).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 64  # no copy of anything


@needs_ffi
def test_it_works_under_control_flow_and_vmap():
    case = packed(2, 48, 48, 6)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: lowbit_rows_ffi(row[None], case.codes, case.scales, 2)[0], x)

    np.testing.assert_array_equal(run(case.x), product(None, case))
    pairs: Callable = jax.jit(jax.vmap(lambda x: lowbit_rows_ffi(x, case.codes, case.scales, 2)))
    np.testing.assert_array_equal(pairs(case.x.reshape(3, 2, 48)).reshape(6, 48), product(None, case))


GOOD = {"x": np.zeros((2, 40), np.float32), "codes": np.zeros((3, 8), np.uint8), "scales": np.zeros((3, 2), np.float16)}


@needs_ffi
@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("bits must be 1, 2, 4 or 8, got 3", {"bits": 3}),
        (r"scales must be float16 \[O,groups\], got float32 \[3, 2\]", {"scales": np.zeros((3, 2), np.float32)}),
        (r"scales must be float16 \[O,groups\], got float16 \[3\]", {"scales": np.zeros(3, np.float16)}),
        (r"codes must be uint8 \[3, 16\], got uint8 \[3, 8\]", {"bits": 2}),
        (r"codes must be uint8 \[3, 8\], got int8 \[3, 8\]", {"codes": np.zeros((3, 8), np.int8)}),
        (r"x must be float32 \[T, at most 64\], got float32 \[2, 65\]", {"x": np.zeros((2, 65), np.float32)}),
        (r"x must be float32 \[T, at most 64\], got float16 \[2, 64\]", {"x": np.zeros((2, 64), np.float16)}),
    ],
)
def test_a_wrong_operand_is_named_while_tracing(message, bad):
    case = {**GOOD, "bits": 1, **bad}
    with pytest.raises(ValueError, match=message):
        lowbit_rows_ffi(*(jnp.asarray(case[name]) for name in ("x", "codes", "scales")), case["bits"])


@needs_ffi
@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("bits must be 1, 2, 4 or 8", {"bits": 3}),
        (r"codes must be \[3, 16\]", {"bits": 2}),
        ("x must be at most 64 wide, got 65", {"x": np.zeros((2, 65), np.float32)}),
        (r"y must be \[2, 3\]", {"y": (2, 4)}),
        ("expected F16 but got F32", {"scales": np.zeros((3, 2), np.float32)}),
    ],
)
def test_the_handler_names_what_is_wrong(message, bad):
    case = {**GOOD, "bits": 1, "y": (2, 3), **bad}
    call = jax.ffi.ffi_call(LOWBIT, jax.ShapeDtypeStruct(case["y"], np.float32))
    with pytest.raises(PROGRAM_FAILED, match=message):
        jax.jit(lambda *operands: call(*operands, bits=np.int32(case["bits"])))(
            case["x"], case["codes"], case["scales"]
        ).block_until_ready()


SCRIPT = """
import jax, numpy as np
from hostcompute.ffi import lowbit_rows_ffi
from tests.hostcompute.test_lowbit import packed
case = packed(2, 70, 999, 1)
print(np.asarray(jax.jit(lowbit_rows_ffi, static_argnums=3)(case.x, case.codes, case.scales, 2)).tobytes().hex())
"""


@needs_ffi
@pytest.mark.parametrize("isa", ISAS)
def test_the_instruction_set_holds_for_programs_too(pool_of, isa):
    wanted = product(pool_of(isa, 1), packed(2, 70, 999, 1))  # skips where the CPU lacks it
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HOSTCOMPUTE_ISA": isa},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip() == wanted.tobytes().hex()
