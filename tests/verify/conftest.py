"""Tiny models of every family; programs compiled once, and quickly: what they compute counts here, not their speed."""

from pathlib import Path

import pytest

from dynajax.testing.families import FAMILIES, write
from tests.shared_programs import shared_programs

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="package", autouse=True)
def shared_compilation():
    with shared_programs(QUICK):
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model of every family, and of some a copy in 16 bits."""
    root = tmp_path_factory.mktemp("families")
    made = {family: write(root / family, family) for family in FAMILIES}
    made |= {f"llama-{dtype}": write(root / dtype, "llama", dtype=dtype) for dtype in ("float16", "bfloat16")}
    return made
