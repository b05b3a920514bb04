"""Decisions, as pure NumPy functions from numbers to frozen plans. No jax, threads, clocks or randomness."""
