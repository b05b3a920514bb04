"""Held-out loss of a model dense, exact and predicted, each beside a random mask of its density and beside no FFN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynajax.config import EngineConfig
from dynajax.engine import Engine
from dynajax.engine.checks import LiveCounts
from dynajax.engine.masked import Masked, RandomScores
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
    density: float  # neurons, or experts, computed / all
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


def _row(engine: Engine, windows: Windows, on_percent: Callable[[int], None]) -> Row:
    told = engine.stats()
    layers, units = len(told["pool_slots"]), told["units_per_layer"]
    experts = told["unit_kind"] == "expert"
    skips, dense = told["sparsity"] == "predicted", told["sparsity"] == "dense" or experts
    passes, counter = 1 if dense else 3, LiveCounts(layers, units)
    share = 100 / (passes * len(windows))
    if experts or not (skips or dense):
        engine.watch(lambda seen: counter.add(seen, seen.live))
    loss, counts = _pass(engine, windows, None, lambda done: on_percent(int(done * share)), check=skips)
    read = engine.stats()["host_bytes_read"] - told["host_bytes_read"]
    engine.watch(None)
    live, tokens = counter.take()
    density = np.ones(layers) if live is None else live.sum(axis=1) / (tokens * units)
    if counts is not None:
        density = counts.computed / (counts.tokens * units)
    random = none = None
    if not dense:
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
