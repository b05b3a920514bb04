"""Programs are compiled once for all tests here, and quickly: what they compute counts, not their speed."""

import gc

import pytest

from tests.shared_programs import shared_programs

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="session", autouse=True)
def shared_compilation():
    gc.freeze()  # every engine collects garbage when it opens, and need not walk through all imported modules then
    with shared_programs(QUICK):
        yield
    gc.unfreeze()
