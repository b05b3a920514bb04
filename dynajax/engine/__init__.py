"""Opens a model within a device budget and generates with it."""

from dynajax.engine.engine import Engine
from dynajax.engine.planning import plan_for
from dynajax.engine.result import Event, Result

__all__ = ["Engine", "Event", "Result", "plan_for"]
