"""Activation statistics: how often each neuron was live, measured over some text. One npz file per model.

Members: version (int), fingerprint (text), frequency (float32 [L, F], the share of tokens for which the
neuron was live), tokens (int, how many were counted); and, if `collect-stats` wrote it, mass (float32 [L, F], mean
|activation| x |down row|) and cosine (float32 [L, 3], of a layer's FFN input with that 1, 2, 3 layers on).

Of a mixture of experts F is E, frequency the share of tokens that went to the expert, and L counts the layers that have
experts.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint.drafts import draft_file
from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.config import ModelSpec
from dynajax.errors import MismatchError, StorageError


class Statistics(NamedTuple):
    """What is known of a model's neurons."""

    frequency: npt.NDArray[np.float32]  # [L, F]
    mass: npt.NDArray[np.float32] | None = None  # [L, F]
    cosine: npt.NDArray[np.float32] | None = None  # [L, 3]


STATS_NAME = "activations.npz"
VERSION = 1
_OVERHEAD_BYTES = 2**16  # headers and the small members


def stats_path(model: Path) -> Path:
    """Where a model's own statistics are looked for: in its folder; beside a .gguf file as NAME.activations.npz."""
    return model.with_name(f"{model.stem}.{STATS_NAME}") if model.suffix == ".gguf" else model / STATS_NAME


def read_stats(path: Path, spec: ModelSpec, fingerprint: str | None) -> npt.NDArray[np.float32]:
    """The frequencies [L, F]. MismatchError if the file is another model's, another version's or damaged.

    fingerprint None: the weights are not at hand (planning by the config alone), only the shape is compared.
    """
    shape = (len(spec.unit_layers), spec.units)
    where = located(path)
    if not path.is_file():
        raise StorageError(f"no statistics file {where}")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > 8 * shape[0] * (shape[1] + 3) + _OVERHEAD_BYTES:
            raise MismatchError(f"{where} unpacks to {unpacked} bytes, too many for {shape[0]} x {shape[1]} neurons")
        with np.load(path, allow_pickle=False) as archive:
            version, owner, tokens = (archive[key][()] for key in ("version", "fingerprint", "tokens"))
            frequency = archive["frequency"]
    except OSError as error:
        raise StorageError(f"cannot read {where}: {error.strerror or error}") from error
    except MismatchError:
        raise
    except (ValueError, KeyError, EOFError, MemoryError, SyntaxError, NotImplementedError, zipfile.BadZipFile) as error:
        raise MismatchError(f"{where} is not a statistics file: {plain(str(error))}: collect it again") from error
    if not np.array_equal(version, VERSION):
        raise MismatchError(f"{where} has version {quoted(version)}, this program reads {VERSION}: collect it again")
    if fingerprint is not None and str(owner) != fingerprint:
        raise MismatchError(
            f"{where} was made for the model {plain(str(owner)[:12])}, this one is {fingerprint[:12]}: collect it again"
        )
    if problem := _problem(frequency, tokens, shape):
        raise MismatchError(f"{where}: {problem}: collect it again")
    return frequency


def read_contributions(
    path: Path, spec: ModelSpec
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None]:
    """(mass [L, F], cosine [L, 3]) of a file that `read_stats` accepts; None for what it has not."""
    shapes = {"mass": (len(spec.unit_layers), spec.units), "cosine": (spec.layers, 3)}
    with np.load(path, allow_pickle=False) as archive:
        found = {name: archive[name] for name in shapes if name in archive}
    for name, array in found.items():
        sound = array.dtype == np.float32 and array.shape == shapes[name]
        if not sound or (name == "mass" and not (np.isfinite(array).all() and array.min() >= 0)):
            raise MismatchError(f"{located(path)}: {name} is damaged: collect it again")
    return found.get("mass"), found.get("cosine")


def write_stats(
    path: Path,
    *,
    fingerprint: str,
    frequency: npt.NDArray[np.float32],
    tokens: int,
    **more: Any,  # mass and cosine
) -> None:
    """Write the file beside its final name, then rename: readers see the old one or the new one, whole."""
    frequency = np.ascontiguousarray(frequency, dtype=np.float32)
    if frequency.ndim != 2 or (problem := _problem(frequency, tokens, frequency.shape)):
        raise ValueError(problem if frequency.ndim == 2 else f"frequency must be [L, F], got {frequency.shape}")
    with draft_file(path, frequency.nbytes + _OVERHEAD_BYTES) as file:
        np.savez(file, version=VERSION, fingerprint=fingerprint, frequency=frequency, tokens=tokens, **more)


def _problem(frequency: npt.NDArray, tokens: object, shape: tuple[int, ...]) -> str | None:
    if not isinstance(tokens, int | np.integer) or isinstance(tokens, bool) or tokens < 1:
        return f"tokens must be an integer >= 1, got {quoted(tokens)}"
    if frequency.dtype != np.float32 or frequency.shape != shape:
        return f"frequency must be float32 {shape}, got {frequency.dtype} {frequency.shape}"
    if not np.isfinite(frequency).all() or frequency.min() < 0 or frequency.max() > 1:
        return "frequency must lie between 0 and 1 everywhere"
    return None
