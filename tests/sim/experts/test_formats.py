"""Other programs' routing traces. Small ones made here by what their descriptions say: no original was at hand."""

import json

import numpy as np
import pytest

from dynajax.sim.experts.formats import counted_steps, imported, layer_number, read_csv, read_json, read_npy
from dynajax.trace import DECODE, PREFILL

TOKENS, LAYERS, TOP_K, UNITS = 5, 3, 2, 9
EXPERTS = np.argsort(np.random.default_rng(0).random((TOKENS, LAYERS, UNITS)), axis=2)[:, :, :TOP_K]
BY_LAYER = {f"model.layers.{m + 1}.mlp": EXPERTS[:, m].tolist() for m in reversed(range(LAYERS))}


def written(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


# --- tokens ---


def test_imported_tokens_are_steps_of_one():
    trace = imported(EXPERTS, None)
    assert trace.head.width == EXPERTS.max() + 1 and trace.head.unit_layers == (0, 1, 2)
    assert trace.step.tolist() == trace.token_pos.tolist() == list(range(5)) and (trace.phase == DECODE).all()
    assert np.array_equal(trace.experts, EXPERTS)


def test_imported_prompts_run_together():
    phase = np.array([PREFILL, PREFILL, DECODE, PREFILL, DECODE], np.uint8)
    trace = imported(EXPERTS, UNITS, phase=phase, generation=np.array([1, 1, 1, 2, 2]))
    assert trace.step.tolist() == [0, 0, 1, 2, 3] and trace.token_pos.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (EXPERTS[:, :, 0], "tokens x layers x experts"),
        (EXPERTS - 1, "from 0 to"),
        (EXPERTS + 9, "experts must be below 9"),
        (EXPERTS[:, :, [0, 0]], "distinct"),
        (np.zeros((0, 2, 2), int), "tokens x layers x experts"),
        (np.zeros((1, 1025, 1), int), "at most 1024 layers"),
    ],
)
def test_what_cannot_be_imported(experts, words):
    with pytest.raises(ValueError, match=words):
        imported(experts, UNITS)


# --- core12345 ---


@pytest.mark.parametrize(
    "value",
    [
        EXPERTS.tolist(),
        {"query": "why", "experts": EXPERTS.tolist()},
        BY_LAYER,
        [{f"layer_{m}": EXPERTS[t, m].tolist() for m in range(LAYERS)} for t in range(TOKENS)],
        [{"token": "a", "layers": EXPERTS[t : t + 1].tolist()} for t in range(TOKENS)],
        {"prefill": [], "decode": EXPERTS.tolist()},
    ],
)
def test_json_of_every_layout(tmp_path, value):
    trace = read_json(written(tmp_path / "a.json", value), UNITS)
    assert np.array_equal(trace.experts, EXPERTS) and (trace.phase == DECODE).all() and trace.head.width == UNITS


def test_json_tells_prompts_from_what_was_generated(tmp_path):
    value = {"decode_tokens": EXPERTS[2:].tolist(), "prefill_tokens": EXPERTS[:2].tolist()}
    trace = read_json(written(tmp_path / "a.json", value), None)
    assert np.array_equal(trace.experts, EXPERTS) and trace.phase.tolist() == [PREFILL] * 2 + [DECODE] * 3
    assert trace.step.tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "no JSON"),
        ([], "list of tokens"),
        ({}, "holds nothing"),
        ([[1, 2], [3, 4]], "list of tokens"),
        ([[[0.5, 1.5]]], "list of tokens"),
        ({"a": [[[1]]], "b": [[[2]]]}, "holds a, b"),
        ({"layer_1": [[1]], "layer_2": [[1], [2]]}, "different numbers of tokens"),
        ({"layer_1": [[1]], "block_1": [[1]]}, "the same number"),
        ({"prefill": [[[1, 2]]], "decode": [[[1]]]}, "different layers or experts"),
    ],
)
def test_json_that_is_no_trace(tmp_path, value, words):
    with pytest.raises(ValueError, match=words):
        read_json(written(tmp_path / "a.json", value), None)


# --- counts ---


def test_npy_of_requests(tmp_path):
    counts = np.random.default_rng(0).integers(0, 9, (4, LAYERS, UNITS))
    np.save(tmp_path / "a.npy", counts.astype(np.float64))
    trace = read_npy(tmp_path / "a.npy", TOP_K)
    assert np.array_equal(trace.workload(), counts) and trace.experts is None and trace.head.top_k == TOP_K
    assert trace.steps == 4


def test_layers_without_experts_and_empty_steps_are_left_out():
    counts = np.zeros((3, 2, 4), int)
    counts[1, 1, 2] = 5
    trace = counted_steps(counts, 1)
    assert trace.workload().tolist() == [[[0, 0, 5, 0]]]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.ones((2, 3)), "steps x layers x experts"),
        (np.full((1, 1, 2), 0.5), "whole numbers"),
        (np.full((1, 1, 2), -1), "from 0 to"),
        (np.zeros((1, 1, 2), int), "nothing was counted"),
        (np.ones((1, 1, 1), int), "fewer than the 2"),
    ],
)
def test_counts_that_cannot_be(counts, words):
    with pytest.raises(ValueError, match=words):
        counted_steps(counts, TOP_K)


# --- llama-moe-trace ---


def lines(head: str, rows) -> str:
    return "\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n"


def test_csv_with_all_experts_in_a_line(tmp_path):
    rows = [(t, m, *EXPERTS[t, m]) for t in range(TOKENS) for m in range(LAYERS)]
    trace = read_csv(written(tmp_path / "a.csv", lines("token,layer,expert_0,expert_1", rows)), UNITS, TOP_K, {})
    assert np.array_equal(trace.experts, EXPERTS)
    joined = [(t, m, ";".join(map(str, EXPERTS[t, m]))) for t in range(TOKENS) for m in range(LAYERS)]
    trace = read_csv(written(tmp_path / "b.csv", lines("pos,il,experts", joined)), UNITS, TOP_K, {})
    assert np.array_equal(trace.experts, EXPERTS)


def test_csv_with_a_line_for_each_expert_and_columns_of_other_names(tmp_path):
    rows = [(EXPERTS[t, m, k], t, m) for t in range(TOKENS) for m in range(LAYERS) for k in range(TOP_K)]
    path = written(tmp_path / "a.csv", lines("e,t,l", rows))
    trace = read_csv(path, UNITS, TOP_K, {"expert": "e", "token": "t", "layer": "l"})
    assert np.array_equal(trace.experts, EXPERTS)


def test_csv_of_a_profile(tmp_path):
    path = written(tmp_path / "a.csv", lines("layer,expert,count", [(1, 0, 3), (1, 4, 2), (2, 1, 5), (1, 0, 1)]))
    trace = read_csv(path, 5, TOP_K, {})
    assert trace.workload().tolist() == [[[4, 0, 0, 0, 2], [0, 5, 0, 0, 0]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no lines"),
        ("token,layer\n1,2\n", "names experts: give --columns expert=NAME"),
        ("token,expert\n1,2\n", "is the layer: give --columns layer=NAME"),
        ("token,layer,expert\n0,0,a\n", "invalid literal"),
        ("token,layer,expert_0,expert_1\n0,0,1,2\n1,1,1,2\n", "are missing"),
        ("token,layer,expert\n0,0,1;2\n1,0,1\n", "as many experts everywhere"),
        ("layer,expert,count\n0,7,1\n", "below 5"),
        ("layer,count\n0,7\n", "names an expert"),
    ],
)
def test_csv_that_is_no_trace(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read_csv(written(tmp_path / "a.csv", text), 5, 1, {})


def test_a_named_column_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="no column 'x', only token, layer, expert"):
        read_csv(written(tmp_path / "a.csv", "token,layer,expert\n0,0,1\n"), None, 1, {"expert": "x"})


def test_numbers_in_names():
    assert [layer_number(name) for name in ("layer_07", "blk.3.ffn", "7b.layers.12.mlp", "none")] == [7, 3, 12, None]
