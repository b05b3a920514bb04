"""Measures the machine this runs on, for the simulator. Every figure is a function that takes its sizes."""

from dynajax.profiling.machine import FULL, QUICK, Effort, profile_machine

__all__ = ["FULL", "QUICK", "Effort", "profile_machine"]
