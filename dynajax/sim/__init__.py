"""What a run would take on a machine that is described in a file: the engine's own policies, against simulated time.

NumPy only. Every figure that comes out of this package is simulated and has to be called so wherever it is shown.
"""
