"""Sparse FFN and row gather on the host: a C++ library with its own threads, and NumPy where there is none.

Imports only NumPy. `hostcompute.callback`, which needs jax, is imported by name.
"""

from hostcompute.checks import FfnResult
from hostcompute.library import HostPool, default_threads, open_pool
from hostcompute.numpy_pool import NumpyPool
from hostcompute.reference import ffn_reference, gather_reference
from hostcompute.routing import unit_weights

__all__ = [
    "FfnResult",
    "HostPool",
    "NumpyPool",
    "default_threads",
    "ffn_reference",
    "gather_reference",
    "open_pool",
    "unit_weights",
]
