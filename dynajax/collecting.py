"""Activation statistics from any text: how often each neuron is live, what it contributes, how alike the layers are; of
a mixture of experts how many tokens each expert serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig, ModelSpec
from dynajax.engine import Engine
from dynajax.engine.checks import Wanted
from dynajax.engine.observing import Seen
from dynajax.engine.prediction import SILU_DENSITY
from dynajax.errors import StorageError, UsageError
from dynajax.text import load_tokenizer
from hostcompute.reference import activate

Floats = npt.NDArray[np.float32]
LEADS = (1, 2, 3)
SAMPLE = 512  # tokens from which the contributions are computed
WINDOW = 512  # tokens read at a time; each window is a text of its own
CHUNK = 1024  # neurons whose contributions are computed at a time


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What was found over `tokens` tokens of L layers with F neurons, or with E experts in M of them."""

    frequency: Floats  # [L, F] share of the tokens for which the neuron was live, see `engine.checks.Wanted`; or [M, E]
    tokens: int
    mass: Floats | None = None  # [L, F] mean of |activation| x |down row|, over a sample of the tokens; neurons only
    cosine: Floats | None = None  # [L, 3] mean cosine of a layer's FFN input with that 1, 2, 3 layers on; the same

    @property
    def top_quarter(self) -> list[float]:
        """By layer the share of everything live that the most frequent quarter of its units has: what of it a pool of
        that size finds at best if nothing moves."""
        frequency = np.sort(self.frequency.astype(np.float64), axis=1)[:, ::-1]
        quarter = frequency[:, : -(-frequency.shape[1] // 4)].sum(axis=1)
        return (quarter / np.maximum(frequency.sum(axis=1), 1e-30)).tolist()


def wanted_of(checkpoint: Checkpoint, density: float) -> Wanted:
    """Which units of a model count as live, by the weights in its checkpoint."""
    spec = checkpoint.spec

    def down(layer: int) -> Floats:
        units = np.empty((spec.ffn, spec.ffn_parts, 1, spec.unit_width), np.float32)
        checkpoint.fill_bundle(layer, units)
        return units[:, -1, 0]

    return Wanted(spec, density, down)


class Counter:
    """An observer of an engine (`Engine.observe`): counts what it is shown."""

    def __init__(self, spec: ModelSpec, seed: int = 0, sample: int = SAMPLE):
        self._spec = spec
        self._rng = np.random.default_rng(seed)
        self.live = np.zeros((spec.layers, spec.ffn), np.int64)
        self.cosine = np.zeros((spec.layers, len(LEADS)), np.float64)
        self.sample = np.zeros((spec.layers, sample, spec.hidden), np.float32)
        self.tokens = 0
        self._recent: dict[int, Floats] = {}  # unit vectors of the layers before, of the tokens at hand
        self._picks: tuple[npt.NDArray, npt.NDArray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def tell(self, layer: int, hidden: Floats, live: npt.NDArray[np.bool_]) -> None:
        """See `Engine.observe`."""
        if layer == 0:
            self._recent.clear()
            self._picks = self._pick(len(hidden))
            self.tokens += len(hidden)
        self.live[layer] += live.sum(axis=0)
        rows, places = self._picks
        self.sample[layer, places] = hidden[rows]
        unit = hidden / np.maximum(np.linalg.norm(hidden, axis=1, keepdims=True), 1e-30)
        for index, lead in enumerate(LEADS):
            if (before := self._recent.get(layer - lead)) is not None:
                self.cosine[layer - lead, index] += float((before * unit).sum())
        self._recent[layer] = unit
        self._recent.pop(layer - max(LEADS), None)

    def _pick(self, count: int) -> tuple[npt.NDArray, npt.NDArray]:
        """Rows to keep and where: every token seen so far is kept with equal probability (Vitter 1985, algorithm R)."""
        size = self.sample.shape[1]
        seen = self.tokens + np.arange(count)
        places = np.where(seen < size, seen, self._rng.integers(0, seen + 1))
        last = {int(place): row for row, place in enumerate(places) if place < size}  # a later one replaces an earlier
        return np.array(list(last.values()), np.int64), np.array(list(last), np.int64)

    def result(self, checkpoint: Checkpoint) -> Collected:
        """The figures; reads every layer's weights once. UsageError if nothing was shown."""
        _refuse_nothing(self.tokens)
        spec, kept = self._spec, min(self.tokens, self.sample.shape[1])
        units = np.empty((spec.ffn, spec.ffn_parts, 1, spec.unit_width), np.float32)
        mass = np.empty((spec.layers, spec.ffn), np.float32)
        for layer in range(spec.layers):
            checkpoint.fill_bundle(layer, units)
            mass[layer] = contributions(spec, self.sample[layer, :kept], units[:, :, 0])
        cosine = (self.cosine / self.tokens).astype(np.float32)
        for index, lead in enumerate(LEADS):
            cosine[max(0, spec.layers - lead) :, index] = np.nan
        return Collected((self.live / self.tokens).astype(np.float32), self.tokens, mass, cosine)


class ExpertCounter:
    """The same for experts: counts the tokens that go to each."""

    def __init__(self, spec: ModelSpec):
        self._numbers = {layer: number for number, layer in enumerate(spec.unit_layers)}
        self.live = np.zeros((len(spec.unit_layers), spec.units), np.int64)
        self.tokens = 0

    def tell(self, seen: Seen) -> None:
        """See `Engine.watch`; told of the layers that have experts, in their order."""
        number = self._numbers[seen.layer]
        self.live[number] += seen.live.sum(axis=0)
        self.tokens += len(seen.live) if number == 0 else 0

    def result(self, checkpoint: Checkpoint) -> Collected:
        """The figures; the weights tell nothing more. UsageError if nothing was shown."""
        _refuse_nothing(self.tokens)
        return Collected((self.live / self.tokens).astype(np.float32), self.tokens)


def _refuse_nothing(tokens: int) -> None:
    if not tokens:
        raise UsageError("there is no text to collect from: give more of it")


def contributions(spec: ModelSpec, hidden: Floats, units: Floats) -> Floats:
    """Mean |activation| x |down row| of every neuron over hidden [T, D]; units [F, P, W] -> [F]."""
    h = np.zeros((len(hidden), spec.unit_width), np.float32)
    h[:, : spec.hidden] = hidden
    h[:, spec.hidden : spec.hidden + 1] = 1  # the column of the biases, if there is one
    kind, threshold = spec.activation.kind, spec.activation.threshold
    found = np.empty(spec.ffn, np.float32)
    for first in range(0, spec.ffn, CHUNK):
        part = units[first : first + CHUNK]
        values = activate(h @ part[:, 0].T, kind, threshold)
        if spec.gated:
            up = h @ part[:, 1].T
            values = values * (activate(up, kind, threshold) if kind == "drelu" else up)
        found[first : first + CHUNK] = np.abs(values).mean(axis=0) * np.linalg.norm(part[:, -1], axis=1)
    return found


def collect(
    model: str,
    folder: Path,  # where it is
    config: EngineConfig,
    windows: Sequence[Sequence[int]],  # token ids, each a text of its own
    progress: Callable[[str, int, int], None],
    density: float = SILU_DENSITY,  # see `engine.checks.Wanted`
) -> tuple[Checkpoint, Collected]:
    """Run the model over the windows, offloaded as `config` says, and count. The last token of a window is not seen."""
    checkpoint = Checkpoint.open(folder)
    counter, tell, values = _counting(checkpoint, density)
    longest = max((len(window) for window in windows), default=1)
    settings: dict[str, Any] = asdict(replace(undisturbed(config), ctx=longest))
    with Engine.from_pretrained(model, folder=folder, progress=but_prefill(progress), **settings) as engine:
        engine.watch(tell, values=values)
        for done, window in enumerate(windows, start=1):
            engine.generate(list(window), max_new_tokens=0)
            progress("collect", done, len(windows))
    return checkpoint, counter.result(checkpoint)


def _counting(checkpoint: Checkpoint, density: float) -> tuple[Counter | ExpertCounter, Callable[[Seen], None], bool]:
    """What counts, what it is told by, and whether it asks for values."""
    if checkpoint.spec.experts is not None:
        experts = ExpertCounter(checkpoint.spec)
        return experts, experts.tell, False
    neurons, wanted = Counter(checkpoint.spec), wanted_of(checkpoint, density)
    return neurons, lambda seen: neurons.tell(seen.layer, seen.hidden, wanted(seen)), wanted.density is not None


def undisturbed(config: EngineConfig) -> EngineConfig:
    """The settings under which what is seen is the model's own: nothing is guessed and nothing moves. UsageError if
    something else was asked for."""
    if config.sparsity == "predicted" or config.policy not in ("auto", "static", "none"):
        raise UsageError(
            f"a model is observed without predictions: --sparsity {config.sparsity} --policy {config.policy} is for "
            "generating; leave both out"
        )
    if chosen := [name for name in ("assign", "cache", "prefetch") if getattr(config, name) != "auto"]:
        raise UsageError(f"a model is observed while nothing moves: --{chosen[0]} is for generating; leave it out")
    return replace(config, predictor="none", policy="static" if config.policy == "auto" else config.policy)


def but_prefill(progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Progress without that of the windows, which are many and short."""
    return lambda stage, done, total: None if stage == "prefill" else progress(stage, done, total)


def read_texts(source: Path) -> Iterator[str]:
    """A file's text, or that of every .txt file below a folder, in the order of their names."""
    paths = sorted(source.rglob("*.txt")) if source.is_dir() else [source]
    if not paths:
        raise UsageError(f"--text {source} holds no .txt file")
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} must be UTF-8, byte {error.start} is not") from error


def windows_of(texts: Iterator[str], folder: Path, tokens: int, length: int) -> list[list[int]]:
    """Token ids of the texts in windows of at most `length`, `tokens` in all."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer: give --ids instead of --text")
    windows: list[list[int]] = []
    left = tokens
    for text in texts:
        if left < 2:
            break
        ids = tokenizer.encode(text)[:left]
        left -= len(ids)
        windows += cut(ids, length)
    return windows


def cut(ids: Sequence[int], length: int) -> list[list[int]]:
    """Consecutive windows of at most `length` ids; a rest of one is dropped, for its last token is never seen."""
    pieces = [list(ids[first : first + length]) for first in range(0, len(ids), length)]
    return [piece for piece in pieces if len(piece) > 1]


def with_window(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The settings with a window's length as context, if none was given."""
    return config if config.ctx is not None else replace(config, ctx=min(WINDOW, spec.max_positions))
