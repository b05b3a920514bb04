"""PowerInfer's predictor folders -> ours. One file per layer, `model_<layer>.pt`, with fc1 [R, D] and fc2 [F, R]."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.reading import DTYPES
from dynajax.checkpoint.wording import listing, located, plain, quoted
from dynajax.convert.folder import STAGE, Progress
from dynajax.convert.layer_files import layer_files
from dynajax.convert.numbers import converted
from dynajax.convert.torch_zip import TorchFile, TorchTensor
from dynajax.errors import MismatchError, ModelError, UsageError
from predictors.folder import MOST_RANK, Manifest, write_predictors

STEM = "model"
# The end of a name -> which matrix; nn.Sequential counts what stands between them too.
_ENDINGS = (("fc1.weight", "fc2.weight"), ("0.weight", "1.weight"), ("0.weight", "2.weight"))


def convert_predictors(
    source: Path,
    target: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the new predictor folder `target`.

    model: the folder of the model the predictors were made for: its sizes are compared (MismatchError) and its
    fingerprint noted; None leaves the fingerprint null. dtype None keeps the stored type, float32 if there are
    several. lead is 0 and the threshold unknown: PowerInfer's files say neither. Memory: all the predictors.

    Raises ModelError (not such files; nothing of them run), NumericalError, UsageError and StorageError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {quoted(dtype)}")
    checkpoint = None if model is None else Checkpoint.open(model)
    pairs = [_pair(path) for path in layer_files(source, STEM)]
    hidden, ffn = _sizes(pairs, source)
    if checkpoint is not None:
        spec = checkpoint.spec
        if (len(pairs), hidden, ffn) != (spec.layers, spec.hidden, spec.ffn):
            raise MismatchError(
                f"{located(source)} is for {len(pairs)} layers, hidden {hidden}, ffn {ffn}; the model has "
                f"{spec.layers}, {spec.hidden}, {spec.ffn}: name the model they were made for"
            )
    kinds = {tensor.dtype for pair in pairs for tensor in pair}
    kind = dtype or (kinds.pop() if len(kinds) == 1 and kinds <= DTYPES.keys() else "float32")
    weights = []
    for i, (fc1, fc2) in enumerate(pairs):
        weights.append((_read(fc1, kind), _read(fc2, kind)))
        if progress is not None:
            progress(STAGE, i + 1, len(pairs))
    manifest = Manifest(
        fingerprint=None if checkpoint is None else checkpoint.fingerprint(),
        layers=len(pairs),
        hidden=hidden,
        ffn=ffn,
        ranks=tuple(fc1.shape[0] for fc1, _ in pairs),
        dtype=kind,
        source=f"converted from the PyTorch files of {plain(source.name)}",
    )
    return write_predictors(target, manifest, weights)


def _pair(path: Path) -> tuple[TorchTensor, TorchTensor]:
    """fc1 and fc2 of one file, whatever stands before their names; anything beside them is refused."""
    tensors = TorchFile.open(path).tensors
    for endings in _ENDINGS:
        found = [[t for name, t in tensors.items() if f".{name}".endswith(f".{ending}")] for ending in endings]
        if len(tensors) == 2 and all(len(matches) == 1 for matches in found):
            (fc1,), (fc2,) = found
            return fc1, fc2
    raise ModelError(
        f"{plain(path.name)} must hold fc1.weight and fc2.weight, or 0.weight and 1.weight (2.weight), and nothing "
        f"else, found {listing(tensors)}"
    )


def _sizes(pairs: list[tuple[TorchTensor, TorchTensor]], source: Path) -> tuple[int, int]:
    """(D, F), equal in all layers."""
    for layer, (fc1, fc2) in enumerate(pairs):
        first, second = pairs[0]
        fits = len(fc1.shape) == len(fc2.shape) == 2 and fc1.shape[0] == fc2.shape[1] and fc1.is_float and fc2.is_float
        if not fits or 0 in fc1.shape + fc2.shape or fc1.shape[0] > MOST_RANK:
            found = f"{fc1.dtype} {quoted(fc1.shape)} and {fc2.dtype} {quoted(fc2.shape)}"
            raise ModelError(f"{located(source)}, layer {layer}: expected floats [R, D] and [F, R], found {found}")
        if (fc1.shape[1], fc2.shape[0]) != (first.shape[1], second.shape[0]):
            raise ModelError(
                f"{located(source)}: layer {layer} is for hidden {fc1.shape[1]} and ffn {fc2.shape[0]}, layer 0 for "
                f"{first.shape[1]} and {second.shape[0]}"
            )
    return pairs[0][0].shape[1], pairs[0][1].shape[0]


def _read(tensor: TorchTensor, dtype: str) -> npt.NDArray:
    out = np.empty(tensor.size, DTYPES[dtype])
    done = 0
    for block in tensor.blocks():
        out[done : done + block.size] = converted(block, dtype, tensor.name).reshape(-1)
        done += block.size
    return out.reshape(tensor.shape)
