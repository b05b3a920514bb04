"""The timeline file, and the thread that finds out when programs ended."""

import gc
import json
import threading
import time
import weakref

import pytest

from dynajax.errors import StorageError
from dynajax.timeline import Lanes, Timeline


def test_the_file_is_a_chrome_trace(tmp_path):
    timeline = Timeline()
    timeline.add("copy", "gather 1", 10.5, 10.75)
    timeline.add("device", "attend 0", 10.0, 10.25)
    timeline.add("elsewhere", "x", 11.0, 11.0)
    timeline.write(tmp_path / "t.json")
    told = json.loads((tmp_path / "t.json").read_text())
    assert set(told) == {"traceEvents", "displayTimeUnit"}
    names = {e["tid"]: e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in told["traceEvents"] if e["name"] == "thread_sort_index"}
    assert sorted(names.values(), key=lambda lane: order[{v: k for k, v in names.items()}[lane]]) == [
        "device", "host", "copy", "elsewhere",
    ]  # fmt: skip
    spans = [e for e in told["traceEvents"] if e["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("device", "attend 0", 0.0, 250_000.0),
        ("copy", "gather 1", 500_000.0, 250_000.0),
        ("elsewhere", "x", 1_000_000.0, 0.0),
    ]
    assert {e["pid"] for e in told["traceEvents"]} == {1}
    Timeline().write(tmp_path / "empty.json")
    assert not [e for e in json.loads((tmp_path / "empty.json").read_text())["traceEvents"] if e["ph"] == "X"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match="t.json"):
        Timeline().write(tmp_path / "nowhere" / "t.json")


def test_every_thread_may_add_until_it_is_full(caplog):
    timeline = Timeline(most=600)

    def add(lane: str) -> None:
        for i in range(400):
            timeline.add(lane, "x", float(i), float(i))

    threads = [threading.Thread(target=add, args=(lane,)) for lane in ("host", "copy")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = timeline.spans()
    assert 600 <= len(spans) <= 601 and [s[2] for s in spans] == sorted(s[2] for s in spans)
    assert [record.message for record in caplog.records] == [
        "the timeline is full after 600 spans: what comes now is not in it"
    ]


class Output:
    """Ready when told so; or donated."""

    def __init__(self, donated: bool = False):
        self.ready, self.donated = threading.Event(), donated

    def block_until_ready(self):
        assert self.ready.wait(5)
        if self.donated:
            raise RuntimeError("Array has been deleted")
        return self


def test_a_program_runs_from_its_dispatch_or_from_the_end_of_the_one_before():
    timeline = Timeline()
    lanes, outputs = Lanes(timeline), [Output(), Output(), Output(donated=True), Output()]
    begins = []
    for i, output in enumerate(outputs):
        begins.append(time.perf_counter())
        lanes.device(f"p{i}", begins[-1], output)
    for output in outputs:
        time.sleep(0.02)
        output.ready.set()
    lanes.settle()
    (_, _, begin, end), (_, _, begin1, end1), (lane, name, begin2, end2) = timeline.spans()
    assert begin == begins[0] and begin1 == end and begin2 == end1  # all were dispatched at once
    assert end - begin > 0.015 and end1 - begin1 > 0.015 and end2 - begin2 > 0.03
    assert (lane, name) == ("device", "p2, p3")
    begin = time.perf_counter()
    lanes.device("late", begin, outputs[0])
    lanes.host("cold 0", begin)
    lanes.close()
    assert {s[:3] for s in timeline.spans()[-2:]} == {("device", "late", begin), ("host", "cold 0", begin)}
    assert not lanes._thread.is_alive()


def test_nothing_is_held_once_it_was_seen():
    lanes, output = Lanes(Timeline()), Output()
    output.ready.set()
    seen = weakref.ref(output)
    lanes.device("p", 0.0, output)
    del output
    lanes.settle()
    gc.collect()
    assert seen() is None
    lanes.close()
