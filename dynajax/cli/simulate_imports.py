"""Routing traces of other programs, by what their files look like; see `sim.experts.formats`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynajax.checkpoint.wording import located, plain
from dynajax.errors import DynajaxError, MismatchError, StorageError, UsageError
from dynajax.routing_trace import RoutingTrace
from dynajax.sim.experts.formats import (
    MOST_TOKENS,
    counted_steps,
    imported,
    layer_number,
    read_csv,
    read_json,
    read_npy,
)

KINDS = (".parquet", ".json", ".npy", ".pt", ".csv")
COLUMNS = ("layer", "token", "expert", "count", "score")  # that --columns may name
COUNTS = "logical_count"  # of SGLang's expert distribution


def is_foreign(path: Path) -> bool:
    """Whether it looks like another program's trace: one of KINDS, or a folder."""
    return path.suffix in KINDS or path.is_dir()


def columns_of(text: str | None) -> dict[str, str]:
    """What --columns expert=indices,score=scores says; UsageError for what it cannot mean."""
    found: dict[str, str] = {}
    for part in [] if text is None else text.split(","):
        name, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not column or name not in COLUMNS or name in found:
            raise UsageError(f"--columns takes NAME=COLUMN,... with the names {', '.join(COLUMNS)}, got {text!r}")
        found[name] = column
    return found


def read_foreign(path: Path, columns: Mapping[str, str], width: int | None, top_k: int | None) -> RoutingTrace:
    """A file or folder. width, top_k: of the model that is meant, where it is known.

    MismatchError, in one line, if it is not what its name promises; UsageError if a package is missing.
    """
    if not path.exists():
        raise StorageError(f"no trace {located(path)}")
    readers: dict[str, Callable[[], RoutingTrace]] = {
        ".json": lambda: read_json(path, width),
        ".npy": lambda: read_npy(path, top_k or 1),
        ".csv": lambda: read_csv(path, width, top_k or 1, columns),
        ".pt": lambda: _torch(path, top_k or 1),
        ".parquet": lambda: _parquet([path], columns, width),
        "": lambda: _parquet(_layers_of(path), columns, width),
    }
    try:
        return readers["" if path.is_dir() else path.suffix]()
    except DynajaxError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read {located(path)}: {error.strerror or error}") from error
    except (ValueError, TypeError, IndexError, KeyError, EOFError, OverflowError, MemoryError) as error:
        raise MismatchError(f"{located(path)} is no routing trace of its kind: {plain(str(error))}") from error


def _torch(path: Path, top_k: int) -> RoutingTrace:
    """SGLang's expert distribution: a tensor of counts [steps, layers, experts]. Nothing in the file is run."""
    from dynajax.convert.torch_zip import TorchFile

    tensors = TorchFile.open(path).tensors
    if COUNTS not in tensors:
        raise ValueError(f"it has no tensor {COUNTS}, only {', '.join(tensors) or 'none'}")
    counts = tensors[COUNTS].read()
    return counted_steps(counts[None] if counts.ndim == 2 else counts, top_k)


# --- parquet: FLAME-MoE, a file a layer, a row a token ---


def _layers_of(folder: Path) -> list[Path]:
    """The files of a folder, in the order of the layers' numbers."""
    found = sorted(folder.glob("*.parquet"), key=lambda path: (layer_number(path.stem) or 0, path.name))
    if not found:
        raise ValueError("it is a folder without .parquet files: give the one that has a file for each layer")
    return found


def _parquet(paths: Sequence[Path], columns: Mapping[str, str], width: int | None) -> RoutingTrace:
    """The first MOST_TOKENS tokens."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError("pyarrow is not installed: pip install dynajax[traces]") from error
    layers, scores = [], []
    for path in paths:
        try:
            layer, score = _layer(parquet.ParquetFile(path), columns)
        except Exception as error:  # pyarrow's own errors need not be ValueErrors
            raise ValueError(f"{path.name}: {error}") from error
        layers.append(layer)
        scores.append(score)
    if len({layer.shape for layer in layers}) != 1:
        raise ValueError("its layers have different numbers of tokens, or of experts of a token")
    known = [score for score in scores if score is not None]
    weights = np.stack(known, axis=1) if len(known) == len(layers) else None
    return imported(np.stack(layers, axis=1), width, weights=weights)


def _layer(file: Any, columns: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray | None]:
    """Experts [T, K] and scores, as far as there are any."""
    names = [field.name for field in file.schema_arrow]
    ids = _named(names, columns.get("expert"), ("indices", "experts", "expert_ids", "topk_ids", "expert"))
    if ids is None:
        raise ValueError(f"none of its columns {', '.join(names)} names experts: give --columns expert=NAME")
    score = _named(names, columns.get("score"), ("scores", "weights", "probs", "topk_weights"))
    wanted, found, count = [ids] if score is None else [ids, score], [], 0
    for batch in file.iter_batches(batch_size=min(MOST_TOKENS, 2**14), columns=wanted):
        found.append([np.array(batch.column(at).to_pylist()) for at in range(len(wanted))])
        count += batch.num_rows
        if count >= MOST_TOKENS:
            break
    if not found:
        raise ValueError("it has no rows")
    parts = [np.concatenate(part)[:MOST_TOKENS] for part in zip(*found, strict=True)]
    if parts[0].ndim != 2 or not np.issubdtype(parts[0].dtype, np.integer):
        raise ValueError(f"its column {ids} must hold lists of as many experts, whole numbers")
    same = score is not None and parts[1].shape == parts[0].shape
    return parts[0], parts[1] if same else None


def _named(names: Sequence[str], given: str | None, usual: Sequence[str]) -> str | None:
    if given is not None:
        if given not in names:
            raise ValueError(f"it has no column {given}, only {', '.join(names)}")
        return given
    return next((name for name in usual if name in names), None)
