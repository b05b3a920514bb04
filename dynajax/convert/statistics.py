"""PowerInfer's activation counts -> activations.npz. One file per layer, `activation_<layer>.pt`, each a tensor [F]."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import STATS_NAME, Checkpoint, write_stats
from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.convert.folder import STAGE, Progress
from dynajax.convert.layer_files import layer_files
from dynajax.convert.torch_zip import TorchFile
from dynajax.errors import MismatchError, ModelError, StorageError, UsageError

STEM = "activation"


def convert_statistics(source: Path, target: Path, *, model: Path, progress: Progress | None = None) -> Path:
    """Write `target`/activations.npz for the model in the folder `model`, and return that file.

    `target` may exist (it may be the model's folder) but not the file. The files hold how often a neuron was
    active, not over how many tokens: frequency is the count divided by the largest count of all layers, and
    `tokens` that largest count. So a frequency here is a proxy: right in its order and its ratios, too high
    by one common factor, unless some neuron was active for every token.

    Raises ModelError (not such files; nothing of them run), MismatchError (another model's sizes), UsageError and
    StorageError.
    """
    checkpoint = Checkpoint.open(model)
    spec = checkpoint.spec
    path = target / STATS_NAME
    if path.exists():
        raise UsageError(f"{located(path)} exists: remove it first, or name another folder")
    files = layer_files(source, STEM)
    if len(files) != spec.layers:
        raise MismatchError(f"{located(source)} has {len(files)} layers, the model has {spec.layers}")
    counts = np.empty((spec.layers, spec.ffn), np.float64)
    for layer, file in enumerate(files):
        counts[layer] = _counts(file, spec.ffn)
        if progress is not None:
            progress(STAGE, layer + 1, len(files))
    most = counts.max()
    if most <= 0:
        raise ModelError(f"{located(source)} counts no activation at all")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {located(target)}: {error.strerror or error}") from error
    write_stats(
        path,
        fingerprint=checkpoint.fingerprint(),
        frequency=(counts / most).astype(np.float32),
        tokens=max(1, int(most)),
    )
    return path


def _counts(file: Path, ffn: int) -> npt.NDArray:
    """One layer's counts [F]: finite and not negative."""
    tensors = list(TorchFile.open(file).tensors.values())
    if len(tensors) != 1 or len(tensors[0].shape) != 1:
        shapes = quoted([tensor.shape for tensor in tensors[:8]])
        raise ModelError(f"{plain(file.name)} must hold one tensor of counts [F], found {shapes}")
    if tensors[0].shape != (ffn,):
        raise MismatchError(f"{plain(file.name)} counts {tensors[0].shape[0]} neurons, the model has {ffn} a layer")
    counts = tensors[0].read().astype(np.float64)
    if not np.isfinite(counts).all() or counts.min() < 0:
        raise ModelError(f"{plain(file.name)} holds counts that are negative, infinite or NaN")
    return counts
