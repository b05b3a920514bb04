"""The host function as a callback inside a jitted program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hostcompute import HostPool
from hostcompute.callback import CallbackSlot, cold_ffn_callback
from tests.hostcompute.cases import make_case

H = np.arange(6, dtype=np.float32).reshape(2, 3)


class HostFailure(Exception):
    pass


def scale(layer: int, h: np.ndarray) -> np.ndarray:
    assert type(layer) is int and type(h) is np.ndarray
    return h * np.float32(layer + 1)


def fail_at_two(layer: int, h: np.ndarray) -> np.ndarray:
    if layer >= 2:
        raise HostFailure(f"layer {layer}")
    return h


def in_jit(host_fn, slot=None):
    return jax.jit(lambda layer, h: cold_ffn_callback(host_fn, layer, h, slot))


def layers_in_jit(host_fn, slot=None):
    def body(layer, h):
        return cold_ffn_callback(host_fn, layer, h, slot)

    return jax.jit(lambda h: jax.lax.fori_loop(0, 4, body, h))


def test_the_host_function_gets_plain_numbers_and_arrays():
    np.testing.assert_array_equal(in_jit(scale)(np.int32(4), H), 5 * H)


def test_the_layer_may_be_traced():
    np.testing.assert_array_equal(layers_in_jit(scale)(H), 24 * H)


def test_the_native_pool_computes_inside_a_program():
    case = make_case(0, batch=3, shape=(20, 3, 1, 16), count=20)
    wanted, _ = case.reference()
    with HostPool(2) as pool:
        program = in_jit(lambda layer, h: pool.ffn(h, case.bundle, case.units, **case.kind).y)
        y = np.asarray(program(np.int32(0), case.x))
    np.testing.assert_allclose(y, wanted, rtol=0, atol=case.tolerance())


def test_an_exception_arrives_with_its_type():
    slot = CallbackSlot()
    calls = []

    def host_fn(layer, h):
        calls.append(layer)
        return fail_at_two(layer, h)

    program = layers_in_jit(host_fn, slot)
    with pytest.raises(HostFailure, match="layer 2"), slot:
        program(H).block_until_ready()
    assert calls == [0, 1, 2]  # not called again after the failure


def test_the_slot_is_empty_again_after_a_failure():
    slot = CallbackSlot()
    program = in_jit(fail_at_two, slot)
    with pytest.raises(HostFailure), slot:
        program(np.int32(2), H).block_until_ready()
    with slot:
        np.testing.assert_array_equal(program(np.int32(1), H), H)


def test_an_exception_outside_the_block_is_not_swallowed():
    program = in_jit(fail_at_two, CallbackSlot())
    with pytest.raises(Exception, match="layer 2"):
        program(np.int32(2), H).block_until_ready()


def test_the_block_does_not_hide_an_exception_of_its_own():
    with pytest.raises(KeyError), CallbackSlot():
        raise KeyError("caller")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda layer, h: h.astype(np.float64), "host_fn must return float32 \\[2, 3\\], got float64"),
        (lambda layer, h: h[:1], "host_fn must return float32 \\[2, 3\\], got float32 \\[1, 3\\]"),
    ],
)
def test_a_wrong_result_is_named(bad, message):
    slot = CallbackSlot()
    with pytest.raises(ValueError, match=message), slot:
        in_jit(bad, slot)(np.int32(0), H).block_until_ready()


def test_only_float32_rows_are_accepted():
    with pytest.raises(ValueError, match=r"h must be float32 \[T,D\], got float32 \[3\]"):
        cold_ffn_callback(scale, jnp.int32(0), jnp.zeros(3))
