"""Tells a recorder where the tokens of a mixture of experts go, and what is on the device meanwhile.

A prompt, and decoding without plans, is seen through `MixtureLayers.watch`; decoding by plans through
`MixtureRunner.on_step`, which also knows the pool at the moment of the plan. Both are empty while nobody records.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.engine.mixture.foretelling import Foretellers
from dynajax.engine.mixture.groups import Routed
from dynajax.engine.mixture.layers import MixtureLayers
from dynajax.engine.mixture.mixture import foretellers
from dynajax.engine.mixture.runner import MixtureRunner
from dynajax.engine.mixture.strategy import MixtureStrategy
from dynajax.engine.observing import Seen
from dynajax.engine.opening import Parts
from dynajax.errors import UsageError
from dynajax.routing_trace import RoutingHead, RoutingRecord
from dynajax.trace import DECODE, Recorder

I32 = npt.NDArray[np.int32]


def record_experts(parts: Parts, recorder: Recorder) -> None:
    """From now on the recorder is told. With record_scores also where each layer foretold that tokens would go."""
    prepared, layers = parts.prepared, parts.layers
    strategy, spec = prepared.strategy, prepared.spec
    assert isinstance(layers, MixtureLayers) and isinstance(strategy, MixtureStrategy) and spec.experts is not None
    if layers.watch is not None:
        raise UsageError("somebody observes this engine: end that before recording, with observe(None)")
    known = (prepared, layers, parts.config, parts.fingerprint)
    telling = foretellers(*known) if strategy.knobs.record_scores else None
    head = RoutingHead(
        fingerprint=parts.fingerprint,
        unit_layers=spec.unit_layers,
        width=spec.units,
        top_k=spec.experts.router.top_k,
        settings=_settings(parts, strategy),
    )
    frequency = None if parts.mixture is None else parts.mixture.frequency
    record = recorder.take(RoutingRecord(head, predicts=telling is not None, frequency=frequency))
    _Hooks(parts, layers, record, telling).put()
    parts.recorder = recorder


def end_record_experts(parts: Parts) -> None:
    """Nobody is told any more."""
    layers, recorder, mixture = parts.layers, parts.recorder, parts.mixture
    assert isinstance(layers, MixtureLayers) and recorder is not None
    parts.recorder = parts.stepper.on_tokens = layers.watch = None
    if isinstance(parts.runner, MixtureRunner):
        parts.runner.on_step = None
    if mixture is not None and isinstance(recorder.taken, RoutingRecord):
        recorder.taken.costs = asdict(mixture.runner.moves.estimator.costs())


def _settings(parts: Parts, strategy: MixtureStrategy) -> dict[str, object]:
    return {
        "sparsity": strategy.sparsity,
        "policy": strategy.policy,
        **asdict(strategy.parts),
        "predictor": parts.predictor,
        "lead": strategy.knobs.lead,
        "batch": parts.config.batch,
        "deterministic": parts.config.deterministic,
        "knobs": asdict(strategy.knobs),
    }


@dataclass(slots=True, eq=False)
class _Hooks:
    """What is called while a record is made."""

    parts: Parts
    layers: MixtureLayers
    record: RoutingRecord
    telling: Foretellers | None
    by_steps: bool = False  # the tokens that run are told of by `on_step`

    def put(self) -> None:
        """Called from now on. Where no plans are made the pool never changes, so that it is told of once."""
        for m in range(self.record.head.layers):
            self.record.place(m, self.parts.pool.bucket(m))
        self.parts.stepper.on_tokens = self._on_tokens
        self.layers.watch = self._on_seen
        if isinstance(self.parts.runner, MixtureRunner):
            self.parts.runner.on_step = self._on_step

    def _on_tokens(self, position: I32, row: I32, phase: int) -> None:
        self.by_steps = phase == DECODE and isinstance(self.parts.runner, MixtureRunner)
        self.record.begin(position, row, phase)

    def _on_seen(self, seen: Seen) -> None:
        m = self.layers.number(seen.layer)
        assert m is not None
        self._foretell(m, seen.hidden)
        if not self.by_steps:
            self.record.add(m, np.nonzero(seen.live)[1].reshape(len(seen.live), -1))

    def _on_step(self, m: int, routed: Routed, bucket: I32, tokens: npt.NDArray[np.int64]) -> None:
        self.record.place(m, bucket)
        self.record.add(m, routed.ids)

    def _foretell(self, m: int, hidden: npt.NDArray[np.float32]) -> None:
        """Ask, in pieces of the program's size, where these tokens go in a later layer."""
        if self.telling is None or (target := self.telling.target(m)) is None:
            return
        size, found = len(self.layers.zeros), []
        for first in range(0, len(hidden), size):
            piece = np.zeros_like(self.layers.zeros)
            some = hidden[first : first + size]
            piece[: len(some)] = some
            found.append(np.asarray(self.telling.ids(m, jax.device_put(piece)))[: len(some)])
        self.record.foretell(target, np.concatenate(found))
