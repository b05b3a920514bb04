"""Small random models for the engine's tests, each written once a run, and programs compiled once a run."""

from pathlib import Path

import pytest

from dynajax.programs import Programs
from dynajax.testing import make_checkpoint
from hostcompute.ffi import cold_ffn_ffi
from tests.engine.cases import SPECS


@pytest.fixture(scope="session", autouse=True)
def shared_compilation():
    """Engines of equal shapes share executables here; counts and kinds stay each engine's own.

    A whole-token program is shared if the engine it was made for is an operand, or none is called: a JAX callback
    belongs to one engine.
    """
    compile_one, done = Programs._compile, {}

    def compile_once(self, kind, *sizes):
        host = self._host_call if kind.startswith("token_") else None
        if host not in (None, cold_ffn_ffi):
            return compile_one(self, kind, *sizes)
        key = (self.shapes, host, kind, *sizes)
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
