"""The predictors that `make_checkpoint` writes beside a model, as a folder that the engine reads.

    python -m benchmarks.own_predictors runs/synth-1.1b runs/synth-1.1b-predictors
    python scripts/generate.py --model runs/synth-1.1b --predictor runs/synth-1.1b-predictors --set theta=0.5

They are of PowerInfer's kind: fc1, relu, fc2 of the stream before the FFN norm, for the same layer; above 0 is live.
Their scores are no logarithms of odds, so that probabilities made of them are only right at 1/2: hence theta.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.make_checkpoint import PREDICTORS
from dynajax.checkpoint import Checkpoint
from dynajax.errors import StorageError
from predictors.folder import Manifest, write_predictors


def convert(model: Path, target: Path) -> Path:
    """Write the new folder `target`. StorageError: the model has no such file."""
    if not (model / PREDICTORS).is_file():
        raise StorageError(f"no {PREDICTORS} in {model}: benchmarks.make_checkpoint writes it")
    checkpoint, arrays = Checkpoint.open(model), load_file(model / PREDICTORS)
    spec = checkpoint.spec
    pairs = [
        (arrays[f"layers.{layer}.fc1.weight"], arrays[f"layers.{layer}.fc2.weight"]) for layer in range(spec.layers)
    ]
    manifest = Manifest(
        fingerprint=checkpoint.fingerprint(),
        layers=spec.layers,
        hidden=spec.hidden,
        ffn=spec.ffn,
        ranks=tuple(len(fc1) for fc1, _ in pairs),
        dtype=pairs[0][0].dtype.name,
        source=f"{PREDICTORS} of benchmarks.make_checkpoint",
        threshold=0.0,
    )
    return write_predictors(target, manifest, pairs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args(argv)
    print(f"written to {convert(args.model, args.target)}")


if __name__ == "__main__":
    main()
