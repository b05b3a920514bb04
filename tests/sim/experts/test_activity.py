"""What mixtures do: recordings as they ran and side by side, texts that are drawn, and what is foretold of them."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.errors import MismatchError, UsageError
from dynajax.policy.experts.synthetic import RECIPES
from dynajax.routing_trace import RoutingHead, RoutingTrace
from dynajax.sim.experts.activity import draw_mixture, from_routing, shipped_names, shipped_routing
from dynajax.sim.experts.foresight import RECALL, draw_foretold, foresights, said_of
from dynajax.sim.experts.formats import counted_steps, imported
from dynajax.sim.experts.shapes import MIXTURES
from dynajax.trace import DECODE, PREFILL
from tests.sim.experts.cases import routed

UNITS, TOP_K, LAYERS = 12, 3, 2


def recording(*, predicted: bool = False, lengths=((4, 5), (2, 9), (0, 12))) -> RoutingTrace:
    """Generations with (prompt, decoded) tokens each, row 0."""
    rng, total = np.random.default_rng(0), sum(map(sum, lengths))
    experts = np.argsort(rng.random((total, LAYERS, UNITS)), axis=2)[:, :, :TOP_K]
    phase = np.concatenate([[PREFILL] * a + [DECODE] * b for a, b in lengths])
    generation = np.concatenate([[n + 1] * sum(each) for n, each in enumerate(lengths)])
    trace = imported(experts, UNITS, phase=phase.astype(np.uint8), generation=generation.astype(np.int32))
    guess = np.where(np.arange(LAYERS)[:, None] > 0, trace.experts, UNITS).astype(np.uint8)
    head = RoutingHead(fingerprint="", unit_layers=(0, 1), width=UNITS, top_k=TOP_K, settings={"prefetch": "gate"})
    return replace(trace, head=head, predicted=guess if predicted else None)


def test_a_recording_as_it_ran():
    trace = recording()
    activity = from_routing(trace, "run")
    assert [(len(run.prompts), len(run.steps), run.context) for run in activity.runs] == [
        (1, 5, 4),
        (1, 9, 2),
        (0, 12, 0),
    ]
    first = activity.runs[0]
    assert first.prompts[0].tokens == 4 and (first.prompts[0].counts.sum(axis=1) == 12).all()
    assert np.array_equal(first.steps, trace.workload()[1:6]) and first.rows.tolist() == [1] * 5
    assert (activity.batch, activity.top_k, activity.context, activity.synthetic) == (1, 3, 12, False)
    expected = (trace.workload().sum(axis=0) + 0.5) / 33
    assert np.allclose(activity.frequency, expected)


def test_statistics_of_the_recording_come_first():
    known = np.random.default_rng(1).random((LAYERS, UNITS)).astype(np.float32)
    assert np.array_equal(from_routing(replace(recording(), frequency=known), "run").frequency, known)
    assert from_routing(replace(recording(), frequency=np.zeros_like(known)), "run").frequency.all()


def test_sequences_side_by_side():
    trace = recording(predicted=True)
    (run,) = from_routing(trace, "run", 3).runs
    assert run.rows.tolist() == [3] * 5 + [2] * 4 + [1] * 3 and run.prompts[0].tokens == 6
    assert run.steps.sum() == 26 * LAYERS * TOP_K and run.context == 2
    steps = trace.workload()
    assert np.array_equal(run.steps[0], steps[1] + steps[7] + steps[16])
    assert np.array_equal(run.foretold[:, 1], run.steps[:, 1]) and not run.foretold[:, 0].any()
    assert [len(run.rows) for run in from_routing(trace, "run", 2).runs] == [9]  # the third has no company


def test_long_sequences_are_cut():
    trace = recording(lengths=((3, 40),))
    (run,) = from_routing(trace, "run", 4).runs
    assert run.rows.tolist() == [4] * 10 and run.prompts[0].tokens == 12
    with pytest.raises(UsageError, match="40 decoded tokens, too few for --batch 6"):
        from_routing(trace, "run", 6)


def test_what_only_counts():
    counts = np.random.default_rng(0).integers(0, 4, (5, LAYERS, UNITS))
    activity = from_routing(counted_steps(counts, TOP_K), "run")
    assert np.array_equal(activity.runs[0].steps, counts)
    assert activity.runs[0].rows.tolist() == np.ceil(counts.sum(axis=2).max(axis=1) / TOP_K).tolist()
    with pytest.raises(UsageError, match="leave out --batch"):
        from_routing(counted_steps(counts, TOP_K), "run", 2)


def test_nothing_decoded():
    with pytest.raises(MismatchError, match="no decoded token"):
        from_routing(recording(lengths=((4, 0),)), "run")


def test_what_is_drawn():
    spec = MIXTURES["qwen3-30b-a3b"]
    spec = replace(spec, layers=3, experts=replace(spec.experts, layers=(0, 1, 2)))
    given = {"batch": 4, "prompt": 8, "steps": 60}
    activity, again = (draw_mixture(spec, RECIPES["repeating"], "q", **given) for _ in range(2))
    (run,) = activity.runs
    assert np.array_equal(run.steps, again.runs[0].steps)
    assert run.steps.shape == (60, 3, 128) and (run.steps.sum(axis=2) == 32).all()
    assert run.prompts[0].tokens == 32 and (run.prompt_counts.sum(axis=1) == 256).all()
    assert np.allclose(activity.frequency.sum(axis=1), 8, rtol=0.1)
    used = run.steps.sum(axis=0)
    for layer in range(3):  # the statistics tell of the text, and are not the text
        known = np.corrcoef(used[layer], activity.frequency[layer])[0, 1]
        assert 0.5 < known < 0.999
    other = draw_mixture(spec, RECIPES["repeating"], "q", seed=1, **given)
    assert not np.array_equal(other.runs[0].steps, run.steps)


def test_a_prompt_may_be_missing():
    spec = MIXTURES["tiny-moe"]
    (run,) = draw_mixture(spec, RECIPES["popular"], "t", batch=1, prompt=0, steps=3).runs
    assert run.prompts == () and not run.prompt_counts.any()


def test_the_shipped_recording_is_of_its_model():
    assert "tiny-moe" in shipped_names()
    trace = shipped_routing("tiny-moe")
    assert (trace.head.layers, trace.head.width, trace.head.top_k) == (6, 16, 4)
    assert len(np.unique(trace.generation)) == 32 and trace.predicted is not None and trace.frequency.any()
    assert from_routing(trace, "t", 128).batch == 128
    with pytest.raises(UsageError, match="only tiny-moe"):
        shipped_routing("large-moe")


# --- what is foretold ---


@pytest.mark.parametrize("recall", [0.0, 0.7, 1.0])
def test_drawn_predictions_find_what_they_promise(recall):
    rng = np.random.default_rng(0)
    steps = rng.multinomial(40, np.full(64, 1 / 64), (200, 3)).astype(np.int32)
    frequency = np.full((3, 64), 1 / 64, np.float32)
    guess = draw_foretold(steps, frequency, recall, 7)
    assert (guess.sum(axis=2) == 40).all() and np.array_equal(guess, draw_foretold(steps, frequency, recall, 7))
    chance = np.minimum(steps, draw_foretold(steps, frequency, 0.0, 8)).sum() / steps.sum()
    found = np.minimum(guess, steps).sum() / steps.sum()
    assert recall - 0.01 <= found <= recall + (1 - recall) * chance * 1.5 + 1e-9
    if recall == 1:
        assert np.array_equal(guess, steps)


def test_where_predictions_come_from():
    steps = [[[2, 0, 0, 0, 0, 0]], [[0, 2, 0, 0, 0, 0]]]
    plain, known = routed(*steps), replace(routed(*steps, foretold=steps), foretold_by="gate")
    assert foresights(plain, "none", None, 0.5) == [None]
    (recorded,) = foresights(known, "corrected", None, 0.5)
    assert recorded.predict(1, 0).tolist() == [0, 2, 0, 0, 0, 0]
    (drawn,) = foresights(known, "corrected", 0.0, 0.5)
    assert drawn.predict(1, 0)[1] < 2
    (counting,) = foresights(plain, "count", None, 0.5)
    counting.observe(0, np.array(steps[0][0]))
    counting.observe(0, np.array(steps[1][0]))
    assert counting.predict(9, 0).tolist() == [0.5, 1, 0, 0, 0, 0]
    assert said_of(known, "corrected", None) == "corrected: as recorded (gate)"
    assert said_of(plain, "residual", None) == f"residual: drawn, recall {RECALL['residual']:g}"
    assert said_of(known, "residual", 0.25) == "residual: drawn, recall 0.25"
    assert said_of(plain, "count", None) == "count: the planner's own"


def test_nothing_is_known_of_a_layer_without_predictions():
    activity = routed([[2, 0, 0, 0, 0, 0]] * 2, foretold=[[[0] * 6, [2, 0, 0, 0, 0, 0]]])
    (told,) = foresights(activity, "gate", None, 0.5)
    assert told.predict(0, 0) is None and told.predict(0, 1)[0] == 2
