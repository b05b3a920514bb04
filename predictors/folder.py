"""A predictor folder: `manifest.json`, and `weights/` by orbax. Written whole or not at all.

A `mlp` predictor of layer i is two matrices: fc1 [R, D] and fc2 [F, R], R may differ from layer to layer.

manifest.json: version (1), kind ("mlp"), fingerprint (of the model it was made for, or null: unknown), layers,
hidden, ffn, ranks (one a layer), dtype, lead (layers between input and prediction), threshold (or null), source,
tokens (seen in training, or null), metrics (an object, or null), files (every file in weights/ with its sha256).
weights/ holds {"000": {"fc1", "fc2"}, ...}; orbax sees it only once its files are those of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Sequence
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

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights"
VERSION = 1
KINDS = ("mlp",)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MOST_RANK = 2**16
_MANIFEST_BYTES = 2**20
_SLACK_BYTES = 2**20
_SIZES = {"layers": 2**10, "hidden": 2**17, "ffn": 2**20}  # the largest of each, as config.json may have them

Weights = Sequence[tuple[npt.NDArray, npt.NDArray]]  # (fc1 [R, D], fc2 [F, R]) a layer


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

    def shapes(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of fc1 and fc2."""
        rank = self.ranks[layer]
        return (rank, self.hidden), (self.ffn, rank)


def write_predictors(folder: Path, manifest: Manifest, weights: Weights) -> Path:
    """Write the new folder and return it; nobody ever sees half of it.

    The arrays have the manifest's dtype and shapes (ValueError). NumericalError: NaN or infinity. UsageError:
    `folder` exists and is not empty. StorageError: the disk.
    """
    record = {"version": VERSION, **asdict(manifest), "ranks": list(manifest.ranks)}
    if problem := _problem(record) or _weights_problem(manifest, weights):
        raise ValueError(problem)
    _check_finite(weights, folder)
    needed = sum(fc1.nbytes + fc2.nbytes for fc1, fc2 in weights) + _SLACK_BYTES
    with draft_of(folder, needed) as draft:
        _check_room(draft / WEIGHTS_NAME, needed)
        _save(draft / WEIGHTS_NAME, _tree(weights))
        record["files"] = _hashes(draft / WEIGHTS_NAME)
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


def _hashes(folder: Path) -> dict[str, str]:
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
        found = _hashes(folder / WEIGHTS_NAME)
    except OSError as error:
        raise StorageError(f"cannot read {located(folder / WEIGHTS_NAME)}: {error.strerror or error}") from error
    if found != said:
        names = [name for name in said.keys() | found.keys() if said.get(name) != found.get(name)]
        raise ModelError(f"{located(folder / WEIGHTS_NAME)} is damaged: {listing(names)}: convert or train it again")


def read_predictors(
    folder: Path, *, fingerprint: str | None, layers: int, hidden: int, ffn: int
) -> tuple[Manifest, list[tuple[npt.NDArray, npt.NDArray]]]:
    """The manifest and, per layer, (fc1 [R, D], fc2 [F, R]) in the manifest's dtype.

    MismatchError: made for other sizes, or for another fingerprint. fingerprint None: the model's is not known;
    a folder that knows none is accepted with a log line. ModelError: damaged. NumericalError: NaN or infinity.
    """
    manifest = read_manifest(folder)
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn}
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
    _check_files(folder)
    tree = _restore(folder, manifest)
    weights = [(tree[_key(i)]["fc1"], tree[_key(i)]["fc2"]) for i in range(manifest.layers)]
    if problem := _weights_problem(manifest, weights):
        raise ModelError(f"{located(folder)} is damaged: {problem}")
    _check_finite(weights, folder)
    return manifest, weights


def _problem(record: dict[str, Any]) -> str | None:
    """Why `record` is no manifest, or None."""
    for name, most in _SIZES.items():
        if not _is_integer(record.get(name), 1, most):
            return f"{name} must be an integer from 1 to {most}, got {quoted(record.get(name))}"
    ranks = record.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != record["layers"]:
        return f"ranks must be a list of {record['layers']} integers, got {quoted(ranks)}"
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
    # What is null must be written as null: a key that is missing was lost.
    wrong = [name for name, holds in rules.items() if not holds or name not in record]
    return f"{wrong[0]} must not be {quoted(record.get(wrong[0]))}" if wrong else None


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _weights_problem(manifest: Manifest, weights: Weights) -> str | None:
    if len(weights) != manifest.layers:
        return f"{len(weights)} layers of weights, expected {manifest.layers}"
    for i, pair in enumerate(weights):
        for name, matrix, shape in zip(("fc1", "fc2"), pair, manifest.shapes(i), strict=True):
            if matrix.shape != shape or matrix.dtype != DTYPES[manifest.dtype]:
                found = f"{matrix.dtype} {matrix.shape}"
                return f"{name} of layer {i} must be {manifest.dtype} {shape}, got {found}"
    return None


def _check_finite(weights: Weights, folder: Path) -> None:
    for i, pair in enumerate(weights):
        for name, matrix in zip(("fc1", "fc2"), pair, strict=True):
            if not np.isfinite(matrix).all():
                raise NumericalError(f"{name} of layer {i} for {located(folder)} holds NaN or infinity")


def _key(layer: int) -> str:
    return f"{layer:03}"


def _tree(weights: Weights) -> dict[str, dict[str, npt.NDArray]]:
    return {_key(i): {"fc1": fc1, "fc2": fc2} for i, (fc1, fc2) in enumerate(weights)}


def _check_room(path: Path, count: int) -> None:
    """OSError if `count` bytes cannot be had at `path`: a full disk or a quota, which orbax ends with pages of log."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, count)
    path.unlink()


def _save(path: Path, tree: dict[str, dict[str, npt.NDArray]]) -> None:
    import orbax.checkpoint as ocp

    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))
    except (ValueError, RuntimeError) as error:  # tensorstore words a full disk as one of these
        code = re.search(r"os_error_code='(\d+)'", str(error))
        reason = os.strerror(int(code[1])) if code else plain(str(error)[:160])
        raise StorageError(f"cannot write {located(path)}: {reason}") from error


def _restore(folder: Path, manifest: Manifest) -> dict[str, dict[str, npt.NDArray]]:
    """The arrays, once their stored shapes and types are known to be those of the manifest."""
    import orbax.checkpoint as ocp

    path = (folder / WEIGHTS_NAME).absolute()
    kind = DTYPES[manifest.dtype]
    expected = {_key(i): dict(zip(("fc1", "fc2"), manifest.shapes(i), strict=True)) for i in range(manifest.layers)}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            held = checkpointer.metadata(path).item_metadata.tree
            found = {key: {name: tuple(leaf.shape) for name, leaf in part.items()} for key, part in held.items()}
            if found != expected or any(leaf.dtype != kind for part in held.values() for leaf in part.values()):
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
