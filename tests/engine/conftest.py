"""Small random models for the engine's tests, each written once a run, and programs compiled once a run."""

from pathlib import Path

import pytest

from dynajax.programs import Programs
from dynajax.testing import make_checkpoint
from tests.engine.cases import SPECS


@pytest.fixture(scope="session", autouse=True)
def shared_compilation():
    """Engines of equal shapes share executables here; counts and kinds stay each engine's own.

    Programs with a host callback belong to one engine and are not shared.
    """
    compile_one, done = Programs._compile, {}

    def compile_once(self, kind, *sizes):
        if kind.startswith("token_"):
            return compile_one(self, kind, *sizes)
        key = (self.shapes, kind, *sizes)
        if key not in done:
            done[key] = compile_one(self, kind, *sizes)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_compile", compile_once)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of every model in SPECS."""
    root = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(root / name, spec, shards=2) for name, spec in SPECS.items()}
