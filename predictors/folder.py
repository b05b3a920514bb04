"""A predictor folder: `manifest.json`, and `weights/` by orbax. Written whole or not at all.

Kind `mlp`, converted ones: for the neurons of layer i two matrices, fc1 [R, D] and fc2 [F, R], R may differ from layer
to layer. Kind `mixed`, trained here: `entries` (see `forms.Entry`), each of its own form, any number of leads.

manifest.json: version (1), kind, fingerprint (of the model it was made for, or null: unknown), layers, hidden, ffn,
ranks (one a layer; mixed: none), dtype, lead (layers between input and prediction; mixed: the largest), threshold (or
null), source, tokens (seen in training, or null), metrics (an object, or null), entries (mlp: none), files (every file
in weights/ with its sha256). weights/ holds {"000": {"fc1", "fc2"}, ...}, or for mixed {"LEAD-LAYER": arrays}, low-bit
copies left out: they are made again from the model. orbax sees it only once its files are those of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.drafts import draft_of
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.errors import MismatchError, ModelError, NumericalError, StorageError
from predictors.forms import MOST_RANK, Entry, Form, entry_of

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights"
VERSION = 1
KINDS = ("mlp", "mixed")
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_MANIFEST_BYTES = 2**23
_SLACK_BYTES = 2**20
_SIZES = {"layers": 2**10, "hidden": 2**17, "ffn": 2**20}  # the largest of each, as config.json may have them

Arrays = Mapping[str, npt.NDArray]
Pairs = Sequence[tuple[npt.NDArray, npt.NDArray]]  # mlp: (fc1 [R, D], fc2 [F, R]) a layer
Weights = Pairs | Mapping[str, Arrays]  # mixed: {key of an entry: its arrays}
Kinds = dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]  # shape and type of every array


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a predictor folder says of itself."""

    fingerprint: str | None
    layers: int
    hidden: int
    ffn: int
    ranks: tuple[int, ...]
    dtype: str
    source: str
    kind: str = "mlp"
    lead: int = 0
    threshold: float | None = None
    tokens: int | None = None
    metrics: dict[str, Any] | None = None
    entries: tuple[Entry, ...] = ()

    def shapes(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of fc1 and fc2, of kind mlp."""
        rank = self.ranks[layer]
        return (rank, self.hidden), (self.ffn, rank)

    def all_entries(self) -> list[Entry]:
        """Every predictor. Those of kind mlp read the stream, as PowerInfer's do; 1/2 is at the threshold (none: 0)."""
        if self.kind == "mixed":
            return list(self.entries)
        return [
            Entry(
                layer=layer,
                lead=self.lead,
                form=Form(kind="mlp", rank=self.ranks[layer], reads="stream"),
                intercept=-(self.threshold or 0.0),
            )
            for layer in range(self.lead, self.layers)
        ]

    def arrays(self) -> Kinds:
        """What weights/ holds."""
        kind, single = DTYPES[self.dtype], np.dtype(np.float32)
        if self.kind == "mlp":
            pairs = [zip(("fc1", "fc2"), self.shapes(i), strict=True) for i in range(self.layers)]
            return {_key(i): {name: (shape, kind) for name, shape in pair} for i, pair in enumerate(pairs)}
        kept = {entry.key: entry.arrays((self.hidden, self.ffn)) for entry in self.entries}
        return {
            key: {name: (shape, kind if is_matrix else single) for name, (shape, is_matrix) in arrays.items()}
            for key, arrays in kept.items()
        }


def write_predictors(folder: Path, manifest: Manifest, weights: Weights) -> Path:
    """Write the new folder and return it; nobody ever sees half of it.

    The arrays have the manifest's dtype and shapes (ValueError). NumericalError: NaN or infinity. UsageError:
    `folder` exists and is not empty. StorageError: the disk.
    """
    lists = {"ranks": list(manifest.ranks), "entries": [asdict(entry) for entry in manifest.entries]}
    record = {"version": VERSION, **asdict(manifest), **lists}
    tree = _tree(weights)
    if problem := _problem(record) or _tree_problem(manifest, tree):
        raise ValueError(problem)
    _check_finite(tree, folder)
    needed = sum(array.nbytes for part in tree.values() for array in part.values()) + _SLACK_BYTES
    with draft_of(folder, needed) as draft:
        check_room(draft / WEIGHTS_NAME, needed)
        save(draft / WEIGHTS_NAME, tree)
        record["files"] = hashes(draft / WEIGHTS_NAME)
        with (draft / MANIFEST_NAME).open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    return folder


def read_manifest(folder: Path) -> Manifest:
    """What the folder says of itself. StorageError: no such folder; ModelError: damaged, or another version."""
    record = _read_record(folder)
    values: dict[str, Any] = {field.name: record[field.name] for field in fields(Manifest)}
    values["ranks"] = tuple(values["ranks"])
    values["entries"] = tuple(entry_of(entry, values["layers"]) for entry in values["entries"])
    return Manifest(**values)


def _read_record(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise StorageError(f"no predictor folder {located(folder)}")
    record = read_json(folder / MANIFEST_NAME, _MANIFEST_BYTES)
    if record.get("version") != VERSION or isinstance(record["version"], bool):
        raise ModelError(f"{located(folder)} has version {quoted(record.get('version'))}, this program reads {VERSION}")
    if problem := _problem(record):
        raise ModelError(f"{located(folder / MANIFEST_NAME)}: {problem}")
    return record


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, by its path there; a link has none, and so never matches."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path.relative_to(folder).as_posix()] = ""
        elif path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _check_files(folder: Path) -> None:
    """orbax ends a damaged store with hanging futures and pages of log: it must not see one."""
    said = _read_record(folder).get("files")
    if not isinstance(said, dict) or not said:
        raise ModelError(f"{located(folder / MANIFEST_NAME)}: files must be an object, got {quoted(said)}")
    try:
        found = hashes(folder / WEIGHTS_NAME)
    except OSError as error:
        raise StorageError(f"cannot read {located(folder / WEIGHTS_NAME)}: {error.strerror or error}") from error
    if found != said:
        names = [name for name in said.keys() | found.keys() if said.get(name) != found.get(name)]
        raise ModelError(f"{located(folder / WEIGHTS_NAME)} is damaged: {listing(names)}: convert or train it again")


def read_predictors(
    folder: Path, *, fingerprint: str | None, layers: int, hidden: int, ffn: int
) -> tuple[Manifest, list[tuple[npt.NDArray, npt.NDArray]]]:
    """Of a folder of kind mlp: the manifest and, per layer, (fc1 [R, D], fc2 [F, R]) in the manifest's dtype.

    MismatchError: made for other sizes, or for another fingerprint, or of another kind. fingerprint None: the model's
    is not known; a folder that knows none is accepted with a log line. ModelError: damaged. NumericalError: NaN or
    infinity.
    """
    manifest = matching_manifest(folder, fingerprint, {"layers": layers, "hidden": hidden, "ffn": ffn})
    if manifest.kind != "mlp":
        raise MismatchError(f"{located(folder)} holds predictors of several forms: `read_entries` reads them")
    tree = _sound_tree(folder, manifest)
    return manifest, [(tree[_key(i)]["fc1"], tree[_key(i)]["fc2"]) for i in range(manifest.layers)]


def read_entries(
    folder: Path, *, fingerprint: str | None, layers: int, hidden: int, ffn: int
) -> tuple[Manifest, list[tuple[Entry, Arrays]]]:
    """A folder of any kind: the manifest, and every predictor with its arrays. Errors as in `read_predictors`."""
    manifest = matching_manifest(folder, fingerprint, {"layers": layers, "hidden": hidden, "ffn": ffn})
    tree = _sound_tree(folder, manifest)
    if manifest.kind == "mixed":
        return manifest, [(entry, tree[entry.key]) for entry in manifest.entries]
    return manifest, [(entry, tree[_key(entry.layer)]) for entry in manifest.all_entries()]


def matching_manifest(folder: Path, fingerprint: str | None, sizes: dict[str, int]) -> Manifest:
    """The manifest, if it is of this model."""
    manifest = read_manifest(folder)
    if wrong := [f"{getattr(manifest, name)} {name}, not {size}" for name, size in sizes.items()
                 if getattr(manifest, name) != size]:  # fmt: skip
        raise MismatchError(f"{located(folder)} was made for a model of {', '.join(wrong)}: train or convert it again")
    if None not in (manifest.fingerprint, fingerprint) and manifest.fingerprint != fingerprint:
        raise MismatchError(
            f"{located(folder)} was made for the model {plain(str(manifest.fingerprint)[:12])}, this one is "
            f"{str(fingerprint)[:12]}: train or convert it again"
        )
    if manifest.fingerprint is None:
        log.info("%s does not say which model it was made for: only the sizes were compared", located(folder))
    return manifest


def _sound_tree(folder: Path, manifest: Manifest) -> dict[str, Arrays]:
    _check_files(folder)
    tree = restore(folder, manifest)
    if problem := _tree_problem(manifest, tree):
        raise ModelError(f"{located(folder)} is damaged: {problem}")
    _check_finite(tree, folder)
    return tree


def _problem(record: dict[str, Any]) -> str | None:
    """Why `record` is no manifest, or None."""
    for name, most in _SIZES.items():
        if not _is_integer(record.get(name), 1, most):
            return f"{name} must be an integer from 1 to {most}, got {quoted(record.get(name))}"
    ranks, count = record.get("ranks"), 0 if record.get("kind") == "mixed" else record["layers"]
    if not isinstance(ranks, list) or len(ranks) != count:
        return f"ranks must be a list of {count} integers, got {quoted(ranks)}"
    if bad := [rank for rank in ranks if not _is_integer(rank, 1, MOST_RANK)]:
        return f"ranks must be integers from 1 to {MOST_RANK}, got {quoted(bad[0])}"
    threshold, fingerprint = record.get("threshold"), record.get("fingerprint")
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    rules = {
        "kind": record.get("kind") in KINDS,
        "dtype": isinstance(record.get("dtype"), str) and record["dtype"] in DTYPES,
        "source": isinstance(record.get("source"), str),
        "fingerprint": fingerprint is None or isinstance(fingerprint, str),
        "lead": _is_integer(record.get("lead"), 0, record["layers"] - 1),
        "threshold": threshold is None or (is_number and math.isfinite(threshold)),
        "tokens": record.get("tokens") is None or _is_integer(record["tokens"], 0, 2**63),
        "metrics": record.get("metrics") is None or isinstance(record["metrics"], dict),
    }
    if problem := _entries_problem(record):
        return problem
    # What is null must be written as null: a key that is missing was lost.
    wrong = [name for name, holds in rules.items() if not holds or name not in record]
    return f"{wrong[0]} must not be {quoted(record.get(wrong[0]))}" if wrong else None


def _entries_problem(record: dict[str, Any]) -> str | None:
    entries = record.get("entries")
    if not isinstance(entries, list) or (len(entries) > 0) != (record.get("kind") == "mixed"):
        return f"entries must be a list, empty unless kind is mixed, got {quoted(entries)}"
    try:
        keys = [entry_of(entry, record["layers"]).key for entry in entries]
    except (ValueError, TypeError) as error:
        return plain(str(error))
    return None if len({*keys}) == len(keys) else "entries must be one a layer and lead"


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _tree_problem(manifest: Manifest, tree: Mapping[str, Arrays]) -> str | None:
    expected = manifest.arrays()
    if tree.keys() != expected.keys():
        return f"weights of {listing(sorted(tree))}, expected {listing(sorted(expected))}"
    for key, part in expected.items():
        if tree[key].keys() != part.keys():
            return f"{listing(sorted(tree[key]))} of layer {key}, expected {listing(sorted(part))}"
        for name, (shape, kind) in part.items():
            array = tree[key][name]
            if array.shape != shape or array.dtype != kind:
                return f"{name} of layer {_told(key)} must be {kind} {shape}, got {array.dtype} {array.shape}"
    return None


def _check_finite(tree: Mapping[str, Arrays], folder: Path) -> None:
    for key, part in tree.items():
        for name, array in part.items():
            if not np.isfinite(array).all():
                raise NumericalError(f"{name} of layer {_told(key)} for {located(folder)} holds NaN or infinity")


def _told(key: str) -> str:
    """001 -> 1; 002-003 -> 3 (lead 2)."""
    lead, _, layer = key.rpartition("-")
    return f"{int(layer)} (lead {int(lead)})" if lead else f"{int(layer)}"


def _key(layer: int) -> str:
    return f"{layer:03}"


def _tree(weights: Weights) -> dict[str, dict[str, npt.NDArray]]:
    if isinstance(weights, Mapping):
        return {key: dict(part) for key, part in weights.items()}
    return {_key(i): {"fc1": fc1, "fc2": fc2} for i, (fc1, fc2) in enumerate(weights)}


def check_room(path: Path, count: int) -> None:
    """OSError if `count` bytes cannot be had at `path`: a full disk or a quota, which orbax ends with pages of log."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, count)
    path.unlink()


def save(path: Path, tree: dict[str, dict[str, npt.NDArray]]) -> None:
    """The arrays of a tree, written by orbax. StorageError: they cannot be."""
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))
        if (marker := path / "commit_success.txt").is_file():
            marker.write_text("committed\n", encoding="utf-8")  # orbax puts the draft's path there, which is gone
    except (ValueError, RuntimeError) as error:  # tensorstore words a full disk as one of these
        raise storage_error(path, error) from error


def storage_error(path: Path, error: Exception) -> StorageError:
    """What orbax could not write, in one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    reason = os.strerror(int(code[1])) if code else plain(str(error)[:160])
    return StorageError(f"cannot write {located(path)}: {reason}")


def restore(folder: Path, manifest: Manifest) -> dict[str, Arrays]:
    """The arrays, once their stored shapes and types are known to be those of the manifest."""
    import orbax.checkpoint as ocp

    path = (folder / WEIGHTS_NAME).absolute()
    expected = manifest.arrays()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            held = checkpointer.metadata(path).item_metadata.tree
            found = {
                key: {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in part.items()}
                for key, part in held.items()
            }
            if found != expected:
                raise ModelError(f"{located(path)} does not hold what {MANIFEST_NAME} says: convert or train it again")
            arguments = {
                key: {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected[key]} for key in found
            }
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=held, restore_args=arguments))
    except ModelError:
        raise
    except Exception as error:  # whatever orbax's and tensorstore's parsers stumble over
        reason = plain(str(error)[:160] or type(error).__name__)
        raise ModelError(f"{located(path)} is damaged: {reason}: convert or train it again") from error
