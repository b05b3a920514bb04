"""Calibration from the weights alone: probabilities that are about right for inputs of the norm's size."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dynajax.config import Activation
from predictors.calibration import reliability, sigmoid
from predictors.forms import Form, Shape
from predictors.gate import GateSource, gate_params, gate_scores
from predictors.untrained import calibration

SHAPE = Shape(layers=2, hidden=96, ffn=128)


def drawn(threshold=0.0, seed=0):
    """A layer with a norm whose weights differ, and inputs as that norm gives them."""
    rng = np.random.default_rng(seed)
    norm = rng.uniform(0.2, 2.0, SHAPE.hidden).astype(np.float32)
    rows = rng.standard_normal((SHAPE.ffn, SHAPE.hidden), np.float32)
    x = rng.standard_normal((400, SHAPE.hidden), np.float32)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True)) * norm
    return GateSource(rows=(rows,), norm=norm), x, x @ rows.T > threshold


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_probabilities_are_about_right(bits, threshold):
    kind = Activation(kind="fatrelu", threshold=threshold) if threshold else Activation()
    shape, form = replace(SHAPE, activation=kind), Form(kind="gate", bits=bits)
    source, x, live = drawn(threshold)
    slope, intercept = calibration(shape, form, 0, source, None)
    z = np.asarray(gate_scores(gate_params(shape, form, source), jnp.asarray(x), shape, form))
    right = reliability(sigmoid(slope * z + intercept), live).error
    assert right < 0.06
    for factor in (0.2, 5.0):  # the measure notices a wrong spread
        assert reliability(sigmoid(factor * (slope * z + intercept)), live).error > right


def test_fewer_bits_a_lead_and_a_lower_cosine_make_it_less_sure():
    source = drawn()[0]

    def slope(bits=4, lead=0, cosine=None):
        form = Form(kind="gate", bits=bits).at(lead)
        return calibration(SHAPE, form, lead, source, cosine)[0]

    assert slope(8) > slope(4) > slope(2) > slope(1) > 0
    assert slope(lead=0) > slope(lead=1) > slope(lead=2)
    assert slope(lead=1, cosine=0.99) > slope(lead=1) > slope(lead=1, cosine=0.5)
    assert slope(lead=0, cosine=0.5) == slope(lead=0), "at lead 0 nothing has moved"


def test_silu_scores_rank_only():
    shape = replace(SHAPE, activation=Activation(kind="silu"))
    source = drawn()[0]
    both = GateSource(rows=source.rows * 2, norm=source.norm)
    assert calibration(shape, Form(kind="gate", bits=4), 0, both, None) == (2.0, 0.0)
