"""Routing traces: round trip, what is forgotten, where experts were, bounds of memory, damage, who may be recorded."""

from dataclasses import replace

import numpy as np
import pytest

from dynajax.errors import MismatchError, StorageError, UsageError
from dynajax.routing_trace import RoutingHead, RoutingRecord, counted, read_routing, trace_kind
from dynajax.trace import DECODE, PREFILL, Head, Recorder, read_trace

OWNER = "ab" * 32
HEAD = RoutingHead(fingerprint=OWNER, unit_layers=(1, 3), width=11, top_k=3, settings={"policy": "scan"})
START = [np.array([3, 10], np.int32), np.array([0], np.int32)]


def drawn(seed: int, tokens: int, head: RoutingHead = HEAD) -> np.ndarray:
    """[T, M, K] distinct experts."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, head.layers, head.width)), axis=2)[:, :, : head.top_k]


def recorded(head: RoutingHead = HEAD, *, predicts: bool = False) -> tuple[Recorder, np.ndarray]:
    """A prompt of 5 tokens and 4 steps of 2 rows -> recorder, experts [13, 2, 3]. In layer 1 expert 7 takes slot 0
    while step 2 runs, and is there in step 3."""
    experts, recorder = drawn(0, 13, head), Recorder()
    record = recorder.take(RoutingRecord(head, predicts=predicts, frequency=np.full((2, head.width), 0.25)))
    for layer in range(2):
        record.place(layer, START[layer])
    record.start()
    record.begin(np.arange(5), np.ones(5, np.int64), PREFILL)
    for layer in range(2):
        record.add(layer, experts[:5, layer])
    for i in range(4):
        record.begin(np.array([5 + i, 3 + i]), np.array([0, 1]), DECODE)
        for layer in range(2):
            bucket = START[layer].copy()
            if layer == 1:
                bucket[0] = {0: 0, 1: -1}.get(i, 7)
            record.place(layer, bucket)
            if layer == 0:
                record.foretell(1, experts[5 + 2 * i : 7 + 2 * i, 1][:, ::-1])
            record.add(layer, experts[5 + 2 * i : 7 + 2 * i, layer])
    record.costs = {"t0_s": 0.1}
    return recorder, experts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.npz"


def test_round_trip(path):
    recorder, experts = recorded(predicts=True)
    recorder.write(path)
    trace = read_routing(path, OWNER)
    assert trace.head == HEAD and trace.costs == {"t0_s": 0.1} and recorder.tokens == 13 and trace.steps == 5
    assert np.array_equal(trace.experts, experts) and trace.experts.dtype == np.uint8
    assert trace.token_pos.tolist() == [0, 1, 2, 3, 4, 5, 3, 6, 4, 7, 5, 8, 6]
    assert trace.row.tolist() == [1] * 5 + [0, 1] * 4
    assert trace.step.tolist() == [0] * 5 + [1, 1, 2, 2, 3, 3, 4, 4]
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 8 and set(trace.generation) == {1}
    assert np.array_equal(trace.predicted[5:, 1], experts[5:, 1][:, ::-1])
    assert (trace.predicted[:, 0] == 11).all() and (trace.predicted[:5] == 11).all()
    assert trace.frequency.shape == (2, 11) and trace.weights is None
    assert trace_kind(path) == "expert"
    with np.load(path, allow_pickle=False) as archive:  # an ordinary npz file
        assert (archive["version"], archive["kind"], archive["top_k"]) == (1, "expert", 3)


def test_workload_and_what_was_foretold(path):
    recorder, experts = recorded(predicts=True)
    recorder.write(path)
    trace = read_routing(path)
    workload = trace.workload()
    assert workload.shape == (5, 2, 11) and (workload.sum(axis=2).T == [15, 6, 6, 6, 6]).all()
    for step in range(5):
        for layer in range(2):
            mine = experts[trace.step == step, layer]
            assert workload[step, layer].tolist() == np.bincount(mine.ravel(), minlength=11).tolist()
    assert np.array_equal(trace.foretold()[1:, 1], workload[1:, 1]) and not trace.foretold()[:, 0].any()
    assert counted(np.array([[[3, 11]]]), np.zeros(1, np.int32), 1, 11).sum() == 1


def test_where_experts_were(path):
    recorder, _ = recorded()
    recorder.write(path)
    trace = read_routing(path)
    assert trace.moves.tolist() == [[2, 1, 0, -1], [3, 1, 0, 7]] and trace.slots.tolist() == [2, 1]
    assert trace.start.tolist() == [[3, 10], [0, -1]]
    assert [np.flatnonzero(row).tolist() for row in trace.resident_of(0)] == [[3, 10]] * 5
    assert [np.flatnonzero(row).tolist() for row in trace.resident_of(1)] == [[0], [0], [], [7], [7]]


def test_more_experts_take_two_bytes(path):
    recorder, experts = recorded(replace(HEAD, width=300))
    recorder.write(path)
    trace = read_routing(path)
    assert trace.experts.dtype == np.uint16 and np.array_equal(trace.experts, experts) and experts.max() > 255


def test_what_did_not_pass_every_layer_is_forgotten(path):
    recorder, experts = recorded()
    record = recorder.taken
    record.begin(np.array([9]), np.array([0]), DECODE)
    record.add(0, experts[:1, 0])
    record.place(1, np.array([5], np.int32))
    recorder.start()
    record.add(1, experts[:1, 1])  # nothing was begun
    record.begin(np.array([0]), np.array([0]), DECODE)
    for layer in range(2):
        record.add(layer, experts[:1, layer])
    recorder.write(path)
    trace = read_routing(path)
    assert trace.token_pos.tolist()[-2:] == [6, 0] and trace.generation.tolist()[-2:] == [1, 2]
    assert np.flatnonzero(trace.resident_of(1)[5]).tolist() == [5]


def test_memory_is_bounded(caplog):
    record = RoutingRecord(HEAD, most_bytes=100)
    for i in range(50):
        record.begin(np.array([i]), np.array([0]), DECODE)
        for layer in range(2):
            record.add(layer, drawn(i, 1)[:, layer])
    assert record.tokens == 17  # 6 bytes each
    assert [entry.message for entry in caplog.records] == [
        "the record is full after 17 tokens: what comes now is not in it"
    ]


def test_a_recorder_is_of_one_engine(path):
    recorder, _ = recorded()
    assert recorder.take(RoutingRecord(HEAD)) is recorder.taken  # goes on
    with pytest.raises(UsageError, match="take a new one"):
        recorder.take(RoutingRecord(replace(HEAD, settings={"policy": "lru"})))
    neurons = Head(fingerprint=OWNER, layers=2, width=11, settings={})
    with pytest.raises(UsageError, match="take a new one"):
        recorder.open(neurons, scores=False)
    other = Recorder()
    other.open(neurons, scores=False)
    with pytest.raises(UsageError, match="take a new one"):
        other.take(RoutingRecord(HEAD))
    other.write(path)
    assert trace_kind(path) == "neuron" and read_trace(path).head == neurons


def test_a_pool_that_was_never_told_of(path):
    recorder = Recorder()
    recorder.take(RoutingRecord(HEAD))
    recorder.write(path)
    trace = read_routing(path)
    assert trace.experts.shape == (0, 2, 3) and trace.steps == 0 and trace.resident_of(0) is None
    assert trace.workload().shape == (0, 2, 11) and trace.costs is None


def refusal(path, fingerprint=OWNER) -> str:
    with pytest.raises(MismatchError) as caught:
        read_routing(path, fingerprint)
    assert str(caught.value).isprintable() and caught.value.exit_code == 5
    return str(caught.value)


TWICE = np.tile(np.array([4, 4, 5], np.uint8), (13, 2, 1))
DAMAGE = {
    "version": (2, "has version 2, this program reads 1"),
    "kind": ("neuron", "kind must be expert"),
    "layers": (3, "unit_layers must"),
    "unit_layers": (np.array([3, 1], np.int32), "unit_layers must rise"),
    "width": (0, "width must be an integer from 1"),
    "top_k": (12, "top_k must be an integer from 1 to 11"),
    "tokens": (12, "phase must be uint8 (12,)"),
    "token_pos": (np.full(13, -1, np.int32), "token_pos must be 0 or more"),
    "step": (np.arange(13, dtype=np.int32)[::-1].copy(), "step must rise from 0"),
    "phase": (np.full(13, 2, np.uint8), "phase must be 0 or 1"),
    "experts": (np.full((13, 2, 3), 11, np.uint8), "experts must be below 11, got 11"),
    "predicted": (np.full((13, 2, 3), 12, np.uint8), "predicted must be below 12"),
    "weights": (np.zeros((13, 2, 3), np.float32), "weights must"),
    "frequency": (np.zeros((2, 10), np.float32), "frequency must"),
    "slots": (np.array([2, -1], np.int32), "slots must be from 0"),
    "start": (np.array([[3, 11], [0, -1]], np.int32), "start must name experts below 11"),
    "move_count": (1, "moves must"),
    "moves": (np.array([[2, 1, 1, 3], [3, 1, 0, 7]], np.int32), "moves must name slots that a layer has"),
    "settings": ("[" * 9999, "not a routing trace"),
    "costs": ('"x"', "settings and costs must be JSON objects"),
    "fingerprint": ("cd" * 32, "was recorded from the model cdcdcdcdcdcd, this one is abababababab"),
}


def damaged(path, **changes) -> None:
    recorded(predicts=True)[0].write(path)
    with np.load(path) as archive:
        members = {key: archive[key] for key in archive}
    np.savez(path, **(members | changes))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line(path, name):
    value, words = DAMAGE[name]
    damaged(path, **{name: value})
    assert words in refusal(path)


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        ([[5, 1, 0, 3], [5, 1, 0, 7]], "step from 0 to 4"),
        ([[0, 2, 0, 3], [0, 1, 0, 7]], "layer from 0 to 1"),
        ([[0, 1, 0, 11], [0, 1, 0, 7]], "expert from -1 to 10"),
        ([[3, 1, 0, 3], [0, 1, 0, 7]], "order of steps"),
    ],
)
def test_moves_that_cannot_be(path, moves, words):
    damaged(path, moves=np.array(moves, np.int32))
    assert words in refusal(path)


def test_a_token_goes_to_an_expert_once(path):
    damaged(path, experts=TWICE)
    assert "distinct" in refusal(path)


def test_what_is_no_trace_is_refused(path, tmp_path):
    recorded()[0].write(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:cut])
        assert "not a routing trace" in refusal(path)
    np.savez(path, version=np.array({"a": 1}, object))
    assert "not a routing trace" in refusal(path)
    with pytest.raises(StorageError, match="no trace"):
        read_routing(tmp_path / "nowhere.npz")
    with pytest.raises(StorageError):
        recorded()[0].write(tmp_path / "nowhere" / "run.npz")
