"""What a simulated mixture does: how many tokens each expert gets in every step, recorded, imported or drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.config import ModelSpec
from dynajax.errors import MismatchError, UsageError
from dynajax.policy.experts.synthetic import Routing, draw_routing
from dynajax.routing_trace import RoutingTrace, counted, read_routing, weighed
from dynajax.trace import DECODE, PREFILL

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

SHIPPED = Path(str(resources.files("dynajax") / "assets" / "activity"))  # NAME.npz
LEAST_TOKENS = 8  # of a piece of a recorded sequence
STATISTICS = 1024  # tokens that give the statistics of a drawn text, at least
LEAST_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt, or several that are read together."""

    tokens: int
    counts: I32  # [M, E]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureRun:
    """Prompts, and S steps that were decoded after them."""

    prompts: tuple[Prompt, ...]
    steps: I32  # [S, M, E] tokens at each expert
    rows: I32  # [S] tokens
    context: int  # tokens before the first step, of a row
    foretold: I32 | None = None  # [S, M, E] as an earlier layer of the same step foretold it; None: not recorded
    expected: npt.NDArray[np.float64] | None = None  # [S, M, E] the same as plans go by it; None: they go by the counts

    @property
    def prompt_counts(self) -> I32:
        """[M, E] of all prompts together."""
        counts = np.zeros(self.steps.shape[1:], np.int32)
        for prompt in self.prompts:
            counts += prompt.counts
        return counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureActivity:
    """Runs of one model, one after the other."""

    name: str
    synthetic: bool
    top_k: int
    frequency: F32  # [M, E] share of tokens of other text that choose the expert; not all 0
    runs: tuple[MixtureRun, ...]
    foretold_by: str | None = None  # the kind of prediction that was recorded

    @property
    def batch(self) -> int:
        """Rows of the fullest step."""
        return max(int(run.rows.max(initial=1)) for run in self.runs)

    @property
    def context(self) -> int:
        """Tokens of the longest row, about."""
        return max(run.context + len(run.rows) for run in self.runs)


# --- drawn ---


def draw_mixture(
    spec: ModelSpec, recipe: Routing, name: str, *, batch: int, prompt: int, steps: int, seed: int = 0
) -> MixtureActivity:
    """One run: `batch` rows read `prompt` tokens each, together, and decode `steps` tokens.

    Statistics come from the same rows' tokens before, with a gap in which as many topics as possible end.
    """
    assert spec.experts is not None
    before = max(LEAST_STEPS, STATISTICS // batch)
    gap = min(recipe.length, max(LEAST_STEPS // 2, 2 * STATISTICS // batch))
    layers, units, top_k = len(spec.unit_layers), spec.units, spec.experts.router.top_k
    rng = np.random.default_rng(seed)
    drawn = draw_routing(recipe, before + gap + prompt + steps, layers, units, top_k, batch, rng)
    frequency = (drawn[:before].sum(axis=0) + 0.5) / (before * batch + 1)
    read, decoded = drawn[before + gap : before + gap + prompt], drawn[before + gap + prompt :]
    prompts = (Prompt(tokens=prompt * batch, counts=read.sum(axis=0, dtype=np.int32)),) if prompt else ()
    run = MixtureRun(prompts=prompts, steps=decoded, rows=np.full(steps, batch, np.int32), context=prompt)
    return MixtureActivity(name=name, synthetic=True, top_k=top_k, frequency=frequency.astype(np.float32), runs=(run,))


# --- recorded ---


def shipped_names() -> list[str]:
    """The recordings that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.npz"))


def shipped_routing(name: str) -> RoutingTrace:
    """One of them; UsageError lists what there is."""
    if name not in (names := shipped_names()):
        raise UsageError(f"no routing trace {name!r} comes with this package, only {', '.join(names) or 'none'}")
    return read_routing(SHIPPED / f"{name}.npz")


def from_routing(trace: RoutingTrace, name: str, batch: int | None = None) -> MixtureActivity:
    """A recording. batch None: as it ran; else its sequences side by side, so many at a time, cut if there are too few.

    Routing of a row does not depend on its company, so that any rows can be put together. Frequencies: those that it
    was placed by, or its own. MismatchError if nothing was decoded; UsageError if it is too short for the batch.
    """
    if batch is not None and trace.experts is None:
        raise UsageError(
            f"{name} counts tokens of whole steps: its rows cannot be put together anew, leave out --batch"
        )
    runs = tuple(_as_it_ran(trace) if batch is None else _side_by_side(trace, name, batch))
    if not runs:
        raise MismatchError(f"{name} holds no decoded token: record a run of generate")
    frequency = trace.frequency
    if frequency is None or not frequency.any():
        total = trace.workload().sum(axis=0)
        frequency = (total + 0.5) / (total.sum(axis=1, keepdims=True) / trace.head.top_k + 1)
    return MixtureActivity(
        name=name,
        synthetic=False,
        top_k=trace.head.top_k,
        frequency=np.asarray(frequency, np.float32),
        runs=runs,
        foretold_by=None if trace.predicted is None else str(trace.head.settings.get("prefetch", "unknown")),
    )


def _as_it_ran(trace: RoutingTrace) -> Iterator[MixtureRun]:
    """By generation; each prompt by itself."""
    counts, foretold, expected = trace.workload(), trace.foretold(), trace.expected()
    first = np.flatnonzero(np.diff(trace.step, prepend=-1))  # the first token of each step
    phase, generation = trace.phase[first], trace.generation[first]
    tokens = np.bincount(trace.step, minlength=trace.steps) if trace.experts is not None else _tokens_of(trace)
    for number in np.unique(generation):
        mine = generation == number
        read, decoded = np.flatnonzero(mine & (phase == PREFILL)), np.flatnonzero(mine & (phase == DECODE))
        if not len(decoded):
            continue
        prompts = tuple(Prompt(tokens=int(tokens[step]), counts=counts[step]) for step in read)
        yield MixtureRun(
            prompts=prompts,
            steps=counts[decoded],
            rows=tokens[decoded].astype(np.int32),
            context=int(max((prompt.tokens for prompt in prompts), default=0)),
            foretold=None if foretold is None else foretold[decoded],
            expected=None if expected is None else expected[decoded],
        )


def _tokens_of(trace: RoutingTrace) -> npt.NDArray[np.int64]:
    """[S] of a trace that only counts: what its fullest layer has, by K experts a token."""
    assert trace.counts is not None
    return np.ceil(trace.counts.sum(axis=2).max(axis=1) / trace.head.top_k).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Some tokens of a sequence, one after the other, and those of its prompt."""

    prompt: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


def _side_by_side(trace: RoutingTrace, name: str, batch: int) -> Iterator[MixtureRun]:
    pieces = _pieces(trace, name, batch)
    assert trace.experts is not None
    for begin in range(0, len(pieces) - batch + 1, batch):
        some = pieces[begin : begin + batch]
        tokens = np.concatenate([piece.tokens for piece in some])
        step = np.concatenate([np.arange(len(piece.tokens), dtype=np.int32) for piece in some])
        steps, width = int(step.max()) + 1, trace.head.width
        read = np.concatenate([piece.prompt for piece in some])
        prompts: tuple[Prompt, ...] = ()
        if len(read):
            whole = counted(trace.experts[read], np.zeros(len(read), np.int32), 1, width)[0]
            prompts = (Prompt(tokens=len(read), counts=whole),)
        yield MixtureRun(
            prompts=prompts,
            steps=counted(trace.experts[tokens], step, steps, width),
            rows=np.bincount(step, minlength=steps).astype(np.int32),
            context=-(-len(read) // batch),
            foretold=None if trace.predicted is None else counted(trace.predicted[tokens], step, steps, width),
            expected=None if trace.predicted is None else weighed(trace.predicted[tokens], step, steps, width),
        )


def _pieces(trace: RoutingTrace, name: str, batch: int) -> list[_Piece]:
    """At least `batch` of them: whole sequences, or as long as they can be."""
    sequences, key = [], trace.generation.astype(np.int64) << 32 | trace.row
    for number in np.unique(key):
        mine = np.flatnonzero(key == number)
        decoded = mine[trace.phase[mine] == DECODE]
        if len(decoded):
            sequences.append(_Piece(mine[trace.phase[mine] == PREFILL], decoded))
    if len(sequences) >= batch:
        return sequences
    sizes = np.array([len(piece.tokens) for piece in sequences])
    length = int(sizes.sum()) // batch
    while length >= LEAST_TOKENS and (sizes // length).sum() < batch:
        length -= 1
    if length < LEAST_TOKENS:
        raise UsageError(f"{name} has {int(sizes.sum())} decoded tokens, too few for --batch {batch}: lower it")
    return [
        _Piece(piece.prompt, piece.tokens[at : at + length])
        for piece in sequences
        for at in range(0, len(piece.tokens) - length + 1, length)
    ]
