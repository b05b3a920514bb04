"""What jax raises, said in this program's own errors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from jax.errors import JaxRuntimeError

from dynajax.errors import EngineError, FitError


@contextmanager
def translated_errors() -> Generator[None]:
    """Turn a runtime error of jax into FitError (device memory is exhausted) or EngineError (anything else)."""
    try:
        yield
    except JaxRuntimeError as error:
        first = str(error).strip().splitlines()[0]
        if "RESOURCE_EXHAUSTED" in first or "Out of memory" in first:
            raise FitError(f"the device ran out of memory ({first}): lower --vram-budget, --ctx or --batch") from error
        raise EngineError(f"the device failed: {first}") from error
