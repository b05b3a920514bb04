"""Matrix products and norms that keep the residual stream in float32, whatever the weights are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from dynajax.ops.packed import packed_dot, packed_sum, unpacked
from hostcompute import ffi


def as_weights(part: jax.Array) -> jax.Array:
    """An array as numbers: uint16 holds the bits of bfloat16, which jax 0.10 cannot update in place on CPU, and uint8 a
    packed matrix with one axis more."""
    if part.dtype == jnp.uint8:
        return unpacked(part)
    return jax.lax.bitcast_convert_type(part, jnp.bfloat16) if part.dtype == jnp.uint16 else part


def contract(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with weights `b`, float, the bits of bfloat16 as uint16, or packed; accumulated and returned in float32.

    float32 weights ask for full precision: on GPUs the default would be TF32, and placement could
    then change an answer by more than summation order. 16-bit weights round `a` to their type on a GPU. On the CPU
    backend, whose own 16-bit products are slow, they do not: the host's kernels read a matrix as it is, and what is
    no matrix becomes float32 first. Gradients are those of `contract_reference`. Packed weights round nothing; they are
    matrices that the last axis of `a` meets, and have no gradient.
    """
    if b.dtype == jnp.uint8:
        return _contract_packed(subscripts, a, b)
    return contract_reference(subscripts, a, b) if b.dtype == jnp.float32 else _contract_narrow(subscripts, a, b)


def contract_reference(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """What `contract` must compute, in the type of `b`."""
    b = as_weights(b)
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32)


def contract_each(a: jax.Array, matrices: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`contract("...D,OD->...O", a, b)` for each of several matrices b, for which the CPU backend makes one call.

    That is where they are alike but for their rows, and not float32.
    """
    alike = len({(b.dtype, b.shape[1:]) for b in matrices}) == 1
    if not alike or matrices[0].dtype == jnp.float32:
        return _contract_apart(a, tuple(matrices))
    return _contract_alike(a, tuple(matrices))


def _contract_apart(a: jax.Array, matrices: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(contract("...D,OD->...O", a, b) for b in matrices)


@jax.custom_jvp
def _contract_alike(a: jax.Array, matrices: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return jax.lax.platform_dependent(a, matrices, cpu=_each_on_cpu, default=_contract_apart)


@_contract_alike.defjvp
def _alike_jvp(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    return jax.jvp(_contract_apart, primals, tangents)


def _each_on_cpu(a: jax.Array, matrices: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if ffi.unavailable() is not None:
        return _contract_apart(a, matrices)
    found = ffi.dot_each_ffi(_as_rows(a), matrices)
    return tuple(y.reshape(*a.shape[:-1], y.shape[1]) for y in found)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _contract_narrow(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    plain = partial(contract_reference, subscripts)
    return jax.lax.platform_dependent(a, b, cpu=partial(_contract_on_cpu, subscripts), default=plain)


@_contract_narrow.defjvp
def _contract_jvp(subscripts: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(partial(contract_reference, subscripts), primals, tangents)


def _contract_on_cpu(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    by_rows = _meets_rows(subscripts)
    if by_rows is None:
        return contract_reference(subscripts, a, as_weights(b).astype(jnp.float32))
    if ffi.unavailable() is not None:
        return contract_reference(subscripts, a, b)
    return _by_rows(ffi.dot_rows_ffi if by_rows else ffi.sum_rows_ffi, a, b)


def _contract_packed(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    by_rows = _meets_rows(subscripts)
    if by_rows is None:
        raise ValueError(f"packed weights must be a matrix that the last axis of `a` meets, got {subscripts}")
    return _by_rows(packed_dot if by_rows else packed_sum, a, b)


def _meets_rows(subscripts: str) -> bool | None:
    """How the last axis of `a` meets the matrix `b`: every row of it (True) or every column; None if neither."""
    inputs, out = subscripts.split("->")
    left, right = inputs.split(",")
    if len(right) != 2 or left[:-1] != out[:-1] or {left[-1], out[-1]} != set(right):
        return None
    return right[1] == left[-1]


def _by_rows(product: Callable[[jax.Array, jax.Array], jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of float32 rows [T, ...] with `a`, whatever axes it has before the last."""
    found = product(_as_rows(a), b)
    return found.reshape(*a.shape[:-1], found.shape[1])


def _as_rows(a: jax.Array) -> jax.Array:
    return a.astype(jnp.float32).reshape(math.prod(a.shape[:-1]), a.shape[-1])


def rms_norm(
    x: jax.Array,  # [..., D] float32
    weight: jax.Array,  # [D]
    eps: float,
) -> jax.Array:
    """x / rms(x) * weight, in float32 (Zhang & Sennrich 2019, without the mean)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def layer_norm(
    x: jax.Array,  # [..., D] float32
    weight: jax.Array,  # [D]
    bias: jax.Array,  # [D]
    eps: float,
) -> jax.Array:
    """(x - mean) / deviation * weight + bias, in float32 (Ba et al. 2016)."""
    ends = (1,) * (x.ndim - 1) + (-1,)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + jnp.float32(eps))
    return centred * scale * weight.astype(jnp.float32).reshape(ends) + bias.astype(jnp.float32).reshape(ends)
