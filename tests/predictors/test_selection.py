"""Greedy recall per byte against brute force."""

from itertools import product

import numpy as np
import pytest

from predictors.forms import Form
from predictors.selection import Candidate, choose

FORM = Form(kind="mlp", rank=1)


def candidates(*pairs):
    return [Candidate(form=FORM, bytes=size, recall=recall) for size, recall in pairs]


def test_example_of_the_docstring():
    options = {0: candidates((10, 0.80), (40, 0.99), (20, 0.96))}
    assert choose(options, 0.95)[0].bytes == 20
    assert choose(options, 1.0)[0].bytes == 40
    assert choose(options, 1.0, budget_bytes=30)[0].bytes == 20
    assert choose(options, 0.95, budget_bytes=5)[0].bytes == 10  # the least there is
    assert choose({0: candidates((10, 0.5), (20, 0.5), (10, 0.6))}, 0.9)[0].recall == 0.6


@pytest.mark.parametrize("seed", range(20))
def test_close_to_the_best_there_is(seed):
    rng = np.random.default_rng(seed)
    places = {}
    for place in range(4):
        sizes = np.sort(rng.integers(1, 100, 4))
        places[place] = candidates(*zip(sizes.tolist(), np.sort(rng.random(4)).tolist(), strict=True))
    least = sum(options[0].bytes for options in places.values())
    budget = int(least * rng.uniform(1, 4))
    chosen = choose(places, 1.0, budget)
    assert sum(c.bytes for c in chosen.values()) <= budget
    value = sum(c.recall for c in chosen.values())
    best = max(
        sum(c.recall for c in combination)
        for combination in product(*places.values())
        if sum(c.bytes for c in combination) <= budget
    )
    steepest = max(options[-1].recall for options in places.values())
    assert best - steepest <= value <= best + 1e-9  # a knapsack by ratio loses at most one item


def test_without_a_budget_every_place_reaches_the_goal_or_its_best():
    places = {0: candidates((1, 0.2), (2, 0.9), (50, 0.97)), 1: candidates((1, 0.2), (90, 0.4))}
    assert {place: c.recall for place, c in choose(places, 0.95).items()} == {0: 0.97, 1: 0.4}
