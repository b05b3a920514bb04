"""The choice of a token against a plain reference, its statistics, and refused settings."""

import math
import random

import numpy as np
import pytest

from dynajax.errors import NumericalError, UsageError
from dynajax.sampling import MAX_STOPS, Rules, Sampler, SamplingParams, filtered_probs, penalise

NO_PROMPT = np.zeros(0, np.int32)


def reference_probs(logits, params):
    """One token after the other, in Python floats: softmax, then each filter on what the last one left."""
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        mass, goal = 0.0, params.top_p * sum(probs[i] for i in kept)
        nucleus = []
        for i in kept:
            nucleus.append(i)
            mass += probs[i]
            if mass >= goal:
                break
        kept = nucleus
    kept = [i for i in kept if probs[i] >= params.min_p * probs[order[0]]]
    return [prob if i in kept else 0.0 for i, prob in enumerate(probs)]


def draw_logits(seed, size=40):
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 39},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.0, 5.0])
def test_probabilities(filters, temperature):
    params = Rules(temperature=temperature, **filters)
    for seed in range(20):
        logits = draw_logits(seed)
        before = logits.copy()
        found = filtered_probs(logits, params)
        np.testing.assert_array_equal(logits, before)
        np.testing.assert_allclose(found, reference_probs(logits.tolist(), params), rtol=1e-9, atol=0)


def test_every_setting_changes_the_probabilities():
    base = Rules(temperature=0.8)
    plain = filtered_probs(draw_logits(0), base)
    for change in ({"temperature": 0.7}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}):
        found = filtered_probs(draw_logits(0), Rules(**({"temperature": 0.8} | change)))
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(found, plain, rtol=1e-9)


def test_ties():
    level = np.zeros(10, np.float32)
    for count in (1, 4, 9):
        assert np.count_nonzero(filtered_probs(level, Rules(temperature=1.0, top_k=count))) == count
    assert np.count_nonzero(filtered_probs(level, Rules(temperature=1.0, min_p=1.0))) == 10
    assert np.count_nonzero(filtered_probs(level, Rules(temperature=1.0, top_p=0.45))) == 5


def test_more_top_k_than_tokens_is_off():
    for top_k in (40, 41, 2**31):
        found = filtered_probs(draw_logits(1), Rules(temperature=1.0, top_k=top_k))
        np.testing.assert_array_equal(found, filtered_probs(draw_logits(1), Rules(temperature=1.0)))


def chi_square(params, expected, draws=4000, seed=7):
    """How far the frequencies of one sampler are from `expected`; infinite if it drew what cannot occur."""
    sampler = Sampler(params, seed, NO_PROMPT)
    counts = np.bincount([sampler(draw_logits(3, 8)) for _ in range(draws)], minlength=8)
    mean = expected / expected.sum() * draws
    if counts[mean == 0].any():
        return math.inf
    return float(((counts - mean)[mean > 0] ** 2 / mean[mean > 0]).sum())


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.02}], ids=str)
def test_frequencies(filters):
    params = Rules(temperature=2.0, **filters)
    limit = 30.0  # the 99.99 % point of seven degrees of freedom is 29.9
    assert chi_square(params, filtered_probs(draw_logits(3, 8), params)) < limit
    colder = filtered_probs(draw_logits(3, 8), Rules(temperature=1.6, **filters))
    assert chi_square(params, colder) > limit


def chosen(params, seed, count=50, prompt=NO_PROMPT):
    sampler = Sampler(params, seed, prompt)
    return [sampler(draw_logits(step)) for step in range(count)]


def test_the_seed_decides():
    params = Rules(temperature=1.0, top_p=0.95)
    assert chosen(params, 5) == chosen(params, 5)
    assert chosen(params, 5) != chosen(params, 6)


def test_samplers_do_not_disturb_each_other():
    params = Rules(temperature=1.0)
    alone = [chosen(params, seed) for seed in (1, 2)]
    one, two = (Sampler(params, seed, NO_PROMPT) for seed in (1, 2))
    together = []
    for step in range(50):
        np.random.default_rng(0).random()
        random.random()
        together.append((one(draw_logits(step)), two(draw_logits(step))))
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone


def test_greedy():
    for settings in ({}, {"top_k": 5, "top_p": 0.5, "min_p": 0.3}):
        params = Rules(temperature=0.0, **settings)
        for seed in (0, 1):
            assert chosen(params, seed) == [int(draw_logits(step).argmax()) for step in range(50)]
    assert Sampler(Rules(), 0, NO_PROMPT)(np.array([1, 3, 3, 2], np.float32)) == 1


@pytest.mark.parametrize(
    "temperature",
    [1e-3, 1e-30, 1e-310],
)
def test_next_to_no_temperature_is_greedy(temperature):
    assert chosen(Rules(temperature=temperature), 0) == chosen(Rules(), 0)


class Loaded:
    """A random generator that always draws the same number."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


@pytest.mark.parametrize("value", [0.0, np.nextafter(1.0, 0.0)])
def test_what_was_filtered_out_is_never_drawn(monkeypatch, value):
    """At both ends of the unit interval, also where the running sum ends below the sum."""
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Loaded(value))
    params = Rules(temperature=1.0, top_k=990)
    beyond = 0
    for seed in range(30):
        logits = np.random.Generator(np.random.PCG64(seed)).standard_normal(1000).astype(np.float32)
        logits[[0, -1]] = -20  # filtered out at both ends
        probs = filtered_probs(logits, params)
        allowed = np.flatnonzero(probs)
        token = Sampler(params, 0, NO_PROMPT)(logits)
        assert token == (allowed[0] if value == 0 else allowed[-1])
        beyond += bool(value * probs.sum() >= np.cumsum(probs)[-1])
    assert beyond or value == 0  # else this test would not see the guard go


def test_penalise():
    logits = np.array([2.0, -2.0, 0.0, 3.0, -3.0], np.float32)
    found = penalise(logits, [0, 1, 2], 2.0)
    assert found.tolist() == [1.0, -4.0, 0.0, 3.0, -3.0] and found.dtype == np.float32
    assert logits.tolist() == [2.0, -2.0, 0.0, 3.0, -3.0]
    assert penalise(logits, [0, 1], 0.5).tolist() == [4.0, -1.0, 0.0, 3.0, -3.0]
    assert penalise(logits, [], 2.0).tolist() == logits.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
def test_prompt_and_chosen_tokens_are_penalised_once(temperature, penalty):
    prompt = [3, 3, 9, 3]
    params = Rules(temperature=temperature, repetition_penalty=penalty)
    found = chosen(params, 4, prompt=np.array(prompt, np.int32))
    seen, expected = set(prompt), []
    plain = Sampler(Rules(temperature=temperature), 4, NO_PROMPT)
    for step in range(50):
        logits = [value / penalty if value > 0 else value * penalty for value in draw_logits(step).tolist()]
        logits = [new if i in seen else old for i, (new, old) in enumerate(zip(logits, draw_logits(step), strict=True))]
        expected.append(plain(np.array(logits, np.float32)))
        seen.add(expected[-1])
    assert found == expected
    assert (found == chosen(Rules(temperature=temperature), 4)) == (penalty == 1.0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.7, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers(settings, value):
    logits = draw_logits(0)
    logits[11] = value
    sampler = Sampler(Rules(**settings), 0, np.array([1], np.int32))
    with pytest.raises(NumericalError, match="not finite") as caught:
        sampler(logits)
    assert caught.value.exit_code == 7
    assert sampler(draw_logits(0)) == Sampler(Rules(**settings), 0, np.array([1], np.int32))(draw_logits(0))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", (-1, 2**31 + 1, 1e30, math.nan, math.inf)),
        ("temperature", (-0.1, 1e9, math.nan, math.inf, -math.inf)),
        ("top_k", (-5, 2**40, math.nan)),
        ("top_p", (0, 0.0, -0.1, 2, 1.0001, math.nan)),
        ("min_p", (-0.1, 1.1, math.nan)),
        ("repetition_penalty", (0, -1.0, 1e9, math.nan, math.inf)),
        ("seed", (-1, 2**70)),
    ],
)
def test_bounds(name, values):
    for value in values:
        with pytest.raises(UsageError, match=f"^{name} must be .*got "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("stop", [("",), ("a", ""), ("x",) * (MAX_STOPS + 1), ("x",) * 10_000])
def test_refused_stops(stop):
    with pytest.raises(UsageError, match="stop must be"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", "5"),
        ("max_new_tokens", True),
        ("max_new_tokens", 2.5),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", 2.5),
        ("seed", 0.5),
        ("stop", "END"),
        ("stop", (1,)),
    ],
)
def test_types(name, value):
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


def test_the_ends_of_the_ranges():
    low = {"max_new_tokens": 0, "temperature": 0, "top_k": 0, "top_p": 1e-9, "min_p": 0, "repetition_penalty": 1e-3}
    high = {"max_new_tokens": 2**31, "temperature": 1e4, "top_k": 2**31, "top_p": 1, "min_p": 1}
    for settings in (low | {"seed": 0}, high | {"repetition_penalty": 1e3, "seed": 2**63, "stop": ("x",) * MAX_STOPS}):
        params = SamplingParams(**settings)
        assert {name: getattr(params, name) for name in settings} == settings
        if params.temperature:
            chosen(params, params.seed)
    with pytest.raises(TypeError, match="top"):
        SamplingParams(top=5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Rules()),
        ({"temperature": 0.5}, Rules(temperature=0.5, top_k=40, top_p=0.9)),
        ({"temperature": 0.5, "top_k": 0}, Rules(temperature=0.5, top_p=0.9)),
        ({"temperature": 0.5, "top_p": 1.0, "min_p": 0.1}, Rules(temperature=0.5, top_k=40, min_p=0.1)),
        ({"top_k": 3}, Rules(top_k=3)),
    ],
)
def test_advice_fills_what_was_left_open_once_a_temperature_is_set(given, expected):
    advice = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "do_sample": True, "eos_token_id": [2]}
    assert SamplingParams(**given).rules(advice) == expected
    assert SamplingParams(**given).rules() == Rules(**given)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_an_id_that_the_tokenizer_lacks_is_never_chosen(temperature):
    logits = np.zeros(16, np.float32)
    logits[9] = 8.0
    known = np.arange(16) < 4
    rules = Rules(temperature=temperature, repetition_penalty=1.1)
    sampler, free = Sampler(rules, 0, NO_PROMPT, known), Sampler(rules, 0, NO_PROMPT)
    chosen_ids = {sampler(logits) for _ in range(200)}
    assert chosen_ids <= {0, 1, 2, 3}
    assert free(logits) not in {0, 1, 2, 3}
    assert logits[9] == 8.0
