"""Drawn activity has the figures that are published of its model, and the check of them can fail."""

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from dynajax.errors import UsageError
from dynajax.sim import statistics, synthetic
from dynajax.sim.synthetic import RECIPES, Biases, Scoring, checked, make_activity

PRO, RELU = RECIPES["prosparse-7b"], RECIPES["relullama-7b"]
BOTH = Scoring(place_rho=0.9, skip_rho=0.9)
SMALL = {"stride": 172, "sequences": 2, "prompt": 12, "tokens": 8}
LAYERS, WIDTH = 32, 64


def figures(recipe, **sizes):
    return {figure.name: figure for figure in checked(recipe, **sizes)}


def draw(recipe=PRO, scoring=BOTH, **changes):
    return make_activity(recipe, scoring, **{**SMALL, **changes})


def differing(one, other):
    """Names of the arrays of two activities that are not equal."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in ("frequency", "mass")}
    for name in ("prompt_counts", "live", "place", "skip"):
        pairs[name] = tuple(np.stack([getattr(run, name) for run in each.runs]) for each in (one, other))
    return {name for name, (a, b) in pairs.items() if not np.array_equal(a, b)}


# --- published figures --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_sample_has_every_published_figure(name):
    recipe = RECIPES[name]
    found = checked(recipe, stride=recipe.ffn // 160)
    assert [(figure.name, figure.low, figure.found, figure.high) for figure in found if not figure.ok] == []
    assert {figure.assumed for figure in found} == ({False} if name == "relullama-7b" else {False, True})


WRONG = {
    "no topic": (RELU, {"share": 0.0}, {"distance of sentences"}),
    "too much topic": (RELU, {"share": 0.4}, {"distance of sentences", "distance of neighbouring tokens"}),
    "tokens that have nothing in common": (PRO, {"r": 0.0}, {"distance of neighbouring tokens"}),
    "tokens that have much in common": (RELU, {"r": 0.5}, {"distance of neighbouring tokens"}),
    "layers that have little in common": (RELU, {"cosine": 0.8}, {"cosine of neighbouring layers"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_check_notices(case):
    recipe, change, expected = WRONG[case]
    found = figures(replace(recipe, **change), stride=86, sequences=8)
    assert {name for name in expected if not found[name].ok} == expected


def test_the_check_notices_biases_that_are_all_the_same(monkeypatch):
    mean = statistics.normal_quantile(np.full(LAYERS, RELU.density))
    monkeypatch.setattr(synthetic, "biases", lambda recipe: Biases(mean, np.zeros(LAYERS)))
    found = figures(RELU, stride=86, sequences=8)
    failed = {name for name, figure in found.items() if not figure.ok}
    assert failed >= {f"neurons that cover {share} %" for share in (80, 90, 95)} | {"the same, mean error of a layer"}
    assert found["live share"].ok


def test_the_check_notices_layers_in_the_wrong_order(monkeypatch):
    right = synthetic.biases(RELU)
    monkeypatch.setattr(synthetic, "biases", lambda recipe: Biases(right.mean, np.roll(right.spread, 10)))
    found = figures(RELU, stride=86, sequences=8)
    assert not found["the same, mean error of a layer"].ok


def test_the_check_notices_too_many_live_and_another_predictor(monkeypatch):
    right = synthetic.biases(RELU)
    monkeypatch.setattr(synthetic, "biases", lambda recipe: Biases(right.mean + 0.1, right.spread))
    monkeypatch.setattr(synthetic, "mlp_quality", lambda recipe: (0.7, 0.5))
    found = figures(RELU, stride=86, sequences=8)
    assert {"live share", "predicted for each live", "recall"} <= {name for name in found if not found[name].ok}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_the_published_file(name):
    recipe = RECIPES[name]
    text = resources.files("dynajax").joinpath("assets", "activity", "relullama.json").read_text(encoding="utf-8")
    assert json.loads(text)["models"][recipe.coverage_of]["counted"] == recipe.counted
    assert "viennh/CAP6614-PowerInfer" in json.loads(text)["source"]
    coverage = synthetic.published_coverage(recipe.coverage_of)
    assert {len(by_layer) for by_layer in coverage.values()} == {recipe.layers}
    assert (0 < coverage["80"]).all() and (coverage["80"] < coverage["90"]).all()
    assert (coverage["90"] < coverage["95"]).all() and (coverage["95"] < 1).all()


@pytest.mark.parametrize(("model", "means"), [("7b", (57.1, 72.7, 82.7)), ("13b", (57.1, 72.3, 82.2)),
                                              ("70b", (63.3, 77.7, 86.5))])  # fmt: skip
def test_published_means(model, means):
    coverage = synthetic.published_coverage(f"relullama-{model}")
    assert tuple(round(100 * float(coverage[share].mean()), 1) for share in ("80", "90", "95")) == pytest.approx(means)


@pytest.mark.parametrize("name", RECIPES)
def test_biases_give_coverage_and_density_without_sampling(name):
    recipe = RECIPES[name]
    found, wanted = synthetic.biases(recipe), synthetic.published_coverage(recipe.coverage_of)
    for share, worst, mean in (("80", 1e-4, 1e-4), ("90", 0.07, 0.015), ("95", 0.07, 0.02)):
        off = np.abs(statistics.normal_coverage(found.spread, recipe.counted, int(share) / 100) - wanted[share])
        assert off.max() < worst and off.mean() < mean
    live = statistics.normal_cdf_exact(found.mean / np.sqrt(1 + found.spread**2))
    assert live.mean() == pytest.approx(recipe.density, abs=1e-9)
    assert live[-1] / live[0] == pytest.approx(recipe.rise[1] / recipe.rise[0])


def test_a_better_predictor_is_one_of_higher_quality():
    rho, theta = synthetic.mlp_quality(RELU)
    better, _ = synthetic.mlp_quality(replace(RELU, recall=0.95))
    _, stricter = synthetic.mlp_quality(replace(RELU, predicted=1.1))
    assert 0.5 < rho < better < 1
    assert 0 < theta < stricter < 1


# --- activity -------------------------------------------------------------------------------------------


def test_shapes_and_types():
    activity = draw()
    assert (activity.name, activity.synthetic, activity.stride) == ("prosparse-7b", True, 172)
    assert activity.shape == (LAYERS, WIDTH) == activity.mass.shape
    assert activity.frequency.dtype == activity.mass.dtype == np.float32
    assert len(activity.runs) == 2
    for run in activity.runs:
        assert (run.prompt_tokens, run.tokens) == (12, 8)
        assert (run.prompt_counts.shape, run.prompt_counts.dtype) == ((LAYERS, WIDTH), np.int32)
        assert run.live.shape == run.place.shape == (8, LAYERS, WIDTH)
        assert (run.live.dtype, run.place.dtype) == (np.bool_, np.uint8)
        assert run.placed.shape == (8, LAYERS) and run.placed.all()


def test_equal_arguments_give_equal_activity():
    assert differing(draw(), draw()) == set()


def test_another_seed_is_another_text_of_the_same_model():
    assert differing(draw(), draw(seed=1)) == {"prompt_counts", "live", "place", "skip"}


def test_another_seed_of_the_recipe_is_another_model():
    other = draw(replace(PRO, seed=1))
    assert differing(draw(), other) == {"frequency", "mass", "prompt_counts", "live", "place", "skip"}


def test_no_random_numbers_are_used_twice():
    """Seeds of text and model may be equal, and equal a layer: states and directions have nothing in common."""
    recipe = replace(RELU, share=0.0, r=0.0)
    states = next(synthetic.hidden_states(recipe, 1, WIDTH, seed=recipe.seed))[0]
    for weight, _ in synthetic.neurons(recipe, WIDTH):
        assert abs(np.corrcoef(states.ravel(), weight.ravel())[0, 1]) < 0.1
        assert abs(np.corrcoef(states.ravel(), weight.T.ravel())[0, 1]) < 0.1


def test_scoring_leaves_the_text_as_it_is():
    assert differing(draw(), draw(scoring=Scoring(place_rho=0.5, skip_rho=0.6))) == {"place", "skip"}
    learned, gate = (draw(scoring=Scoring(place_rho=rho, skip_rho=0.5)) for rho in (0.9, None))
    assert differing(learned, gate) == {"place"}


def test_a_prompt_is_the_text_before_what_is_decoded():
    whole, split = draw(prompt=0, tokens=20), draw()
    for all_of_it, run in zip(whole.runs, split.runs, strict=True):
        np.testing.assert_array_equal(run.live, all_of_it.live[12:])
        np.testing.assert_array_equal(run.prompt_counts, all_of_it.live[:12].sum(axis=0))
        assert not all_of_it.prompt_counts.any()


def test_one_array_of_scores_where_they_are_the_same():
    assert all(run.skip is run.place for run in draw().runs)
    assert all(run.skip is None for run in draw(scoring=Scoring(place_rho=None, skip_rho=None)).runs)
    for run in draw(scoring=Scoring(place_rho=0.9, skip_rho=0.89)).runs:
        assert not np.array_equal(run.skip, run.place)


@pytest.mark.parametrize(("place_rho", "lead"), [(1, 1), (None, 0)])
def test_exact_scores_are_the_truth(place_rho, lead):
    for run in draw(scoring=Scoring(place_rho=place_rho, skip_rho=1), lead=lead).runs:
        np.testing.assert_array_equal(run.place, run.live * 255)
        np.testing.assert_array_equal(run.skip, run.live * 255)


def test_statistics_are_what_other_text_shows():
    """Frequency and mass are closed forms: over many sequences neurons are live so often, and that strong."""
    activity = draw(tokens=1)
    states = synthetic.hidden_states(PRO, 8000, 1, seed=5)
    for layer, state, (weight, bias) in zip(range(3), states, synthetic.neurons(PRO, WIDTH), strict=False):
        value = state[:, 0] @ weight + bias
        live = value > 0
        mass = (value * live).sum(axis=0) / np.maximum(live.sum(axis=0), 1)
        off = [abs(live.mean(axis=0) - np.roll(activity.frequency[layer], by)).mean() for by in (0, 1)]
        assert off[0] < 0.005 < 0.03 < off[1]
        often = live.sum(axis=0) > 400
        off = [abs(mass - np.roll(activity.mass[layer], by))[often].mean() for by in (0, 1)]
        assert off[0] < 0.015 < 0.03 < off[1]


SCORINGS = {
    "predictor": (Scoring(place_rho=0.8, skip_rho=0.8), 1, 0.8),
    "the gate, ahead": (Scoring(place_rho=None, skip_rho=None), 2, PRO.cosine**2),
}


@pytest.mark.parametrize("case", SCORINGS)
def test_scores_are_probabilities(case):
    """Of the neurons with p, p are live; the same scores shifted by a tenth are noticed."""
    scoring, lead, rho = SCORINGS[case]
    activity = draw(RELU, scoring, sequences=400, prompt=0, tokens=2, lead=lead)
    score = np.concatenate([run.place for run in activity.runs]).astype(np.float64) / 255
    live = np.concatenate([run.live for run in activity.runs])
    bins = (score * 9.999).astype(int)
    count = np.bincount(bins.ravel())
    expected, found = (np.bincount(bins.ravel(), weights=each.ravel()) / count for each in (score, live))
    assert count.min() > 5000
    assert np.abs(expected - found).max() < 0.02
    assert np.abs(expected * 0.9 + 0.1 - found).max() > 0.02
    # and as sharp as their quality says, in the layers below the lead too
    recalled = [
        statistics.recall(score[:, layers] >= 0.5, live[:, layers]) for layers in (slice(0, lead), slice(lead, None))
    ]
    for layers, expected in zip((slice(0, lead), slice(lead, None)), recalled, strict=True):
        assert expected == pytest.approx(recall_at_half(RELU, rho, layers), abs=0.03)
        assert expected != pytest.approx(recall_at_half(RELU, rho - 0.1, layers), abs=0.03)


def recall_at_half(recipe, rho, layers):
    """Of live neurons, how many have p >= 1/2 with a predictor of quality rho: those with b + rho * zhat > 0."""
    known = synthetic.biases(recipe)
    mean, spread = known.mean[layers], known.spread[layers]
    one, seen = np.sqrt(1 + spread**2), np.sqrt(rho**2 + spread**2)
    both = statistics.normal_both(-mean / one, -mean / seen, seen / one)
    return both.sum() / statistics.normal_cdf_exact(mean / one).sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 0}, "stride must be at least 1 and at most 11008, got 0"),
        ({"stride": 11009}, "stride must be at least 1 and at most 11008, got 11009"),
        ({"sequences": 0}, "sequences must be at least 1, got 0"),
        ({"prompt": -1}, "prompt must be at least 0, got -1"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"lead": 32}, "lead must be at least 0 and at most 31, got 32"),
    ],
)
def test_sizes_out_of_range_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        draw(**change)


@pytest.mark.parametrize("rho", [0, -0.5, 1.01, float("nan")])
def test_qualities_out_of_range_are_refused(rho):
    with pytest.raises(UsageError, match="skip_rho must be above 0 and at most 1"):
        Scoring(place_rho=None, skip_rho=rho)
