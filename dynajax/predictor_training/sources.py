"""What of a model its predictors are made from, and what training them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dynajax.checkpoint import Checkpoint
from dynajax.engine.prediction import source_of_units
from predictors.fitting import Settings
from predictors.forms import Form, Shape, form_bytes
from predictors.gate import GateSource
from predictors.selection import default_forms

KINDS = {"auto": ("gate", "mlp"), "gate": ("gate",), "mlp": ("mlp",)}
_TRAINED_BYTES = 16  # a parameter: itself, two moments, its gradient
_WIDE_ARRAYS = 8  # [batch, F] float32 in a step, at most


def forms_for(shape: Shape, kind: str) -> tuple[Form, ...]:
    """The forms to choose from. Where all activations differ from zero, gates are weighted by their down rows."""
    weighted = not shape.activation.has_zeros
    return tuple(replace(form, weighted=weighted and form.kind == "gate") for form in default_forms(shape, KINDS[kind]))


def sources_of(checkpoint: Checkpoint) -> Callable[[int], GateSource]:
    """Reads what a gate predictor needs of one layer; float32."""
    spec = checkpoint.spec

    def source(layer: int) -> GateSource:
        units = np.empty((spec.ffn, spec.ffn_parts, 1, spec.unit_width), np.float32)
        checkpoint.fill_bundle(layer, units)
        dense = checkpoint.attention(layer, "float32")
        norm = "attention_norm" if spec.shared_norm else "ffn_norm"
        return source_of_units(spec, units, dense[norm], dense.get(f"{norm}_bias"))

    return source


def device_bytes(shape: Shape, leads: Sequence[int], forms: Sequence[Form], settings: Settings) -> int:
    """What a `Trainer` takes of its device, at most: copies, trained numbers with their moments, a step's arrays."""
    total = _WIDE_ARRAYS * 4 * settings.batch * (shape.ffn + shape.hidden)
    if any(form.kind == "gate" for form in forms):
        total += 2 * 4 * shape.ffn * shape.hidden * shape.matrices  # a layer's copies unpacked, and their gradient's
    for form in forms:
        if form.kind == "gate":  # one copy for all leads
            total += shape.layers * form_bytes(shape, Form(kind="gate", bits=form.bits)) * (form.rank == 0)
        if form.is_trained:
            wide = shape.ffn if form.kind == "mlp" else shape.hidden
            count = form.rank * (shape.hidden + wide) + shape.hidden
            total += _TRAINED_BYTES * count * sum(shape.layers - lead for lead in leads)
    return total
