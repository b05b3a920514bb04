"""Activity of models that cannot be run here, drawn so that the figures published of them hold.

A sequence has in every layer and token a hidden state h of D dimensions,

    h = sqrt(share) * topic + sqrt(1 - share) * passing.

Topic is the sequence's, passing moves from token to token (autoregressive, coefficient r), and both move from layer to
layer as c * before + sqrt(1 - c^2) * new, c = `cosine`. Neuron n has a direction w_n of length 1 and a bias b_n, normal
over the layer's neurons; its value is z = b_n + w_n . h and it is live where z > 0. Over tokens w_n . h is unit normal.

Published, and what it fixes:
- the neurons that cover 80 % of counted activations, by layer: the biases' spread (`biases`, no sampling); 90 and 95 %
  then come out right without being asked for;
- the share that is live: the biases' mean;
- the distance of two sentences' hot sets, 0.53-0.57: `share`; of two neighbouring tokens' live sets, 0.70-0.75: `r`;
- recall and predicted share of the published predictors: a predictor's quality and threshold (`mlp_quality`).
All of them hold at once; `checked` measures them. What is not published and was assumed stands at `RECIPES`.

A predictor of quality rho sees zhat = rho * (w_n . h) + sqrt(1 - rho^2) * noise, the noise anew for every neuron and
token, and says p = Phi((b_n + rho * zhat) / sqrt(1 - rho^2)), which is calibrated: of the neurons with p, p are live.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from dynajax.errors import UsageError
from dynajax.sim import statistics
from dynajax.sim.activity import F32, U8, Activity, Run

F64 = npt.NDArray[np.float64]

DIMENSIONS = 64  # of a hidden state: enough that a token's live share varies little, few enough to be quick
SENTENCE = 128  # tokens, where the hot sets of sentences are compared
_RAREST = 0.5 / 366_001  # frequencies are no closer to 0 or 1 than the 366,000 tokens of 7B's statistics can tell
_TOP = 255  # the highest score
_EVERY = 4  # tokens, one is counted for the coverage
_TILE = 64  # rows and columns of a product: too few for BLAS to start threads, which wait long on a busy machine
_STEPS = 30  # of a bisection
_MODEL, _TEXT, _PLACE, _SKIP = 1, 2, 3, 4  # what random numbers are for: the first of every seed
_WIDEST = 4.0  # spread of biases: with it 9 % of the neurons cover 80 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model to draw the activity of."""

    name: str
    layers: int
    ffn: int  # neurons of a layer
    density: float  # live share, mean over layers
    rise: tuple[float, float] = (1.0, 1.0)  # the first and last layer's density in proportion, the others between
    coverage_of: str  # whose coverage in assets/activity/relullama.json
    counted: float  # share of a layer's neurons that is counted in every token there
    share: float  # of h's variance that is the sequence's own
    r: float  # correlation of the rest between neighbouring tokens
    cosine: float = 0.92  # of neighbouring layers; DynamicInfer: > 0.88
    recall: float  # of the published predictor
    predicted: float  # by it, for each live neuron
    assumed: tuple[str, ...] = ()  # of density, coverage, distances, predictor: what is not published of this model
    seed: int  # of weights and biases


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The quality of scores, from above 0 to 1, which is exact."""

    place_rho: float | None  # of what plans go by; None: the gate itself, of what is known `lead` layers before
    skip_rho: float | None  # of what skipping goes by; None: nothing is skipped

    def __post_init__(self) -> None:
        for name, rho in (("place_rho", self.place_rho), ("skip_rho", self.skip_rho)):
            if rho is not None and not 0 < rho <= 1:
                raise UsageError(f"{name} must be above 0 and at most 1, got {rho}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How much is drawn of a model, and with which scores; see `make_activity`."""

    stride: int
    sequences: int
    prompt: int
    tokens: int
    seed: int = 0
    lead: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Of every layer's neurons, mean and standard deviation [L]."""

    mean: F64
    spread: F64


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a sample, and the range it is published in; for a single published number, what we allow it."""

    name: str
    low: float
    high: float
    found: float
    assumed: bool  # the range is another model's, or our own

    @property
    def ok(self) -> bool:
        return self.low <= self.found <= self.high


_RELU_7B = Recipe(
    name="relullama-7b",
    layers=32,
    ffn=11008,
    density=0.3302,
    rise=(0.8, 1.35),
    coverage_of="relullama-7b",
    counted=0.10,
    share=0.10,
    r=0.02,
    recall=0.909,
    predicted=1.24,
    seed=7,
)
_RELU_13B = replace(
    _RELU_7B, name="relullama-13b", seed=13, layers=40, ffn=13824, coverage_of="relullama-13b",
    density=0.2844, share=0.095, r=0.15, assumed=("predictor",),
)  # fmt: skip
_RELU_70B = replace(
    _RELU_7B, name="relullama-70b", seed=70, layers=80, ffn=28672, coverage_of="relullama-70b", counted=0.08,
    density=0.25, share=0.03, r=0.33, assumed=("density", "predictor"),
)  # fmt: skip
_PRO_7B = replace(
    _RELU_7B, name="prosparse-7b", seed=107, density=0.1068, rise=(1.0, 1.0), share=0.065, r=0.56,
    recall=0.923, predicted=1.97, assumed=("coverage", "distances"),
)  # fmt: skip
_PRO_13B = replace(
    _RELU_13B, name="prosparse-13b", seed=113, density=0.112, rise=(1.0, 1.0), share=0.063, r=0.55,
    recall=0.923, predicted=1.97, assumed=("coverage", "distances", "predictor"),
)  # fmt: skip
# Assumed, for nobody published them: 70B's density; ProSparse's coverage and distances, which are ReluLLaMA's; what
# 13B's and 70B's predictors reach, which is 7B's; and that density rises with depth in them, too, as measured for 7B.
# `share` puts hot sets 0.55 apart and `r` neighbouring tokens 0.725, the middle of what is published. At 7B's density
# the topic alone brings tokens that near, which leaves hardly any correlation to r; ProSparse's small sets need much.
# In 70B's flat layers a little topic already tells sentences apart.
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (_RELU_7B, _RELU_13B, _RELU_70B, _PRO_7B, _PRO_13B)}
)


def published_coverage(model: str) -> dict[str, F64]:
    """By "80", "90" and "95": the fraction of each layer's neurons [L] that covers so many % of what is counted."""
    text = resources.files("dynajax").joinpath("assets", "activity", "relullama.json").read_text(encoding="utf-8")
    return {share: np.asarray(by_layer) for share, by_layer in json.loads(text)["models"][model]["coverage"].items()}


def biases(recipe: Recipe) -> Biases:
    """Those with which every layer has the 80 % coverage published for its depth and the density wanted."""
    wanted = published_coverage(recipe.coverage_of)["80"]
    wanted = np.interp(np.linspace(0, 1, recipe.layers), np.linspace(0, 1, len(wanted)), wanted)
    low, high = np.zeros(recipe.layers), np.full(recipe.layers, _WIDEST)
    for _ in range(_STEPS):
        spread = (low + high) / 2
        flat = statistics.normal_coverage(spread, recipe.counted, 0.8) > wanted
        low, high = np.where(flat, spread, low), np.where(flat, high, spread)
    density = np.linspace(*recipe.rise, recipe.layers)
    density *= recipe.density / density.mean()
    return Biases(statistics.normal_quantile(density) * np.sqrt(1 + low * low), low)


def mlp_quality(recipe: Recipe) -> tuple[float, float]:
    """(rho, theta): the predictor that, computing what it gives a probability >= theta, has the published figures.

    They are `recall`, and `predicted` neurons for each live one, both over all layers together.
    """
    known = biases(recipe)
    mean, spread = known.mean, known.spread
    one = np.sqrt(1 + spread * spread)
    live = statistics.normal_cdf_exact(mean / one)
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        rho = (low + high) / 2
        seen = np.sqrt(spread * spread + rho * rho)  # over neurons and tokens, of b + rho * zhat
        cut, above = -10.0, 10.0  # of b + rho * zhat
        for _ in range(_STEPS):
            middle = (cut + above) / 2
            share = statistics.normal_cdf((mean - middle) / seen).mean()
            cut, above = (middle, above) if share > recipe.predicted * live.mean() else (cut, middle)
        both = statistics.normal_both(-mean / one, (cut - mean) / seen, seen / one)
        low, high = (rho, high) if both.mean() < recipe.recall * live.mean() else (low, rho)
    return low, float(statistics.normal_cdf_exact(np.asarray(cut / math.sqrt(1 - low * low))))


def hidden_states(recipe: Recipe, sequences: int, tokens: int, seed: int) -> Iterator[F32]:
    """h [S, T, D] of one layer after the other."""
    rng = np.random.default_rng((_TEXT, seed, recipe.seed))
    kept, new = recipe.cosine, math.sqrt(1 - recipe.cosine**2)
    topic = rng.standard_normal((sequences, 1, DIMENSIONS), np.float32)
    passing = _moving(rng, sequences, tokens, recipe.r)
    for layer in range(recipe.layers):
        if layer:
            topic = kept * topic + new * rng.standard_normal(topic.shape, np.float32)
            passing = kept * passing + new * _moving(rng, sequences, tokens, recipe.r)
        yield math.sqrt(recipe.share) * topic + math.sqrt(1 - recipe.share) * passing


def _moving(rng: np.random.Generator, sequences: int, tokens: int, r: float) -> F32:
    """[S, T, D] unit normal, neighbouring tokens correlated by r."""
    state = rng.standard_normal((sequences, tokens, DIMENSIONS), np.float32)
    state[:, 1:] *= math.sqrt(1 - r * r)
    for token in range(1, tokens):
        state[:, token] += r * state[:, token - 1]
    return state


def neurons(recipe: Recipe, width: int, frequency: F32 | None = None) -> Iterator[tuple[F32, F32]]:
    """(w [D, F], b [F]) of `width` neurons of one layer after the other: the same whatever the text.

    frequency [L, F]: the share of tokens for which each is to be live, instead of the recipe's.
    """
    values = biases(recipe)
    for layer in range(recipe.layers):
        rng = np.random.default_rng((_MODEL, recipe.seed, layer))
        weight = rng.standard_normal((DIMENSIONS, width), np.float32)
        bias = values.mean[layer] + values.spread[layer] * rng.standard_normal(width, np.float32)
        if frequency is not None:
            bias = statistics.normal_quantile(np.clip(frequency[layer], _RAREST, 1 - _RAREST))
        yield weight / np.linalg.norm(weight, axis=0), bias.astype(np.float32)


def gates(state: F32, weight: F32) -> F32:
    """w_n . h [S, T, F] of h [S, T, D] and w [D, F], the same on any number of cores."""
    rows = state.reshape(-1, DIMENSIONS)
    found = np.empty((len(rows), weight.shape[1]), np.float32)
    for n in range(0, weight.shape[1], _TILE):
        for row in range(0, len(rows), _TILE):
            np.matmul(rows[row : row + _TILE], weight[:, n : n + _TILE], out=found[row : row + _TILE, n : n + _TILE])
    return found.reshape(*state.shape[:2], -1)


def noised(gate: F32, rho: float, rng: np.random.Generator) -> F32:
    """zhat: what a predictor of quality rho sees of gates w_n . h [..., F]; for rho 1 the gates themselves."""
    if rho == 1:
        return gate
    seen = rng.standard_normal(gate.shape, np.float32)
    seen *= math.sqrt(1 - rho * rho)
    seen += rho * gate
    return seen


def scores(seen: F32, bias: F32, rho: float) -> U8:
    """255 p of a predictor of quality rho that sees zhat [..., F], of neurons with biases [F]."""
    if rho == 1:
        return np.where(seen > -bias, np.uint8(_TOP), np.uint8(0))
    rest = math.sqrt(1 - rho * rho)
    argument = seen * (rho / rest)
    argument += bias / rest
    return np.rint(statistics.normal_cdf(argument) * _TOP).astype(np.uint8)


def make_activity(
    recipe: Recipe,
    scoring: Scoring,
    *,
    stride: int,
    sequences: int,
    prompt: int,
    tokens: int,
    seed: int = 0,
    lead: int = 1,
) -> Activity:
    """Sequences of `prompt` tokens and `tokens` decoded after them; the same for the same arguments.

    `ffn // stride` neurons of each layer are drawn. `seed` is the text's and its scores', the model being the recipe's.
    All scores are of the same token's truth, also those of layers < lead, which are used a token later. Without
    place_rho these are of quality cosine^lead, which is also the quality of the gate `lead` layers before. Place and
    skip are one array where their qualities are equal. Frequencies and masses are what endless text would give.
    """
    _check(recipe, {"stride": stride, "sequences": sequences, "prompt": prompt, "tokens": tokens, "lead": lead})
    sample = Sample(stride=stride, sequences=sequences, prompt=prompt, tokens=tokens, seed=seed, lead=lead)
    return draw(recipe, scoring, sample)


def draw(recipe: Recipe, scoring: Scoring, sample: Sample, frequency: F32 | None = None) -> Activity:
    """`make_activity`, also of neurons with these frequencies [L, ffn // stride] (see `neurons`)."""
    prompt, lead, seed = sample.prompt, sample.lead, sample.seed
    shape = (sample.sequences, sample.tokens, recipe.layers, width := recipe.ffn // sample.stride)
    live, place, skip = np.empty(shape, np.bool_), np.empty(shape, np.uint8), None
    chain, place_rho, skip_rho = scoring.place_rho is None, scoring.place_rho or recipe.cosine**lead, scoring.skip_rho
    if skip_rho is not None:
        skip = place if skip_rho == scoring.place_rho else np.empty(shape, np.uint8)
    counts = np.empty((sample.sequences, recipe.layers, width), np.int32)
    bias = np.empty((recipe.layers, width), np.float32)
    placing, skipping = (np.random.default_rng((kind, seed, recipe.seed)) for kind in (_PLACE, _SKIP))
    past: deque[F32] = deque(maxlen=lead + 1)
    states = hidden_states(recipe, sample.sequences, prompt + sample.tokens, seed)
    for layer, (state, (weight, b)) in enumerate(zip(states, neurons(recipe, width, frequency), strict=True)):
        gate, bias[layer] = gates(state, weight), b
        now, gate = gate > -b, gate[:, prompt:]
        counts[:, layer], live[:, :, layer] = now[:, :prompt].sum(axis=1), now[:, prompt:]
        past.append(state[:, prompt:])
        seen = gates(past[0], weight) if chain and layer >= lead > 0 else noised(gate, place_rho, placing)
        place[:, :, layer] = scores(seen, b, place_rho)
        if skip is not None and skip is not place and skip_rho is not None:
            skip[:, :, layer] = scores(noised(gate, skip_rho, skipping), b, skip_rho)
    runs = []
    for i in range(sample.sequences):
        mine = place[i]
        own = None if skip is None else mine if skip is place else skip[i]
        placed = np.ones((sample.tokens, recipe.layers), np.bool_)
        runs.append(
            Run(prompt_tokens=prompt, prompt_counts=counts[i], live=live[i], place=mine, placed=placed, skip=own)
        )
    known = dict(zip(("frequency", "mass"), _expected(bias), strict=True))
    return Activity(name=recipe.name, synthetic=True, runs=tuple(runs), stride=sample.stride, **known)


def _check(recipe: Recipe, sizes: dict[str, int]) -> None:
    """UsageError if a size is out of range."""
    low = {"prompt": 0, "lead": 0}
    high = {"stride": recipe.ffn, "lead": recipe.layers - 1}
    for name, size in sizes.items():
        if not low.get(name, 1) <= size <= high.get(name, size):
            most = f" and at most {high[name]}" if name in high else ""
            raise UsageError(f"{name} must be at least {low.get(name, 1)}{most}, got {size}")


def _expected(bias: F32) -> tuple[F32, F32]:
    """(share of tokens for which each neuron is live, its mean value where it is), of biases [L, F]."""
    frequency = statistics.normal_cdf_exact(bias)
    mass = bias + np.exp(bias.astype(np.float64) ** 2 * -0.5) / math.sqrt(2 * math.pi) / frequency
    return np.clip(frequency, _RAREST, 1 - _RAREST).astype(np.float32), mass.astype(np.float32)


def checked(
    recipe: Recipe, *, stride: int = 32, sequences: int = 32, tokens: int = SENTENCE, seed: int = 0
) -> tuple[Figure, ...]:
    """Every published figure, as found in a sample of so many sequences: the same process as in `make_activity`.

    A sentence is a sequence, so distances are the published ones only for sequences of SENTENCE tokens.
    """
    wanted = published_coverage(recipe.coverage_of)
    rho, theta = mlp_quality(recipe)
    rng = np.random.default_rng((_SKIP, seed, recipe.seed))
    rows, before = [], None
    states = hidden_states(recipe, sequences, tokens, seed)
    for state, (weight, b) in zip(states, neurons(recipe, recipe.ffn // stride), strict=True):
        gate, flat = gates(state, weight), state.reshape(1, -1, DIMENSIONS)
        live = gate > -b
        predicted = scores(noised(gate, rho, rng), b, rho) >= round(theta * _TOP)
        counts = statistics.top_counts((gate + b)[:, ::_EVERY].reshape(-1, len(b)), recipe.counted)
        row = {share: statistics.coverage(counts, int(share) / 100) for share in wanted}
        row["live"] = float(live.mean())
        row["adjacent"] = float(np.mean([statistics.adjacent_distance(each) for each in live]))
        row["sentence"] = statistics.sentence_distance(live.sum(axis=1))
        row["ratio"] = statistics.predicted_ratio(predicted, live)
        row["recall"] = statistics.recall(predicted, live)
        row["cosine"] = math.nan  # the first layer has none before it
        if before is not None:
            row["cosine"] = statistics.cosine_of_neighbours(np.concatenate([before, flat]))
        rows.append(row)
        before = flat
    return _figures(recipe, {name: np.asarray([row[name] for row in rows]) for name in rows[0]})


def _figures(recipe: Recipe, found: dict[str, F64]) -> tuple[Figure, ...]:
    """What was found of every layer [L], beside what is published."""

    def within(kind: str, name: str, low: float, high: float, value: float) -> Figure:
        return Figure(name, low, high, float(value), kind in recipe.assumed)

    def near(kind: str, name: str, published: float, slack: float, value: float) -> Figure:
        return within(kind, name, float(published - slack), float(published + slack), value)

    wanted, live = published_coverage(recipe.coverage_of), found["live"]
    off = np.abs(found["80"] - wanted["80"]).mean()
    return (
        near("coverage", "neurons that cover 80 %", wanted["80"].mean(), 0.02, found["80"].mean()),
        within("coverage", "the same, mean error of a layer", 0.0, 0.03, off),
        near("coverage", "neurons that cover 90 %", wanted["90"].mean(), 0.04, found["90"].mean()),
        near("coverage", "neurons that cover 95 %", wanted["95"].mean(), 0.04, found["95"].mean()),
        near("density", "live share", recipe.density, 0.01, live.mean()),
        within("distances", "distance of neighbouring tokens", 0.70, 0.75, found["adjacent"].mean()),
        within("distances", "distance of sentences", 0.53, 0.57, found["sentence"].mean()),
        within("", "cosine of neighbouring layers", 0.88, 1.0, float(np.nanmean(found["cosine"]))),
        near("predictor", "predicted for each live", recipe.predicted, 0.1, np.average(found["ratio"], weights=live)),
        near("predictor", "recall", recipe.recall, 0.015, np.average(found["recall"], weights=live)),
    )
