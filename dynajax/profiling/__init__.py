"""Measures the machine this runs on, for the simulator. Every figure is a function that takes its sizes."""

from dynajax.profiling.machine import FULL, QUICK, Effort, profile_machine
from dynajax.profiling.overhead import engine_overhead, own_work
from dynajax.profiling.pace import Line, Pace

__all__ = ["FULL", "QUICK", "Effort", "Line", "Pace", "engine_overhead", "own_work", "profile_machine"]
