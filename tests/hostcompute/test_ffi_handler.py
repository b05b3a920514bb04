"""The native FFN as a custom call inside jitted programs."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcompute import HostPool, NumpyPool, library
from hostcompute.ffi import TARGET, HostTable, cold_ffn_ffi, unavailable
from tests.hostcompute.cases import TYPES, Case, make_case

needs_ffi = pytest.mark.usefixtures("handler")
PROGRAM_FAILED = (jax.errors.JaxRuntimeError, ValueError)  # the latter from a program that ran before
MARKS = {
    "all": lambda rows: np.ones(rows, np.bool_),
    "none": lambda rows: np.zeros(rows, np.bool_),
    "first": lambda rows: np.arange(rows) < max(1, rows // 2),
    "middle": lambda rows: (np.arange(rows) > 0) & (np.arange(rows) < rows - 1),
    "scattered": lambda rows: np.arange(rows) % 3 != 1,
}


@jax.jit
def one_layer(table: jax.Array, h: jax.Array, active: jax.Array) -> jax.Array:
    return cold_ffn_ffi(table, 0, h, active)


def table_of(pool: HostPool, *layers: Case, skip_zeros: bool = True) -> HostTable:
    """The layers differ in their arenas and units only."""
    table = HostTable(len(layers))
    arenas, units = [case.bundle for case in layers], [case.units for case in layers]
    table.attach(pool, arenas, units, **layers[0].kind, skip_zeros=skip_zeros)
    return table


@pytest.fixture
def case() -> Case:
    return make_case(0, batch=5, shape=(20, 3, 1, 16), count=20)


@pytest.fixture
def table(pool: HostPool, case: Case) -> Iterator[HostTable]:
    table = table_of(pool, case)
    yield table
    table.detach()


def test_it_is_available_where_the_library_is():
    """In this environment: whoever built one has the compiler, and the headers of jaxlib, for the other."""
    library.load_library()
    assert unavailable() is None


@needs_ffi
@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("activation", ["relu", "drelu", "silu"])
@pytest.mark.parametrize("dtype", TYPES)
def test_it_equals_the_pool_bit_for_bit(pool, dtype, activation, batch, marks):
    case = make_case(1, batch=batch, shape=(90, 3, 1, 40), count=80, dtype=dtype, activation=activation)
    active = MARKS[marks](batch)
    table = table_of(pool, case)
    y = np.asarray(one_layer(table.address, case.x, active))
    wanted = pool.ffn(case.x[active], case.bundle, case.units, **case.kind)
    np.testing.assert_array_equal(y[active], wanted.y)
    np.testing.assert_array_equal(y[~active], 0)
    counters = table.counters()
    assert counters.rows.tolist() == [active.sum()]
    assert counters.live.tolist() == [wanted.live_count.sum()]
    assert counters.computed.tolist() == [80 if active.any() else 0]
    assert counters.bytes_read.tolist() == [wanted.bytes_read if active.any() else 0]
    assert 0 < counters.seconds[0] < 10


@needs_ffi
@pytest.mark.parametrize("wrong", [{"units": slice(0, 19)}, {"activation": "silu"}, {"layer": 1}])
def test_the_comparison_notices_another_layer_unit_or_activation(pool, case, wrong):
    other = make_case(2, batch=5, shape=(20, 3, 1, 16), count=20)
    units = case.units[wrong.get("units", slice(None))]
    bundles = [case.bundle, other.bundle]
    bundles = bundles[::-1] if wrong.get("layer") else bundles
    table = HostTable(2)
    table.attach(pool, bundles, [units, units], activation=wrong.get("activation", "relu"))
    y = one_layer(table.address, case.x, MARKS["all"](5))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(y, pool.ffn(case.x, case.bundle, case.units, **case.kind).y)


@needs_ffi
def test_dense_mode_and_the_threshold_reach_the_kernel(pool):
    case = make_case(3, batch=2, shape=(50, 3, 1, 24), count=50, activation="fatrelu", threshold=2.0)
    for skip_zeros in (True, False):
        table = table_of(pool, case, skip_zeros=skip_zeros)
        y = one_layer(table.address, case.x, MARKS["all"](2))
        wanted = pool.ffn(case.x, case.bundle, case.units, **case.kind, skip_zeros=skip_zeros)
        np.testing.assert_array_equal(y, wanted.y)
        assert table.counters().bytes_read.tolist() == [wanted.bytes_read]


@pytest.fixture
def chain() -> Callable:
    """Three layers, each fed with what the one before gave."""

    @jax.jit
    def run(table: jax.Array, h: jax.Array, active: jax.Array) -> jax.Array:
        for layer in range(3):
            h = cold_ffn_ffi(table, layer, h, active) / 64
        return h

    return run


def chained(pool: HostPool, layers: list[Case], h: np.ndarray) -> np.ndarray:
    for case in layers:
        h = pool.ffn(h, case.bundle, case.units, **case.kind).y / np.float32(64)
    return h


@needs_ffi
def test_layers_in_a_row_and_one_program_for_two_tables(pool, chain):
    """The second table has other weights, another count of units and another pool."""
    ones, others = (
        [make_case(seed + s, batch=3, shape=(30, 3, 1, 16), count=n) for s in range(3)]
        for seed, n in ((10, 30), (20, 17))
    )
    active = MARKS["all"](3)
    h = ones[0].x
    with HostPool(1) as other_pool:
        tables = [table_of(pool, *ones), table_of(other_pool, *others)]
        for _ in range(2):
            for table, layers, own_pool in zip(tables, (ones, others), (pool, other_pool), strict=True):
                np.testing.assert_array_equal(chain(table.address, h, active), chained(own_pool, layers, h))
        assert chain._cache_size() == 1
        assert [table.counters().rows.tolist() for table in tables] == [[6, 6, 6]] * 2


@needs_ffi
def test_counters_add_up_until_they_are_reset(table, case):
    for calls in range(1, 4):
        one_layer(table.address, case.x, MARKS["first"](5)).block_until_ready()
        assert table.counters().rows.tolist() == [2 * calls]
    before = table.counters()
    table.reset()
    assert [counts.tolist() for counts in table.counters()] == [[0]] * 5
    assert before.rows.tolist() == [6]  # a copy


@needs_ffi
def test_a_unit_out_of_range_ends_the_program_with_a_reason(table, case):
    case.units[3] = 20
    with pytest.raises(PROGRAM_FAILED, match="layer 0: unit 3 is out of range"):
        one_layer(table.address, case.x, MARKS["all"](5)).block_until_ready()
    assert isinstance(table.error, ValueError)
    assert str(table.error) == "units must be in [0, 20), got 20 at index 3"
    assert table.error.__notes__ == ["in layer 0"]
    assert table.counters().rows.tolist() == [0]
    case.units[3] = 19
    table.reset()
    assert table.error is None
    one_layer(table.address, case.x, MARKS["all"](5)).block_until_ready()
    assert table.error is None


@needs_ffi
@pytest.mark.parametrize("detached", [True, False])
def test_a_table_with_nothing_attached_is_refused(table, case, detached):
    if detached:
        table.detach()
    else:
        table = HostTable(1)
    with pytest.raises(PROGRAM_FAILED, match="layer 0: nothing is attached"):
        one_layer(table.address, case.x, MARKS["all"](5)).block_until_ready()
    with pytest.raises(RuntimeError, match="layer 0 has no weights"):
        raise table.error


def raw(table: np.ndarray, h: np.ndarray, active: np.ndarray, *, layer: object = np.int32(0), **options) -> jax.Array:
    """The custom call itself, without the checks of `cold_ffn_ffi`."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(h.shape, h.dtype), **options)
    return jax.jit(lambda *operands: call(*operands, layer=layer), donate_argnums=1 if options else ())(
        table, h, active
    )


@needs_ffi
@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("h must be 16 wide, got 15", {"h": np.zeros((5, 15), np.float32)}),
        ("active must have 5 rows, got 4", {"active": np.ones(4, np.bool_)}),
        (r"layer must be in \[0, 1\), got 1", {"layer": np.int32(1)}),
        (r"layer must be in \[0, 1\), got -1", {"layer": np.int32(-1)}),
        (r"the table must be uint32\[2\]", {"table": np.zeros(3, np.uint32)}),
        ("the table's address is zero", {"table": np.zeros(2, np.uint32)}),
        ("Wrong buffer dtype: expected F32 but got F16", {"h": np.zeros((5, 16), np.float16)}),
        ("Wrong buffer rank: expected 2 but got 1", {"h": np.zeros(5, np.float32)}),
        ("Wrong buffer dtype: expected PRED but got U8", {"active": np.ones(5, np.uint8)}),
        ("Wrong scalar data type: expected S32 but got F32", {"layer": np.float32(0)}),
    ],
)
def test_the_handler_names_what_is_wrong(table, case, message, bad):
    arguments = {"table": table.address, "h": case.x, "active": MARKS["all"](5)} | bad
    with pytest.raises(PROGRAM_FAILED, match=message):
        raw(**arguments).block_until_ready()


@needs_ffi
@pytest.mark.parametrize("marks", MARKS)
def test_the_answer_may_lie_where_the_input_was(table, case, marks):
    active = MARKS[marks](5)
    wanted = np.asarray(one_layer(table.address, case.x, active))
    y = raw(table.address, jnp.asarray(case.x), active, input_output_aliases={1: 0})
    np.testing.assert_array_equal(y, wanted)


@needs_ffi
@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (r"table must be uint32 \[2\], got uint32 \[3\]", {"table": np.zeros(3, np.uint32)}),
        (r"table must be uint32 \[2\], got int32 \[2\]", {"table": np.zeros(2, np.int32)}),
        (r"h must be float32 \[T,D\], got float16 \[5, 16\]", {"h": np.zeros((5, 16), np.float16)}),
        (r"h must be float32 \[T,D\], got float32 \[5\]", {"h": np.zeros(5, np.float32)}),
        (r"active must be bool \[5\], got bool \[4\]", {"active": np.ones(4, np.bool_)}),
    ],
)
def test_a_wrong_operand_is_named_while_tracing(table, case, message, bad):
    arguments = {"table": table.address, "h": case.x, "active": MARKS["all"](5)} | bad
    with pytest.raises(ValueError, match=message):
        one_layer(**arguments)


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("arenas must have 1 layers, got 0", {"arenas": []}),
        ("units_by_layer must have 1 layers, got 2", {"units_by_layer": [np.zeros(1, np.int32)] * 2}),
        ("units must be int32, got int64", {"units_by_layer": [np.arange(3)]}),
        (
            "bundle must be float32, float16 or bfloat16, or packed in uint8, got int8",
            {"arenas": [np.zeros((2, 3, 1, 16), np.int8)]},
        ),
        ("with drelu, got 2", {"arenas": [np.zeros((2, 2, 1, 16), np.float16)], "activation": "drelu"}),
        ("activation must be one of", {"activation": "gelu"}),
        ("threshold must be 0", {"threshold": 1.0}),
        ("pool must be a HostPool, got NumpyPool", {"pool": NumpyPool(1)}),
    ],
)
def test_attach_names_what_is_wrong_and_changes_nothing(table, pool, case, message, bad):
    good = {"pool": pool, "arenas": [case.bundle], "units_by_layer": [case.units], "activation": "relu"}
    with pytest.raises(ValueError, match=message):
        table.attach(**(good | bad))
    y = one_layer(table.address, case.x, MARKS["all"](5))
    np.testing.assert_array_equal(y, pool.ffn(case.x, case.bundle, case.units, **case.kind).y)


def test_a_closed_pool_is_not_attached(case):
    pool = HostPool(1)
    pool.close()
    with pytest.raises(ValueError, match="pool must be open"):
        HostTable(1).attach(pool, [case.bundle], [case.units], activation="relu")


def test_a_table_needs_a_layer():
    with pytest.raises(ValueError, match="layers must be >= 1, got 0"):
        HostTable(0)


@needs_ffi
def test_the_table_keeps_what_it_points_at(pool):
    case = make_case(4, batch=2, shape=(3000, 3, 1, 16), count=3000)
    x, wanted = case.x, pool.ffn(case.x, case.bundle, case.units, **case.kind).y
    table = table_of(pool, case)
    del case
    gc.collect()
    np.testing.assert_array_equal(one_layer(table.address, x, MARKS["all"](2)), wanted)


def test_without_the_library_the_reason_is_told(monkeypatch):
    """Not cached: the answer of the process stays."""
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    reason = unavailable.__wrapped__()
    assert "999 is needed" in reason and "setup.py build_ext --inplace" in reason


REFUSED = """
import ctypes
from types import SimpleNamespace

import jax
from hostcompute import ffi

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def handler(frame):  # XLA_FFI_CallFrame -> XLA_FFI_Metadata_Extension -> XLA_FFI_Metadata.api_version
    metadata = ctypes.c_void_p.from_address(frame[1] + 24).value
    version = (ctypes.c_int32 * 2).from_address(metadata + 24)
    version[0], version[1] = 0, 99

ffi.find_library = lambda stem: SimpleNamespace(dynajax_cold_ffn=handler)
print(ffi.unavailable())
print(jax.numpy.ones(3).sum())
"""


def test_a_handler_that_jaxlib_refuses_leaves_the_backend_alone():
    """One built against newer headers, in a process whose backends have not been started."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    reason, total = done.stdout.strip().rsplit("\n", 1)
    assert "refuses the handler" in reason and "(0.99) is incompatible" in reason and "--force" in reason
    assert total == "3.0"
