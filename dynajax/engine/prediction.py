"""Which predictors an engine has: what was trained for the model, or low-bit copies of its gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.places import predictors_folder
from dynajax.config import ModelSpec, PolicyConfig
from dynajax.errors import MismatchError, NumericalError, UsageError
from dynajax.programs import Programs, Scoring
from dynajax.quant import BITS
from predictors.folder import MANIFEST_NAME, Manifest, matching_manifest, read_entries
from predictors.forms import Entry, Form, Shape, form_bytes
from predictors.gate import GateSource, copies, gate_params
from predictors.lowbit import LowBit, lowbit_bytes
from predictors.scoring import on_device
from predictors.untrained import calibration

SILU_DENSITY = 0.5  # of neurons computed where none is exactly zero
Place = tuple[int, int]  # lead, layer whose neurons are scored


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """What is used, decided before anything is loaded."""

    kind: str  # gate, mlp, mixed or none, as results name it
    entries: Mapping[Place, Entry]
    lead: int = 0  # layers ahead that placement looks
    skip_lead: int = 0
    density: float | None = None  # see programs.Scoring
    dtype: str = "float16"
    folder: Path | None = None  # of trained ones
    bytes: int = 0  # on the device

    def scoring(self, place: Place) -> Scoring:
        """What the program has to know that scores this place."""
        return Scoring(form=self.entries[place].form, dtype=self.dtype, density=self.density)

    def read_bytes(self, spec: ModelSpec) -> int:
        """On the device, that a token reads: copies that several programs ask are read by each."""
        return sum(form_bytes(Shape.of(spec), entry.form, self.dtype) for entry in self.entries.values())

    def foretold(self, layers: int) -> tuple[int | str, ...]:
        """By what every layer skips, as `Programs.token_skipping_rows` takes it."""
        found: list[int | str] = []
        for layer in range(layers):
            place = self.skipping(layer)
            assert place is not None, f"layer {layer} has no scores to skip by"
            found += [layer - place[0], self.scoring(place).name]
        return tuple(found)

    def skipping(self, layer: int) -> Place | None:
        """Which scores decide what the layer skips: those of skip_lead, else of lead 0, else of lead."""
        places = [(lead, layer) for lead in dict.fromkeys((self.skip_lead, 0, self.lead))]
        return next((place for place in places if place in self.entries), None)


NONE = Prediction(kind="none", entries={})


def find_folder(predictor: str, folder: Path, fingerprint: str | None) -> Path | None:
    """The trained predictors' folder: the one that was named, or the model's own, or the cache's; None: there is none.

    UsageError: only trained ones were wanted.
    """
    if predictor not in ("auto", "mlp", "gate", "none"):
        return Path(predictor)
    if predictor in ("gate", "none"):
        return None
    places = [folder / "predictors"] + ([] if fingerprint is None else [predictors_folder(fingerprint)])
    found = next((place for place in places if (place / MANIFEST_NAME).is_file()), None)
    if found is None and predictor == "mlp":
        raise UsageError(
            "--predictor mlp needs trained predictors, and this model has none: run scripts/train_predictors.py, "
            "or give --predictor gate"
        )
    return found


def manifest_of(folder: Path, spec: ModelSpec, fingerprint: str | None) -> Manifest:
    """What a folder of trained predictors says of itself; MismatchError: it is another model's."""
    return matching_manifest(folder, fingerprint, {"layers": spec.layers, "hidden": spec.hidden, "ffn": spec.ffn})


def choose(
    spec: ModelSpec,
    knobs: PolicyConfig,
    trained: Path | None,
    fingerprint: str | None,
    *,
    skips: bool,
    places: bool,
) -> Prediction:
    """The predictors for what is wanted: to skip neurons, to place them."""
    if not (skips or places):
        return NONE
    lead = 0 if spec.parallel else min(knobs.lead, spec.layers - 1)  # a parallel layer's stream is not at hand
    skip_lead = min(knobs.skip_lead, lead)
    ranks = None if spec.activation.has_zeros else SILU_DENSITY
    common: dict[str, Any] = {"lead": lead, "skip_lead": skip_lead}
    wanted = _wanted(spec.layers, lead, skip_lead, skips=skips, places=places)
    shape = Shape.of(spec)
    if trained is None:
        skipping = set(_wanted(spec.layers, lead, skip_lead, skips=skips, places=False))

        def form(place: Place) -> Form:
            bits = knobs.skip_bits if place in skipping else knobs.place_bits
            return Form(kind="gate", bits=bits).at(place[0])

        entries = {place: Entry(layer=place[1], lead=place[0], form=form(place)) for place in wanted}
        density = knobs.density or ranks
        return Prediction(kind="gate", entries=entries, density=density, bytes=_bytes(shape, entries), **common)
    manifest = manifest_of(trained, spec, fingerprint)
    held = {(entry.lead, entry.layer): entry for entry in manifest.all_entries()}
    entries = {place: held[place] for place in wanted if place in held}
    if skips and any(all((ahead, i) not in held for ahead in {0, skip_lead, lead}) for i in range(spec.layers)):
        raise UsageError(
            f"{trained} has no predictor for some layer and lead {skip_lead}: train them with --lead {lead}"
        )
    if skips:  # what has no predictor of lead 0 goes by that of `lead`
        entries |= {(lead, i): held[lead, i] for i in range(lead, spec.layers) if (0, i) not in held}
    size = _bytes(shape, entries, manifest.dtype)
    if ranks is not None:  # what they were trained to find
        told = [entry.metrics["density"] for entry in entries.values() if entry.metrics and "density" in entry.metrics]
        ranks = round(float(np.mean(told)), 3) if told else ranks
    common |= {"density": knobs.density or ranks, "dtype": manifest.dtype, "folder": trained}
    return Prediction(kind=manifest.kind, entries=entries, bytes=size, **common)


def _wanted(layers: int, lead: int, skip_lead: int, *, skips: bool, places: bool) -> list[Place]:
    """The scores that are asked for."""
    wanted: list[Place] = []
    if skips:  # layers that nothing runs before use their own input
        wanted += [(skip_lead if layer >= skip_lead else 0, layer) for layer in range(layers)]
    if places:
        wanted += [(lead, layer) for layer in range(lead, layers)]
        wanted += [] if skips else [(0, layer) for layer in range(lead)]
    return list(dict.fromkeys(wanted))


def _bytes(shape: Shape, entries: Mapping[Place, Entry], dtype: str = "float16") -> int:
    """On the device; copies of one layer with equal bits are there once."""
    gates = [(entry.layer, entry.form.bits) for entry in entries.values() if entry.form.kind == "gate"]
    spared = [bits for layer, bits in gates] + [-bits for layer, bits in set(gates)]
    copy = {bits: shape.matrices * lowbit_bytes(shape.ffn, shape.hidden, bits) for bits in BITS}
    twice = sum(copy[bits] if bits > 0 else -copy[-bits] for bits in spared)
    return sum(form_bytes(shape, entry.form, dtype) for entry in entries.values()) - twice


class Predictors:
    """The predictors on the device, and the programs that ask them."""

    def __init__(self, prediction: Prediction, programs: Programs, params: Mapping[Place, Mapping[str, jax.Array]],
                 calibrations: Mapping[Place, tuple[float, float]]):  # fmt: skip
        self.prediction, self._programs, self._params = prediction, programs, params
        self._names = {place: prediction.scoring(place).name for place in params}
        self._lines = {place: (np.float32(a), np.float32(b)) for place, (a, b) in calibrations.items()}
        self._from: dict[int, list[Place]] = {}
        for lead, target in params:
            self._from.setdefault(target - lead, []).append((lead, target))

    def score(self, place: Place, stream: jax.Array, h: jax.Array) -> jax.Array:
        """uint8 [B, F]: of the layer of `place`, from what is known `lead` layers before."""
        program = self._programs.get("score", len(h), self._names[place])
        return program(self._params[place], stream, h, *self._lines[place])

    def arrays(self, place: Place) -> tuple[Mapping[str, jax.Array], np.float32, np.float32]:
        """What a program needs that scores a place itself: parameters, slope and intercept."""
        return self._params[place], *self._lines[place]

    def leads_from(self, layer: int) -> list[Place]:
        """What can be scored once this layer's attention has run."""
        return self._from.get(layer, [])


def load_predictors(
    prediction: Prediction,
    spec: ModelSpec,
    programs: Programs,
    fingerprint: str | None,
    source_of: Callable[[int], GateSource],
    bias_of: Callable[[int], npt.NDArray | None],  # a layer's FFN output bias, which its attention leaves in the stream
    cosine: npt.NDArray[np.float32] | None,  # [L, 3] of statistics
    send: Callable[[npt.NDArray], jax.Array],
) -> Predictors:
    """Make or read every predictor and send it to the device."""
    shape, trained = Shape.of(spec), {}
    if prediction.folder is not None:
        _, held = read_entries(
            prediction.folder, fingerprint=fingerprint, layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn
        )
        trained = {(entry.lead, entry.layer): arrays for entry, arrays in held}
    params, lines = {}, {}
    made: dict[tuple[int, int], tuple[tuple[LowBit, ...], dict[str, jax.Array]]] = {}  # by layer and bits
    for (lead, layer), entry in sorted(prediction.entries.items(), key=lambda item: item[0][1]):
        place, form, arrays, shared = (lead, layer), entry.form, trained.get((lead, layer), {}), {}
        lines[place] = (entry.slope, entry.intercept)
        if form.kind == "gate":
            source = source_of(layer)
            if prediction.folder is None:
                known = None if cosine is None or not 1 <= lead <= 3 else float(cosine[layer - lead, lead - 1])
                if known is not None and not -1.01 <= known <= 1.01:
                    raise MismatchError(f"statistics with a cosine of {known}: collect them again")
                lines[place] = calibration(shape, form, lead, source, known)
            if (layer, form.bits) not in made:
                made = {key: value for key, value in made.items() if key[0] == layer}  # earlier layers are through
                packed = copies(source, form.bits)
                sent = {f"codes{i}": send(copy.codes) for i, copy in enumerate(packed)}
                sent |= {f"scales{i}": send(copy.scales) for i, copy in enumerate(packed)}
                made[layer, form.bits] = packed, sent
            packed, shared = made[layer, form.bits]
            arrays = gate_params(shape, form, source, packed=packed, trained=dict(arrays))
        own = {name: array for name, array in arrays.items() if name != "histogram" and name not in shared}
        if form.reads == "stream" and form.is_shifted and (bias := bias_of(layer - lead)) is not None:
            own["shift"] = own["shift"] - bias
        try:
            own = on_device(own, shape, form)
        except NumericalError as error:
            raise NumericalError(f"the predictor of layer {layer}, lead {lead}: {error}: train it again") from error
        params[place] = {**shared, **{name: send(array) for name, array in own.items()}}
    return Predictors(prediction, programs, params, lines)


def source_of_units(
    spec: ModelSpec, units: npt.NDArray, norm: npt.NDArray, norm_bias: npt.NDArray | None
) -> GateSource:
    """A layer's weights as predictors need them, from its units [F, P, 1, W] and the norm before its FFN."""
    count = Shape.of(spec).matrices
    return GateSource(
        rows=tuple(units[:, part, 0, : spec.hidden] for part in range(count)),
        norm=norm,
        norm_bias=norm_bias,
        biases=tuple(units[:, part, 0, spec.hidden] for part in range(count)) if spec.ffn_bias else (),
        down_norm=np.linalg.norm(units[:, -1, 0, : spec.hidden].astype(np.float32), axis=1),
    )


def knobs_of(knobs: PolicyConfig, prediction: Prediction) -> PolicyConfig:
    """The planner's constants: where scores rank a row's neurons, 1/2 stands for the wanted density."""
    return knobs if prediction.density is None else replace(knobs, density=None, theta=0.5)
