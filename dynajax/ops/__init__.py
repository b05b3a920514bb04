"""Jitted kernels, each beside a plain reference. Pure functions of arrays; no state."""
