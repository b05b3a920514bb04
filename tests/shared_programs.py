"""Engines of equal shapes share executables in tests: compiling is most of what a small model costs."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from dynajax.programs import Programs


@contextmanager
def shared_programs() -> Generator[None]:
    """Compile each program once while open; counts and kinds stay each engine's own.

    Programs with a host callback belong to one engine and are not shared: they hold it.
    """
    compile_one, done = Programs._compile, {}

    def compile_once(self, kind, *sizes):
        if hasattr(self._host_call, "__self__"):
            return compile_one(self, kind, *sizes)
        key = (self.shapes, self._host_call, kind, *sizes)
        if key not in done:
            done[key] = compile_one(self, kind, *sizes)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_compile", compile_once)
        yield
