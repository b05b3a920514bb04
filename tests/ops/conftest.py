"""Ops also run where types are never mixed silently; not everywhere, since flax and optax break under it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_types():
    with jax.numpy_dtype_promotion("strict"):
        yield
