"""Which threads and kernels the products of programs run in."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hostcompute import default_threads
from hostcompute.ffi import unavailable
from tests.hostcompute.cases import ISAS
from tests.hostcompute.test_matmul import needs_ffi, product

SCRIPT = """
import os, sys
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
from hostcompute import HostPool
from hostcompute.ffi import dot_rows_ffi

def workers():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("hostcompute-") for name in names)

run = jax.jit(dot_rows_ffi)
x, weights = jnp.ones((1, 600)), jnp.ones((600, 600), jnp.float16)
"""


def script(body: str, **environment: str) -> list[str]:
    """What a process of its own prints; it must end well and complain of nothing."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + body],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


@needs_ffi
def test_programs_run_in_the_threads_of_the_pool_opened_first():
    found = script("""
first, other, again = HostPool(4), HostPool(3), HostPool(4)
print(workers())  # 3 + 2
run(x, weights).block_until_ready(); print(workers())
first.close(); run(x, weights).block_until_ready(); print(workers())
again.close(); print(workers())
other.close(); print(workers())
run(x, weights).block_until_ready(); print(workers())
with HostPool(6): run(x, weights).block_until_ready(); print(workers())
""")
    own = default_threads() - 1
    assert list(map(int, found)) == [5, 5, 5, 2, 0, own, own + 5]


@needs_ffi
def test_threads_are_shared_with_those_of_a_program():
    found = script("""
run(x, weights).block_until_ready(); own = workers()
with HostPool(own + 1), HostPool(own + 1): print(workers() - own)
print(workers() - own)
""")
    assert found == ["0", "0"]


@needs_ffi
def test_pools_may_come_and_go_while_a_program_runs():
    """Each that opens first gets the calls that follow, and may be closed in the middle of one."""
    assert script("""
from threading import Event, Thread

wanted, wrong, runs, done = np.asarray(run(x, weights)), [], [], Event()

def compute():
    while not done.is_set():
        runs.append(1)
        if not np.array_equal(run(x, weights), wanted):
            wrong.append(1)

worker = Thread(target=compute)
worker.start()
for turn in range(300):
    with HostPool(1 + turn % 3) as one, HostPool(2) as two:
        one.close()
        two.read_sum(wanted)
done.set()
worker.join()
print(len(wrong), len(runs) > 100)
""") == ["0", "True"]


@needs_ffi
@pytest.mark.parametrize("isa", ISAS)
def test_the_instruction_set_holds_for_programs_too(pool_of, isa):
    """Kernels differ in the order of summation, which shows in the bits."""
    pool_of(isa, 1)  # skips where the CPU lacks it
    body = "rng = np.random.default_rng(0)\n"
    body += "x, w = (rng.standard_normal(s, np.float32) for s in ((1, 999), (70, 999)))\n"
    body += "print(np.asarray(run(x, w.astype(np.float16))).tobytes().hex())"
    rng = np.random.default_rng(0)
    x, weights = (rng.standard_normal(shape, np.float32) for shape in ((1, 999), (70, 999)))
    (bits,) = script(body, HOSTCOMPUTE_ISA=isa)
    assert bits == product(pool_of(isa, 1), x, weights.astype(np.float16), sums=False).tobytes().hex()


def test_an_instruction_set_that_is_not_there_is_told(monkeypatch):
    """Not cached: the answer of the process stays."""
    monkeypatch.setenv("HOSTCOMPUTE_ISA", "sse9")
    assert "HOSTCOMPUTE_ISA must be portable, avx2, avx512 or avx512vnni, got 'sse9'" in unavailable.__wrapped__()


@needs_ffi
@pytest.mark.parametrize("ending", ["", "pool = HostPool(3)\n"])
def test_a_process_may_end_while_a_program_runs(ending):
    """With a pool that nobody closed, or with none."""
    body = "weights = jnp.ones((3000, 600), jnp.float16)\nfor _ in range(50): y = run(x, weights)\nprint('over')"
    assert script(ending + body) == ["over"]
