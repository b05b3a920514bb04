"""Stage `mixtral`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import make_moe
from benchmarks.gpu_stages.device import facts, is_cpu
from benchmarks.gpu_stages.experts import SHARE, SMALL, generate
from benchmarks.gpu_stages.isolated import Report
from dynajax.checkpoint import Checkpoint
from predictors.routing_folder import RoutingEntry, RoutingManifest, write_routing

SHAPE = {"layers": 3, "experts": 8, "top_k": 2, "width": 14336, "hidden_size": 4096, "head_dim": 128}
SHAPE |= {"num_key_value_heads": 8}
ARMS: dict[str, dict[str, str]] = {
    "static": {"policy": "static"},
    "lru": {"policy": "lru"},
    "scan, residual": {"policy": "scan", "prefetch": "residual"},
}


def run(report: Report) -> None:
    """Of three layers of Mixtral's shape, two fifths of the experts on the device: does moving experts pay?

    An expert has 350 MB in 16 bit. If `lru` or `scan, residual` is slower than `static`, moving one costs more than
    computing it here: the probed costs should have said so, compare migrated and computed_hot_share. Routing of random
    weights is nearly uniform, which is the worst case for every cache. In float32 the tokens must be the same.
    """
    report.add(**facts())
    dtype = "float32" if is_cpu() else "bfloat16"
    with TemporaryDirectory() as folder:
        make_moe.write(Path(folder), **(SMALL if is_cpu() else SHAPE))
        cases: list[dict[str, Any]] = []
        first: list[list[int]] | None = None
        inputs: dict[int, list[np.ndarray]] = {}

        def see(layer: int, hidden: np.ndarray, live: np.ndarray) -> None:
            inputs.setdefault(layer, []).append(hidden)

        for name, settings in ARMS.items():
            case = generate(folder, dtype, 1, share=SHARE, tell=None if inputs else see, **settings)
            if not cases:
                keep_residuals(Path(folder), np.stack([np.concatenate(inputs[i]).mean(axis=0) for i in sorted(inputs)]))
            first = first or case["tokens"]
            agrees = case.pop("tokens") == first
            cases.append({"arm": name, **case, "agrees": agrees})
            report.add(share=SHARE, cases=cases)
            if dtype == "float32" and not agrees:
                report.fail(f"{name}: the tokens depend on where experts are")
            if name == "static" and case["migrated"]:
                report.fail(f"static: {case['migrated']} experts moved")


def keep_residuals(folder: Path, means: np.ndarray) -> None:
    """What `--prefetch residual` reads: means [L, D] of what every layer's router read, seen in the first arm."""
    checkpoint = Checkpoint.open(folder)
    experts = checkpoint.spec.experts
    assert experts is not None
    manifest = RoutingManifest(
        fingerprint=checkpoint.fingerprint(),
        layers=checkpoint.spec.unit_layers,
        hidden=means.shape[1],
        experts=checkpoint.spec.units,
        top_k=experts.router.top_k,
        lead=1,
        dtype="float16",
        source="the stage's own tokens",
        tokens=1,
        entries=tuple(RoutingEntry(lead=1, asked=m, kind="residual", metrics={}) for m in range(len(means) - 1)),
    )
    write_routing(folder / "predictors", manifest, {"means": {"hidden": means.astype(np.float32)}})
