"""Mixtures of experts in simulated time: the planner that drives the engine, on machines that are described in files.

NumPy only, as all of `dynajax.sim`. Every figure that comes out of it is simulated.
"""
