"""Engines of equal shapes share executables in tests: compiling is most of what a small model costs."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from dynajax.programs import Programs
from hostcompute.ffi import cold_ffn_ffi


@contextmanager
def shared_programs(compiler_options: dict | None = None) -> Generator[None]:
    """Compile each program once while open, with these options; counts and kinds stay each engine's own.

    A whole-token program is shared if the engine it was made for is an operand, or none is called: a JAX callback
    belongs to one engine, and holds it.
    """
    done = {}

    def compile_one(programs, kind, *sizes):
        return getattr(programs, kind)(*sizes).compile(compiler_options)

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
