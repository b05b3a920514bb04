"""Held-out loss of a model dense, exact and predicted, each beside a random mask of its density and beside no FFN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.config import EngineConfig
from dynajax.engine import Engine
from dynajax.engine.masked import Masked, RandomScores
from dynajax.engine.observing import Seen
from dynajax.errors import UsageError

Progress = Callable[[str, int, int], None]
Windows = Sequence[Sequence[int]]  # token ids, each a text of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to run the model. Figures that do not apply are None."""

    model: str
    sparsity: str
    predictor: str
    tokens: int  # that have a loss: all but the first of every window
    loss_nats: float  # mean
    ppl: float
    density: float  # neurons computed / all; of a mixture of experts always the experts that are chosen / all
    density_layers_ge_1: float | None
    computed_per_live: float | None  # layers >= 1: neurons computed / neurons that are live
    recall: float | None  # live neurons that were computed / live neurons
    random_mask_loss: float | None
    no_ffn_loss: float | None
    host_bytes_read: int  # weights, by the host's half

    def to_json(self) -> dict[str, Any]:
        """Plain types only."""
        return asdict(self)


def evaluate(
    model: str,
    folder: Path,  # where it is
    config: EngineConfig,
    sparsities: Sequence[str],
    windows: Windows,
    progress: Progress,
) -> list[Row]:
    """A row for each sparsity, all over the same windows."""
    if not any(len(window) > 1 for window in windows):
        raise UsageError("there is no text to evaluate on: give more of it")
    longest = max(len(window) for window in windows)
    rows = []
    for sparsity in sparsities:
        settings: dict[str, Any] = asdict(replace(config, ctx=longest, sparsity=sparsity))
        with Engine.from_pretrained(model, folder=folder, progress=progress, **settings) as engine:
            rows.append(_row(engine, windows, lambda done, name=sparsity: progress(f"evaluate {name}", done, 100)))
    return rows


class _Live:
    """Live units and all units, by layer, of what an engine shows; layers come in order, those without units never."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def add(self, seen: Seen) -> None:
        live, units = self._counts.get(seen.layer, (0, 0))
        self._counts[seen.layer] = live + int(np.count_nonzero(seen.live)), units + seen.live.size

    def shares(self) -> npt.NDArray[np.float64]:
        """By layer."""
        return np.array([live / units for live, units in self._counts.values()])


def _row(engine: Engine, windows: Windows, on_percent: Callable[[int], None]) -> Row:
    told = engine.stats()
    layers, units, experts = len(told["pool_slots"]), told["units_per_layer"], told["unit_kind"] == "expert"
    skips, masked = told["sparsity"] == "predicted", told["sparsity"] != "dense" and not experts
    counted = experts or (masked and not skips)
    passes, seen = 3 if masked else 1, _Live()
    share = 100 / (passes * len(windows))
    if counted:
        engine.watch(seen.add)
    loss, counts = _pass(engine, windows, None, lambda done: on_percent(int(done * share)), check=skips)
    read = engine.stats()["host_bytes_read"] - told["host_bytes_read"]
    engine.watch(None)
    density = seen.shares() if counted else np.ones(layers)
    if counts is not None:
        density = counts.computed / (counts.tokens * units)
    random = none = None
    if masked:
        at = len(windows)
        masks = [RandomScores(density, units), RandomScores(np.zeros(layers), units)]
        random, none = (
            _pass(engine, windows, mask, lambda done, n=n: on_percent(int((n * at + done) * share)), check=False)[0]
            for n, mask in enumerate(masks, start=1)
        )
    return Row(
        model=told["model"],
        sparsity=told["sparsity"],
        predictor=told["predictor"],
        tokens=sum(len(window) - 1 for window in windows),
        loss_nats=loss,
        ppl=math.exp(min(loss, 700)),
        density=float(density.mean()),
        density_layers_ge_1=float(density[1:].mean()) if layers > 1 else None,
        computed_per_live=None if counts is None or layers == 1 else _excess(counts),
        recall=None if counts is None else float(counts.found.sum() / max(1, counts.live.sum())),
        random_mask_loss=random,
        no_ffn_loss=none,
        host_bytes_read=read,
    )


def _pass(
    engine: Engine, windows: Windows, source: RandomScores | None, on_window: Callable[[int], None], *, check: bool
) -> tuple[float, Masked | None]:
    """(mean loss, counts of what was computed where neurons were skipped) over all windows."""
    total, tokens, counts = 0.0, 0, None
    for done, window in enumerate(windows, start=1):
        scored = engine.score(list(window), source=source, check=check)
        total -= float(scored.logprobs.sum(dtype=np.float64))
        tokens += len(scored.logprobs)
        if scored.counts is not None:
            counts = scored.counts if counts is None else counts.plus(scored.counts)
        on_window(done)
    return total / tokens, counts


def _excess(counts: Masked) -> float:
    """Neurons computed per live one, layers >= 1; both per token."""
    computed = counts.computed[1:].sum() / counts.tokens
    return float(computed / max(1e-9, (counts.live[1:] / np.maximum(1, counts.seen_tokens[1:])).sum()))
