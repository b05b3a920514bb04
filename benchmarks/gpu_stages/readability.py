"""Stage `readability`."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_stages.device import facts, is_cpu, spread_us, times_s
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.work import Products, Work

HEAVY_S = 0.02
VECTOR_BYTES = (8192, 16384)  # a hidden state of 2,048 or 4,096 numbers


def run(report: Report) -> None:
    """When can the host read a program's cheap result while the device goes on, and how long does 8-16 KiB take?

    The engine cuts a layer into two programs so that the host gets h before the hot FFN is done. If one program's
    cheap output were readable early (`one_program` far below `heavy`), a layer could be one program. If `two_programs`
    is no better than `heavy`, the halves cannot overlap at all and the host's share should shrink. `latency` is what
    every layer pays for its cold half; without `copy_to_host_async` being faster, the call can go.
    """
    report.add(**facts())
    repeat = 5 if is_cpu() else 20
    products = Products()
    work = products.work(HEAVY_S)
    report.add(
        heavy_us=round(work.seconds * 1e6, 1),
        one_program_us=spread_us(one_program(products, repeat)),
        two_programs_us=spread_us(two_programs(work, repeat, ahead=True)),
        two_programs_no_async_us=spread_us(two_programs(work, repeat, ahead=False)),
    )
    report.add(latency_us={str(nbytes): latency_us(nbytes, 4 * repeat) for nbytes in VECTOR_BYTES})


def vector(nbytes: int) -> jax.Array:
    return jnp.arange(nbytes // 4, dtype=jnp.float32)[None, :]


def read_times(dispatch: Callable[[], tuple[jax.Array, jax.Array]], repeat: int) -> list[float]:
    """Seconds from the dispatch of (cheap, heavy) until cheap is a NumPy array; heavy is waited for in between."""
    times = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        cheap, heavy = dispatch()
        np.asarray(cheap)
        times.append(time.perf_counter() - start)
        heavy.block_until_ready()
    return times[2:]


def one_program(products: Products, repeat: int) -> list[float]:
    """Both results from the same program."""
    count, value = products.count(HEAVY_S), vector(VECTOR_BYTES[-1])
    program = jax.jit(lambda v, a: (v * 2, products.chain(a, count)))
    return read_times(lambda: program(value, products.operand), repeat)


def two_programs(work: Work, repeat: int, *, ahead: bool) -> list[float]:
    """The cheap program first, the heavy one dispatched before the cheap result is asked for; ahead: copied early."""
    cheap_program = jax.jit(lambda v: v * 2)
    value = vector(VECTOR_BYTES[-1])

    def dispatch() -> tuple[jax.Array, jax.Array]:
        cheap = cheap_program(value)
        if ahead:
            cheap.copy_to_host_async()
        return cheap, work.run()

    return read_times(dispatch, repeat)


def latency_us(nbytes: int, repeat: int) -> dict[str, dict[str, float]]:
    """A small program and the way of its result to the host; of a result that is ready, the way alone."""
    program = jax.jit(lambda v: v * 2)
    value = vector(nbytes)
    ready = iter([program(value).block_until_ready() for _ in range(repeat + 2)])

    def early() -> None:
        result = program(value)
        result.copy_to_host_async()
        np.asarray(result)

    return {
        "dispatch_and_read": spread_us(times_s(lambda: np.asarray(program(value)), repeat)),
        "dispatch_copy_async_and_read": spread_us(times_s(early, repeat)),
        "read_alone": spread_us(times_s(lambda: np.asarray(next(ready)), repeat)),
        "program_alone": spread_us(times_s(lambda: program(value).block_until_ready(), repeat)),
    }
