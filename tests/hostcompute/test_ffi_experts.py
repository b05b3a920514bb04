"""The routed experts on the host inside jitted programs: the custom call, and the callback it is held against."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcompute import HostPool, unit_weights
from hostcompute.callback import CallbackSlot, cold_experts_callback
from hostcompute.ffi import EXPERTS, HostTable, cold_experts_ffi, unavailable
from tests.hostcompute.cases import TYPES, Case, make_case

PROGRAM_FAILED = (jax.errors.JaxRuntimeError, ValueError)  # the latter from a program that ran before
EXPERT_COUNT, CHOICES = 12, 3


@dataclass(frozen=True, eq=False)
class Routed:
    case: Case  # its units are the experts on the host
    ids: np.ndarray  # [B,K]
    weights: np.ndarray  # [B,K]
    active: np.ndarray  # [B]

    @property
    def operands(self) -> tuple[np.ndarray, ...]:
        return self.case.x, self.ids, self.weights, self.active

    def unit_weights(self) -> np.ndarray:
        """[B,C], zero for the rows that are not active."""
        return unit_weights(self.ids, self.weights, self.case.units, EXPERT_COUNT) * self.active[:, None]

    def on_host(self, pool: HostPool, layer: int, h: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        case = self.case
        wanted = unit_weights(ids, weights, case.units, EXPERT_COUNT)
        return pool.ffn(h, case.bundle, case.units, **case.kind, weights=wanted * self.active[:, None]).y


def routed_case(seed: int = 0, *, batch: int = 6, activation: str = "silu", dtype: type = np.float32) -> Routed:
    """Seven of the twelve experts are on the host, in no order; a third of the rows is not active."""
    rng = np.random.default_rng(seed)
    case = make_case(seed, batch=batch, shape=(EXPERT_COUNT, 3, 20, 24), count=0, dtype=dtype, activation=activation)
    units = rng.permutation(EXPERT_COUNT)[:7].astype(np.int32)
    case = Case(case.x, case.bundle, units, activation, 0.0)
    ids = np.stack([rng.permutation(EXPERT_COUNT)[:CHOICES] for _ in range(batch)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    return Routed(case, ids, weights, np.arange(batch) % 3 != 1)


def table_of(pool: HostPool, *layers: Routed, skip_zeros: bool = True) -> HostTable:
    table = HostTable(len(layers))
    arenas, units = [one.case.bundle for one in layers], [one.case.units for one in layers]
    table.attach(pool, arenas, units, **layers[0].case.kind, skip_zeros=skip_zeros)
    return table


@jax.jit
def one_layer(table: jax.Array, *operands: jax.Array) -> jax.Array:
    return cold_experts_ffi(table, 0, *operands)


def computed(pool: HostPool, one: Routed, *operands: np.ndarray) -> np.ndarray:
    """What the custom call gives; the table lives until it is there."""
    table = table_of(pool, one)
    return np.asarray(one_layer(table.address, *(operands or one.operands)))


@pytest.fixture(scope="module", autouse=True)
def handler() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no FFI handler: {reason}")


@pytest.mark.parametrize("batch", [1, 2, 6, 50])
@pytest.mark.parametrize("activation", ["relu", "drelu", "silu"])
@pytest.mark.parametrize("dtype", TYPES)
def test_it_equals_the_pool_bit_for_bit(pool, dtype, activation, batch):
    one = routed_case(1, batch=batch, activation=activation, dtype=dtype)
    table, case, weights = table_of(pool, one), one.case, one.unit_weights()
    y = np.asarray(one_layer(table.address, *one.operands))
    wanted = pool.ffn(case.x, case.bundle, case.units, **case.kind, weights=weights)
    np.testing.assert_array_equal(y, wanted.y)
    np.testing.assert_array_equal(y[~one.active], 0)
    counters = table.counters()
    assert counters.rows.tolist() == [one.active.sum()]
    assert counters.live.tolist() == [(weights != 0).sum()]
    assert counters.computed.tolist() == [(weights != 0).any(axis=0).sum()]
    assert counters.bytes_read.tolist() == [wanted.bytes_read]
    assert 0 < counters.seconds[0] < 10


@pytest.mark.parametrize("batch", [1, 6])
def test_it_equals_the_callback_and_the_reference(pool, batch):
    one = routed_case(2, batch=batch)

    @jax.jit
    def by_callback(layer: jax.Array, *operands: jax.Array) -> jax.Array:
        return cold_experts_callback(lambda *given: one.on_host(pool, *given), layer, *operands)

    y = computed(pool, one)
    plain = np.asarray(by_callback(np.int32(0), *one.operands[:3]))
    weighted = Case(one.case.x, one.case.bundle, one.case.units, "silu", 0.0, weights=one.unit_weights())
    for answer in (y, plain):
        np.testing.assert_allclose(answer, weighted.reference()[0], rtol=0, atol=weighted.tolerance())
    np.testing.assert_array_equal(plain[~one.active], 0)


@pytest.mark.parametrize("fault", ["ids", "weights", "active", "units", "h"])
def test_the_comparison_notices_another_operand(pool, fault):
    one = routed_case(3)
    case, weights = one.case, one.unit_weights()
    wanted = pool.ffn(case.x, case.bundle, case.units, **case.kind, weights=weights).y
    h, ids, expert_weights, active = one.operands
    if fault == "units":
        one = Routed(
            replace(case, units=np.roll(case.units, -np.abs(weights).sum(axis=0).argmax())[1:].copy()),
            *one.operands[1:],
        )
    wrong = {
        "ids": (h, np.roll(ids, 1, axis=1), expert_weights, active),
        "weights": (h, ids, np.roll(expert_weights, 1, axis=0), active),
        "active": (h, ids, expert_weights, ~active),
        "units": one.operands,
        "h": (h[::-1], ids, expert_weights, active),
    }[fault]
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(computed(pool, one, *wrong), wanted)


def test_an_expert_chosen_twice_counts_twice_and_is_one_pair(pool):
    one = routed_case(4, batch=1)
    ids = np.full((1, CHOICES), one.case.units[2], np.int32)
    twice = Routed(one.case, ids, one.weights, np.ones(1, np.bool_))
    table = table_of(pool, twice)
    y = one_layer(table.address, *twice.operands)
    case = one.case
    weights = np.zeros((1, 7), np.float32)
    weights[0, 2] = one.weights.sum()
    np.testing.assert_allclose(y, pool.ffn(case.x, case.bundle, case.units, **case.kind, weights=weights).y, rtol=1e-5)
    assert (table.counters().live[0], table.counters().computed[0]) == (1, 1)


@pytest.mark.parametrize("why", ["nobody active", "all elsewhere", "no units", "no rows", "no choices"])
def test_nothing_to_compute_gives_zeros_and_reads_nothing(pool, why):
    one = routed_case(5)
    case, ids, weights, active = one.case, one.ids, one.weights, one.active
    if why == "nobody active":
        active = np.zeros_like(active)
    elif why == "all elsewhere":
        ids = np.full_like(ids, np.setdiff1d(np.arange(EXPERT_COUNT), case.units)[0])
    elif why == "no units":
        case = Case(case.x, case.bundle, np.empty(0, np.int32), "silu", 0.0)
    elif why == "no rows":
        case, ids, weights, active = (
            Case(case.x[:0], case.bundle, case.units, "silu", 0.0),
            ids[:0],
            weights[:0],
            active[:0],
        )
    else:
        ids, weights = ids[:, :0], weights[:, :0]
    one = Routed(case, ids, weights, active)
    table = table_of(pool, one)
    y = np.asarray(one_layer(table.address, *one.operands))
    assert y.shape == case.x.shape and not y.any()
    counters = table.counters()
    assert [int(counts[0]) for counts in (counters.live, counters.computed, counters.bytes_read)] == [0, 0, 0]


def test_experts_that_no_active_row_chose_are_not_read(pool):
    one = routed_case(6)
    one.case.bundle[one.case.units[~(one.unit_weights() != 0).any(axis=0)]] = np.nan
    one.ids[~one.active] = one.case.units[0]
    one.case.x[~one.active] = np.nan
    assert np.isfinite(computed(pool, one)).all()


@pytest.mark.parametrize("bad", [EXPERT_COUNT, -1, -(2**31), 2**31 - 1])
def test_an_id_out_of_range_ends_the_program_with_a_reason(pool, bad):
    one = routed_case(7)
    table, right = table_of(pool, one), one.ids[2, 1]
    one.ids[2, 1] = bad
    with pytest.raises(PROGRAM_FAILED, match=f"layer 0: there is no expert {bad}"):
        one_layer(table.address, *one.operands).block_until_ready()
    assert isinstance(table.error, ValueError)
    assert str(table.error) == f"ids must be in [0, 12), got {bad}"
    assert table.counters().rows.tolist() == [0]
    one.ids[2, 1] = right
    one.ids[1, 1] = bad  # of a row that is not active
    table.reset()
    one_layer(table.address, *one.operands).block_until_ready()
    assert table.error is None


def test_a_unit_out_of_range_is_told_from_an_expert(pool):
    one = routed_case(8)
    table = table_of(pool, one)
    one.case.units[3] = EXPERT_COUNT
    with pytest.raises(PROGRAM_FAILED, match="layer 0: unit 3 is out of range"):
        one_layer(table.address, *one.operands).block_until_ready()
    assert str(table.error) == "units must be in [0, 12), got 12 at index 3"


def test_units_that_change_take_effect_at_the_next_call(pool):
    one = routed_case(9)
    table = table_of(pool, one)
    before = np.asarray(one_layer(table.address, *one.operands))
    one.case.units[...] = np.arange(7)
    after = np.asarray(one_layer(table.address, *one.operands))
    case, weights = one.case, one.unit_weights()
    np.testing.assert_array_equal(after, pool.ffn(case.x, case.bundle, case.units, **case.kind, weights=weights).y)
    assert (before != after).any()


def test_layers_have_their_own_experts_and_counters(pool):
    layers = [routed_case(seed) for seed in (10, 11)]

    @jax.jit
    def both(table: jax.Array, *operands: jax.Array) -> jax.Array:
        return cold_experts_ffi(table, 0, *operands) + cold_experts_ffi(table, 1, *operands)

    table = table_of(pool, *layers)
    operands = layers[0].operands
    y = both(table.address, *operands)
    alone = [computed(pool, one, *operands) for one in layers]
    np.testing.assert_allclose(y, alone[0] + alone[1], rtol=1e-6, atol=1e-5)
    assert table.counters().rows.tolist() == [operands[3].sum()] * 2


BAD_OPERANDS = [
    (r"ids must be int32 \[6,K\], got float32 \[6, 3\]", {"ids": np.zeros((6, 3), np.float32)}),
    (r"ids must be int32 \[6,K\], got int32 \[5, 3\]", {"ids": np.zeros((5, 3), np.int32)}),
    (r"weights must be float32 \[6, 3\], got float32 \[6, 2\]", {"weights": np.zeros((6, 2), np.float32)}),
    (r"active must be bool \[6\], got bool \[5\]", {"active": np.ones(5, np.bool_)}),
    (r"h must be float32 \[T,D\], got float16 \[6, 24\]", {"h": np.zeros((6, 24), np.float16)}),
]


@pytest.mark.parametrize(("message", "bad"), BAD_OPERANDS)
def test_a_wrong_operand_is_named_while_tracing(pool, message, bad):
    one = routed_case(12)
    given = dict(zip(("h", "ids", "weights", "active"), one.operands, strict=True)) | bad
    with pytest.raises(ValueError, match=message):
        computed(pool, one, *given.values())
    given.pop("active")
    if "active" not in bad:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda *operands: cold_experts_callback(scaled, jnp.int32(0), *operands), *given.values())


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("ids must have 6 rows, got 5", {"ids": np.zeros((5, 3), np.int32)}),
        ("weights must have the shape of ids", {"weights": np.zeros((6, 2), np.float32)}),
        ("dynajax_cold_experts: active must have 6 rows, got 5", {"active": np.ones(5, np.bool_)}),
        ("h must be 24 wide, got 23", {"h": np.zeros((6, 23), np.float32)}),
        (r"layer must be in \[0, 1\), got 1", {"layer": np.int32(1)}),
        ("Wrong buffer dtype: expected S32 but got U32", {"ids": np.zeros((6, 3), np.uint32)}),
    ],
)
def test_the_handler_names_what_is_wrong(pool, message, bad):
    """The custom call itself, without the checks of `cold_experts_ffi`."""
    one = routed_case(13)
    given = dict(zip(("h", "ids", "weights", "active"), one.operands, strict=True)) | {"layer": np.int32(0)} | bad
    layer = given.pop("layer")
    call = jax.ffi.ffi_call(EXPERTS, jax.ShapeDtypeStruct(given["h"].shape, np.float32))
    table = table_of(pool, one)
    with pytest.raises(PROGRAM_FAILED, match=message):
        jax.jit(lambda *operands: call(*operands, layer=layer))(table.address, *given.values()).block_until_ready()


def scaled(layer: int, h: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    assert type(layer) is int and type(ids) is np.ndarray
    return h * weights.sum(axis=1, keepdims=True) * np.float32(layer + 1)


def test_the_layer_of_the_callback_may_be_traced():
    one = routed_case(14)
    program = jax.jit(lambda layer, *operands: cold_experts_callback(scaled, layer, *operands))
    y = np.asarray(program(np.int32(4), *one.operands[:3]))
    np.testing.assert_array_equal(y, one.case.x * one.weights.sum(axis=1, keepdims=True) * 5)


def test_an_exception_of_the_callback_arrives_with_its_type(pool):
    one = routed_case(15)
    one.ids[0, 0] = EXPERT_COUNT
    slot = CallbackSlot()
    program = jax.jit(
        lambda *operands: cold_experts_callback(lambda *g: one.on_host(pool, *g), jnp.int32(0), *operands, slot=slot)
    )
    with pytest.raises(ValueError, match=r"ids must be in \[0, 12\), got 12"), slot:
        program(*one.operands[:3]).block_until_ready()
