from collections.abc import Callable, Iterator

import pytest

from hostcompute import HostPool
from hostcompute.ffi import unavailable
from tests.hostcompute.cases import make_pool


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[str, int], HostPool]]:
    """pool_of(isa, threads): opened once, closed at the end."""
    pools: dict[tuple[str, int], HostPool] = {}

    def find(isa: str, threads: int) -> HostPool:
        if (isa, threads) not in pools:
            pools[isa, threads] = make_pool(isa, threads)
        return pools[isa, threads]

    yield find
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with HostPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def handler() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no FFI handler: {reason}")
