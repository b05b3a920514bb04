"""Activation traces: round trip, what is forgotten, bounds of memory, and files that are damaged or another model's."""

import json

import numpy as np
import pytest

from dynajax.errors import MismatchError, StorageError, UsageError
from dynajax.trace import DECODE, PREFILL, Head, Recorder, read_trace

OWNER = "ab" * 32
HEAD = Head(fingerprint=OWNER, layers=2, width=11, settings={"lead": 1})
BUCKETS = [np.array([3, 10], np.int32), np.array([], np.int32)]


def recorded(seed: int = 0, *, scores: bool = True) -> tuple[Recorder, np.ndarray, np.ndarray]:
    """A prompt of 5 tokens and 4 steps of 2 -> recorder, live [13, 2, 11], scores [8, 11] of layer 1."""
    rng = np.random.default_rng(seed)
    live, predicted = rng.random((13, 2, 11)) < 0.4, rng.integers(0, 256, (8, 11)).astype(np.uint8)
    recorder = Recorder()
    recorder.open(HEAD, scores=scores)
    recorder.start()
    add(recorder, np.arange(5), [1] * 5, PREFILL, live[:5])
    for i in range(4):
        at = 5 + 2 * i
        recorder.begin(np.array([5 + i, 3 + i]), np.array([0, 1]), DECODE)
        recorder.add_scores(1, predicted[2 * i : 2 * i + 2])
        recorder.add_scores(0, None)
        for layer in range(2):
            recorder.add(layer, live[at : at + 2, layer], BUCKETS[layer], predicted[2 * i : 2 * i + 2] // (layer + 1))
    recorder.costs = {"t0_s": 0.1}
    return recorder, live, predicted


def add(recorder, positions, rows, phase, live) -> None:
    recorder.begin(np.asarray(positions), np.asarray(rows), phase)
    for layer in range(live.shape[1]):
        recorder.add(layer, live[:, layer], BUCKETS[layer])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.npz"


def test_round_trip(path):
    recorder, live, predicted = recorded()
    recorder.write(path)
    trace = read_trace(path, OWNER)
    assert trace.head == HEAD and trace.costs == {"t0_s": 0.1} and recorder.tokens == 13
    for layer in range(2):
        assert np.array_equal(trace.live_of(layer), live[:, layer])
        assert (trace.resident_of(layer) == np.isin(np.arange(11), BUCKETS[layer])).all()
    assert trace.token_pos.tolist() == [0, 1, 2, 3, 4, 5, 3, 6, 4, 7, 5, 8, 6]
    assert trace.row.tolist() == [1] * 5 + [0, 1] * 4
    assert trace.step.tolist() == [0] * 5 + [1, 1, 2, 2, 3, 3, 4, 4]
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 8
    assert set(trace.generation) == {1}
    assert np.array_equal(trace.score[5:, 1], predicted) and not trace.score[:5].any()
    assert trace.scored.tolist() == [[False, False]] * 5 + [[False, True]] * 8
    assert np.array_equal(trace.skip[5:], np.stack([predicted, predicted // 2], axis=1)) and not trace.skip[:5].any()
    assert [file.name for file in path.parent.iterdir()] == ["run.npz"]
    with np.load(path, allow_pickle=False) as archive:  # an ordinary npz file
        assert (archive["version"], archive["kind"], archive["width"]) == (1, "neuron", 11)
        assert archive["live"].shape == (13, 2, 2)


def test_scores_only_if_they_are_wanted_and_nothing_at_all(path):
    recorder, _, _ = recorded(scores=False)
    recorder.write(path)
    trace = read_trace(path)
    assert (trace.score, trace.scored, trace.skip) == (None, None, None)
    recorder = Recorder()
    with pytest.raises(UsageError, match="nothing was recorded"):
        recorder.write(path)
    recorder.open(HEAD, scores=True)
    recorder.write(path)
    trace = read_trace(path)
    assert trace.live.shape == (0, 2, 2) and trace.costs is None


def test_what_did_not_pass_every_layer_is_forgotten(path):
    recorder, live, _ = recorded()
    recorder.begin(np.array([9]), np.array([0]), DECODE)
    recorder.add(0, live[:1, 0], BUCKETS[0])
    recorder.start()
    recorder.add(1, live[:1, 1], BUCKETS[1])  # nothing was begun
    add(recorder, [0], [0], DECODE, live[:1])
    recorder.write(path)
    assert read_trace(path).token_pos.tolist()[-2:] == [6, 0] and read_trace(path).generation.tolist()[-2:] == [1, 2]


def test_memory_is_bounded(caplog):
    recorder, live = Recorder(most_bytes=100), np.ones((1, 2, 11), np.bool_)
    recorder.open(HEAD, scores=False)
    for i in range(50):
        add(recorder, [i], [0], DECODE, live)
    assert 5 < recorder.tokens < 30
    assert [record.message for record in caplog.records] == [
        f"the record is full after {recorder.tokens} tokens: what comes now is not in it"
    ]


def test_a_recorder_is_of_one_engine():
    recorder, _, _ = recorded()
    recorder.open(HEAD, scores=True)
    with pytest.raises(UsageError, match="take a new one"):
        recorder.open(Head(fingerprint=OWNER, layers=2, width=11, settings={"lead": 2}), scores=True)


def refusal(path, fingerprint=OWNER) -> str:
    with pytest.raises(MismatchError) as caught:
        read_trace(path, fingerprint)
    assert str(caught.value).isprintable() and caught.value.exit_code == 5
    return str(caught.value)


DAMAGE = {
    "version": (2, "has version 2, this program reads 1"),
    "kind": ("expert", "kind must be neuron"),
    "layers": (0, "layers must be an integer from 1"),
    "width": ("wide", "width must be an integer"),
    "tokens": (12, "token_pos must be int32 (12,)"),
    "token_pos": (np.zeros(13, np.int64), "token_pos must"),
    "live": (np.zeros((13, 2, 3), np.uint8), "live must"),
    "resident": (np.zeros((13, 2, 2), np.int8), "resident must be uint8"),
    "score": (np.zeros((13, 11, 2), np.uint8), "score must be uint8"),
    "scored": (None, "scored must"),
    "skip": (np.zeros((13, 11, 2), np.uint8), "skip must be uint8"),
    "phase": (None, "phase must"),
    "settings": ("[" * 9999, "not an activation trace"),
    "costs": ('"x"', "settings and costs must be JSON objects"),
    "fingerprint": ("cd" * 32, "was recorded from the model cdcdcdcdcdcd, this one is abababababab"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line(path, name):
    value, words = DAMAGE[name]
    recorded()[0].write(path)
    with np.load(path) as archive:
        members = {key: archive[key] for key in archive}
    np.savez(path, **{k: v for k, v in (members | {name: value}).items() if v is not None})
    assert words in refusal(path)


def test_what_is_no_trace_is_refused(path, tmp_path):
    recorded()[0].write(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:cut])
        assert "not an activation trace" in refusal(path)
    path.write_bytes(whole[:300] + bytes(40) + whole[340:])
    refusal(path)
    np.savez(path, version=np.array({"a": 1}, object))
    assert "not an activation trace" in refusal(path)
    path.write_text(json.dumps({}))
    refusal(path)
    with pytest.raises(StorageError, match="no trace"):
        read_trace(tmp_path / "nowhere.npz")
    with pytest.raises(StorageError):
        recorded()[0].write(tmp_path / "nowhere" / "run.npz")
