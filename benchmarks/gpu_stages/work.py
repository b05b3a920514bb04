"""A program that keeps the device busy for a chosen time, for whatever should run beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

import jax
import jax.numpy as jnp

from benchmarks.gpu_stages.device import is_cpu, median_s

SAMPLE = 8  # products in the program that shows how long one takes


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """`run()` dispatches a program that takes about `seconds` and returns its result, not ready yet."""

    run: Callable[[], jax.Array]
    seconds: float


class Products:
    """Products of one square matrix with itself, as many as are wanted.

    Their number is a constant of each program: a loop that asks the device when to end would hold up the host.
    """

    def __init__(self) -> None:
        size = 256 if is_cpu() else 4096
        self.operand = jnp.full((size, size), 1 / size, jnp.float32 if is_cpu() else jnp.bfloat16)
        self._made: dict[int, Work] = {}
        self.each_s = self._of(SAMPLE).seconds / SAMPLE

    def work(self, target_s: float) -> Work:
        """A power of two of products that take `target_s` or more, up to twice that if one does not take longer."""
        return self._of(self.count(target_s))

    def count(self, target_s: float) -> int:
        """How many products `work` would run."""
        return 2 ** max(0, ceil(log2(target_s / self.each_s)))

    @staticmethod
    def chain(a: jax.Array, count: int) -> jax.Array:
        """The products themselves, to be traced into a larger program."""
        return jax.lax.fori_loop(0, count, lambda _, b: b @ a, a)

    def _of(self, count: int) -> Work:
        if count not in self._made:
            program = jax.jit(lambda a: self.chain(a, count))

            def run() -> jax.Array:
                return program(self.operand)

            self._made[count] = Work(run, median_s(lambda: run().block_until_ready(), 5))
        return self._made[count]
