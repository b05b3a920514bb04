"""The plain reference: what every model family must compute, one forward in float64 NumPy.

It reads the words of config.json and the published tensor names and shares nothing with the engine, so that it can
catch mistakes made there. One function per idea (norm, positions, attention, ffn, routing), one per residual layout.
"""

from dynajax.reference.families import forward
from dynajax.reference.switch import encoded_forward

__all__ = ["encoded_forward", "forward"]
