"""Small random models for the engine's tests, each written once a run, and programs compiled once a run."""

from pathlib import Path

import pytest

from dynajax.testing import make_checkpoint
from tests.engine.cases import SPECS
from tests.shared_programs import shared_programs


@pytest.fixture(scope="session", autouse=True)
def shared_compilation():
    with shared_programs():
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of every model in SPECS."""
    root = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(root / name, spec, shards=2) for name, spec in SPECS.items()}
