"""Transfers hide behind the host's work: shares of overlap, whatever the machine's speed."""

import time
from itertools import pairwise

import pytest

from dynajax.engine.cold import ColdSide
from dynajax.staging import Plain
from dynajax.timeline import Timeline
from tests.engine.cases import PROMPT
from tests.engine.planned_cases import opened

LAYERS, NEW, SLEEP_S = 3, 12, 5e-3
ONE_SWAP = {"swap_rule": "paper", "window_units": 1}


def slow(patch, owner, name: str) -> None:
    """The method takes 5 ms longer, without the GIL."""
    quick = getattr(owner, name)

    def method(*args, **kwargs):
        time.sleep(SLEEP_S)
        return quick(*args, **kwargs)

    patch.setattr(owner, name, method)


def spans_of(folder, patch, lead: int) -> list[tuple]:
    """(lane, name, begin, end) of decoding with slow transfers and a slow host, every plan waited for."""
    settings = {"policy": "dynamic", "sparsity": "exact", "staging": "plain", "set": ONE_SWAP | {"lead": lead}}
    timeline = Timeline()
    with opened(folder, **settings) as engine:
        slow(patch, Plain, "send")
        slow(patch, ColdSide, "run_chosen")
        engine.trace(timeline)
        engine.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        engine.trace(None)
        patch.undo()
    spans = timeline.spans()
    first = [span for span in spans if span[0] == "host"][-NEW * LAYERS][2]  # what lies before is the prompt's
    return [span for span in spans if span[3] > first]


def overlap_s(one: tuple, other: tuple) -> float:
    return max(0.0, min(one[3], other[3]) - max(one[2], other[2]))


def shares(spans: list[tuple]) -> dict[str, float]:
    """Which part of a transfer lies beside the host's work on the layer before, on its own layer, on any layer."""
    host = [span for span in spans if span[0] == "host"]
    moved = [span for span in spans if span[1].startswith("transfer")]
    assert len(host) == NEW * LAYERS and len(moved) > NEW
    total, found = sum(end - begin for *_, begin, end in moved), dict.fromkeys(("before", "own", "any"), 0.0)
    for span in moved:
        layer = int(span[1].split()[1])
        for other in host:
            common, at = overlap_s(span, other), int(other[1].split()[1])
            found["any"] += common
            found["own"] += common * (at == layer)
            found["before"] += common * (at == (layer - 1) % LAYERS)
    return {name: seconds / total for name, seconds in found.items()}


def test_transfers_lie_beside_the_host_work_of_the_layer_before(models, monkeypatch):
    spans = spans_of(models["relu"], monkeypatch, lead=1)
    found = shares(spans)
    assert found["before"] >= 0.5 and found["own"] < 0.2, found
    lengths = [end - begin for lane, name, begin, end in spans if lane == "host" or name.startswith("transfer")]
    assert min(lengths) >= 0.9 * SLEEP_S  # that was slow which was meant to be


def test_without_a_lead_nothing_overlaps(models, monkeypatch):
    """The check above can fail: here a plan is asked for just before it is waited for."""
    spans = spans_of(models["relu"], monkeypatch, lead=0)
    found = shares(spans)
    assert found["any"] < 0.1, found
    with pytest.raises(AssertionError):
        assert found["before"] >= 0.5


def test_spans_of_a_lane_never_overlap(models, monkeypatch):
    """What each does it does in order, and a gather comes before its transfer."""
    spans = spans_of(models["relu"], monkeypatch, lead=1)
    assert {lane for lane, *_ in spans} == {"device", "host", "copy"}
    for lane in ("device", "host", "copy"):
        mine = [span for span in spans if span[0] == lane]
        assert all(begin <= end for *_, begin, end in mine)
        assert all(first[3] <= second[2] + 1e-6 for first, second in pairwise(mine)), lane
    names = [name.split()[0] for lane, name, *_ in spans if lane == "copy"]
    names = names[names.index("gather") :]
    assert names == ["gather", "transfer"] * (len(names) // 2) and len(names) > NEW
