"""A folder of predictors of expert routing: `manifest.json`, and `weights/` by orbax. Written whole or not at all.

manifest.json: version (1), kind ("experts"), fingerprint (of the model it was made for), layers (of the decoder, those
that have experts), hidden, experts, top_k, lead (predictions reach 1 to so many layers ahead), dtype, source, tokens
(seen in training), entries (one a lead and layer), files (every file in weights/ with its sha256).
An entry: lead, asked (number of the layer that is asked, among those that have experts), kind (what was best on
held-out tokens: corrected, residual, residual-mean or gate), rank (of corrected), metrics: {kind: {recall, top1}}, also
of `frequency`, the experts that are most frequent, and `random`.
weights/ holds "means" {hidden [M, D]}, the mean of every layer's input, and "LEAD-ASKED" {shift, down, up} of entries
that are `corrected`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.drafts import draft_of
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.errors import MismatchError, ModelError, NumericalError, StorageError
from predictors.folder import DTYPES, MANIFEST_NAME, WEIGHTS_NAME, Kinds, check_room, hashes, restore, save

VERSION = 1
KIND = "experts"
CHOSEN = ("corrected", "residual", "residual-mean", "gate")
MOST_RANK = 2**12
_MANIFEST_BYTES = 2**24
_SLACK_BYTES = 2**20
_LARGEST = {"hidden": 2**17, "experts": 2**16, "top_k": 2**16, "lead": 2**10}

Arrays = Mapping[str, npt.NDArray]
Tree = dict[str, Any]  # {key: {name: array}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingEntry:
    """What foretells where the tokens of layer `asked` go in layer asked + lead."""

    lead: int
    asked: int
    kind: str
    rank: int = 0
    metrics: dict[str, dict[str, Any]]

    @property
    def key(self) -> str:
        return f"{self.lead:03}-{self.asked:03}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingManifest:
    """What a folder says of itself."""

    fingerprint: str | None
    layers: tuple[int, ...]
    hidden: int
    experts: int
    top_k: int
    lead: int
    dtype: str
    source: str
    tokens: int
    entries: tuple[RoutingEntry, ...]

    def arrays(self) -> Kinds:
        """What weights/ holds."""
        single, kind = np.dtype(np.float32), DTYPES[self.dtype]
        found: Kinds = {"means": {"hidden": ((len(self.layers), self.hidden), single)}}
        for entry in self.entries:
            if entry.kind == "corrected":
                found[entry.key] = {
                    "shift": ((self.hidden,), single),
                    "down": ((entry.rank, self.hidden), kind),
                    "up": ((self.hidden, entry.rank), kind),
                }
        return found


def write_routing(folder: Path, manifest: RoutingManifest, tree: Mapping[str, Arrays]) -> Path:
    """Write the new folder and return it; nobody ever sees half of it.

    The arrays have the manifest's types and shapes (ValueError). NumericalError: NaN or infinity. UsageError: `folder`
    exists and is not empty. StorageError: the disk.
    """
    lists = {"layers": list(manifest.layers), "entries": [asdict(entry) for entry in manifest.entries]}
    record = {"version": VERSION, "kind": KIND, **asdict(manifest), **lists}
    weights = {key: dict(arrays) for key, arrays in tree.items()}
    if problem := _problem(record) or _tree_problem(manifest, weights):
        raise ValueError(problem)
    _check_finite(weights, folder)
    needed = sum(array.nbytes for arrays in weights.values() for array in arrays.values()) + _SLACK_BYTES
    with draft_of(folder, needed) as draft:
        check_room(draft / WEIGHTS_NAME, needed)
        save(draft / WEIGHTS_NAME, weights)
        record["files"] = hashes(draft / WEIGHTS_NAME)
        with (draft / MANIFEST_NAME).open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    return folder


def read_routing_manifest(folder: Path) -> RoutingManifest:
    """What the folder says of itself. StorageError: no such folder; ModelError: damaged, or another version;
    MismatchError: predictors of neurons."""
    return _manifest_of(_read_record(folder))


def _manifest_of(record: dict[str, Any]) -> RoutingManifest:
    values: dict[str, Any] = {field.name: record[field.name] for field in fields(RoutingManifest)}
    values["layers"] = tuple(values["layers"])
    values["entries"] = tuple(RoutingEntry(**entry) for entry in values["entries"])
    return RoutingManifest(**values)


def read_routing(
    folder: Path, *, fingerprint: str | None, layers: int, hidden: int
) -> tuple[RoutingManifest, Tree]:  # layers: so many have experts
    """The manifest and the arrays of weights/.

    MismatchError: made for other sizes, another fingerprint (None: it is not compared), or for neurons. ModelError:
    damaged. NumericalError: NaN or infinity.
    """
    record = _read_record(folder)
    manifest = _manifest_of(record)
    sizes = {"layers with experts": (len(manifest.layers), layers), "hidden": (manifest.hidden, hidden)}
    if wrong := [f"{found} {name}, not {size}" for name, (found, size) in sizes.items() if found != size]:
        raise MismatchError(f"{located(folder)} was made for a model of {', '.join(wrong)}: train it again")
    if None not in (manifest.fingerprint, fingerprint) and manifest.fingerprint != fingerprint:
        raise MismatchError(
            f"{located(folder)} was made for the model {plain(str(manifest.fingerprint)[:12])}, this one is "
            f"{str(fingerprint)[:12]}: train it again"
        )
    _check_files(folder, record.get("files"))
    tree = restore(folder, manifest)  # ty: ignore[invalid-argument-type]  # it asks for nothing but `arrays`
    if problem := _tree_problem(manifest, tree):
        raise ModelError(f"{located(folder)} is damaged: {problem}")
    _check_finite(tree, folder)
    return manifest, dict(tree)


def _read_record(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise StorageError(f"no predictor folder {located(folder)}")
    record = read_json(folder / MANIFEST_NAME, _MANIFEST_BYTES)
    if record.get("kind") in ("mlp", "mixed"):
        raise MismatchError(
            f"{located(folder)} holds predictors of neurons, and this model has experts: run "
            "scripts/train_predictors.py with it"
        )
    if record.get("version") != VERSION or isinstance(record["version"], bool):
        raise ModelError(f"{located(folder)} has version {quoted(record.get('version'))}, this program reads {VERSION}")
    if problem := _problem(record):
        raise ModelError(f"{located(folder / MANIFEST_NAME)}: {problem}")
    return record


def _check_files(folder: Path, said: object) -> None:
    """orbax ends a damaged store with hanging futures and pages of log: it must not see one."""
    if not isinstance(said, dict) or not said:
        raise ModelError(f"{located(folder / MANIFEST_NAME)}: files must be an object, got {quoted(said)}")
    try:
        found = hashes(folder / WEIGHTS_NAME)
    except OSError as error:
        raise StorageError(f"cannot read {located(folder / WEIGHTS_NAME)}: {error.strerror or error}") from error
    if found != said:
        names = [name for name in said.keys() | found.keys() if said.get(name) != found.get(name)]
        raise ModelError(f"{located(folder / WEIGHTS_NAME)} is damaged: {listing(names)}: train it again")


# --- what a manifest may say --------------------------------------------------------------------------------------


def _problem(record: dict[str, Any]) -> str | None:
    """Why `record` is no manifest, or None."""
    for name, most in _LARGEST.items():
        if not _is_integer(record.get(name), 1, most):
            return f"{name} must be an integer from 1 to {most}, got {quoted(record.get(name))}"
    layers, fingerprint = record.get("layers"), record.get("fingerprint")
    if (
        not isinstance(layers, list)
        or not all(_is_integer(layer, 0, 2**20) for layer in layers)
        or layers != sorted(set(layers))
    ):
        return f"layers must be ascending integers, got {quoted(layers)}"
    rules = {
        "kind": record.get("kind") == KIND,
        "fingerprint": "fingerprint" in record and (fingerprint is None or isinstance(fingerprint, str)),
        "top_k": record["top_k"] <= record["experts"],
        "lead": record["lead"] < len(layers),
        "dtype": isinstance(record.get("dtype"), str) and record["dtype"] in DTYPES,
        "source": isinstance(record.get("source"), str),
        "tokens": _is_integer(record.get("tokens"), 0, 2**63),
    }
    if wrong := [name for name, holds in rules.items() if not holds]:
        return f"{wrong[0]} must not be {quoted(record.get(wrong[0]))}"
    return _entries_problem(record)


def _entries_problem(record: dict[str, Any]) -> str | None:
    entries, layers = record.get("entries"), len(record["layers"])
    expected = [(lead, asked) for lead in range(1, record["lead"] + 1) for asked in range(layers - lead)]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return f"entries must be a list of objects, got {quoted(entries)}"
    names = {field.name for field in fields(RoutingEntry)}
    for entry in entries:
        if entry.keys() != names:
            return f"an entry has {listing(map(str, entry))}, expected {listing(names)}"
        kind, rank = entry["kind"], entry["rank"]
        if kind not in CHOSEN or not _is_integer(rank, 0, MOST_RANK) or (rank > 0) != (kind == "corrected"):
            return f"an entry has kind {quoted(kind)} and rank {quoted(rank)}"
        if not isinstance(entry["metrics"], dict) or not all(map(_is_metric, entry["metrics"].values())):
            return f"metrics must not be {quoted(entry['metrics'])}"
    if [(entry["lead"], entry["asked"]) for entry in entries] != expected:
        return f"entries must be one a lead and layer, {len(expected)} in their order"
    return None


def _is_metric(value: object) -> bool:
    return isinstance(value, dict) and {*value} == {"recall", "top1"} and isinstance(value["top1"], dict) and all(
        one is None or (isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one))
        for one in (value["recall"], *value["top1"].values())
    )  # fmt: skip


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _tree_problem(manifest: RoutingManifest, tree: Mapping[str, Arrays]) -> str | None:
    expected = manifest.arrays()
    if tree.keys() != expected.keys():
        return f"weights of {listing(tree)}, expected {listing(expected)}"
    for key, arrays in expected.items():
        if tree[key].keys() != arrays.keys():
            return f"{listing(tree[key])} of {key}, expected {listing(arrays)}"
        for name, (shape, kind) in arrays.items():
            found = tree[key][name]
            if found.shape != shape or found.dtype != kind:
                return f"{name} of {key} must be {kind} {shape}, got {found.dtype} {found.shape}"
    return None


def _check_finite(tree: Mapping[str, Arrays], folder: Path) -> None:
    for key, arrays in tree.items():
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise NumericalError(f"{name} of {plain(key)} for {located(folder)} holds NaN or infinity")
