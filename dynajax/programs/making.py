"""Which programs a model has."""

from __future__ import annotations

from collections.abc import Callable

from dynajax.programs.cache import Programs
from dynajax.programs.encoded import EncodedPrograms
from dynajax.programs.mixture import MixturePrograms
from dynajax.programs.shapes import Shapes


def make_programs(shapes: Shapes, host_call: Callable | None = None) -> Programs:
    """The programs of a model, of any kind."""
    if shapes.spec.encoder is not None:
        return EncodedPrograms(shapes, host_call)
    return Programs(shapes, host_call) if shapes.spec.experts is None else MixturePrograms(shapes, host_call)
