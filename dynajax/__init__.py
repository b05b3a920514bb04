"""Large language models that do not fit the device, run fast on it all the same.

`Engine` and its records are imported when they are first used, so that `import dynajax.policy` and the
command line's `--help` never load jax.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynajax.engine import Engine, Event, Result
    from dynajax.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "Event", "Result", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": "dynajax.engine",
    "Event": "dynajax.engine",
    "Result": "dynajax.engine",
    "SamplingParams": "dynajax.sampling",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
