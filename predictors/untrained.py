"""Calibration of low-bit gates that nothing was measured of: how far a score may be off, from the weights alone.

A score z estimates the gate's product g with an error of standard deviation s, so that P(g > t | z) = Phi((z - t) / s),
and Phi(x) is close to sigmoid(1.702 x). With h = norm(x), whose elements have the norm's weights as their sizes,
s**2 = sum over d of (w_d - copy_d)**2 * norm_d**2 for the rounding, and for a lead 2 (1 - c) * sum of
w_d**2 * norm_d**2, c the cosine between what the layer will read and what is taken for it.
"""

from __future__ import annotations

import numpy as np

from predictors.forms import Form, Shape
from predictors.gate import GateSource
from predictors.lowbit import dequantise, quantise

COSINES = (1.0, 0.9, 0.85, 0.8)  # by lead, where statistics do not know better; beyond: the last
SAMPLE = 256  # rows of a layer that are looked at
_PROBIT = 1.702
_LOG_SLOPE = 2.0  # of scores that are logarithms of magnitudes (silu)


def calibration(shape: Shape, form: Form, lead: int, source: GateSource, cosine: float | None) -> tuple[float, float]:
    """(slope, intercept) of an untrained gate; cosine None: unknown. For silu the slope alone has a meaning."""
    if shape.activation.kind == "silu":
        return _LOG_SLOPE, 0.0
    rows = source.rows[0][:: max(1, len(source.rows[0]) // SAMPLE)].astype(np.float32)
    size = source.norm.astype(np.float32)[None, :]
    if source.norm_bias is not None:
        size = np.sqrt(size**2 + source.norm_bias.astype(np.float32)[None, :] ** 2)
    rounding = ((rows - dequantise(quantise(rows, form.bits))) * size) ** 2
    if cosine is None:
        cosine = COSINES[min(lead, len(COSINES) - 1)]
    drift = 2 * (1 - cosine) * (rows * size) ** 2 if lead else np.zeros_like(rows)
    spread = float(np.sqrt((rounding + drift).sum(axis=1).mean())) or 1e-6
    slope = _PROBIT / spread
    return slope, -slope * shape.activation.threshold
