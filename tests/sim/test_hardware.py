"""Hardware files: the shipped ones, what is read back, and what is refused."""

import json

import pytest

from dynajax.errors import StorageError, UsageError
from dynajax.sim.hardware import NAMED, Program, load_hardware
from tests.sim.cases import machine


@pytest.mark.parametrize("name", NAMED)
def test_shipped_machines(name):
    hardware = load_hardware(name)
    assert hardware.name == name and not hardware.shared and "not measured" in hardware.source.lower()
    fitted = name != "dali-pc"  # of whose rivals no speed is published
    assert (hardware.for_system("powerinfer").sync_s != hardware.sync_s) == fitted
    assert (hardware.for_system("transformers").reserved_bytes > hardware.reserved_bytes) == fitted
    assert hardware.for_system("ours") == hardware.for_system("nobody")


def test_a_file_is_read_back(tmp_path):
    programs = {"attend": Program(sizes=(0.0, 100.0, 300.0), seconds=(1.0, 3.0, 4.0))}
    hardware = machine(programs=programs, systems={"powerinfer": {"sync_s": 1.0}})
    (tmp_path / "here.json").write_text(json.dumps(hardware.to_json()))
    assert load_hardware(str(tmp_path / "here.json")) == hardware
    assert hardware.program("attend") == programs["attend"]
    assert hardware.program("hot") == Program.plain(hardware.launch_s, hardware.device_bps)


def test_programs_take_what_lies_between_their_points():
    program = Program(sizes=(10.0, 110.0, 310.0), seconds=(1.0, 3.0, 4.0))
    assert [program.at(size) for size in (0, 10, 60, 110, 210, 310, 510)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert Program.plain(2.0, 50.0).at(100) == 4.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 1"),
        ({"link_bps": 0}, "link_bps must be a number > 0"),
        ({"link_bps": True}, "link_bps"),
        ({"cores": 1.5}, "cores must be an integer"),
        ({"cores": 0}, "needs a core"),
        ({"reserved_bytes": 10**6}, "more device memory than is reserved"),
        ({"cpu_bps": {}}, "at least one type"),
        ({"cpu_bps": {"float32": -1}}, "cpu_bps of float32"),
        ({"systems": {"x": {"speed": 1}}}, "known figures"),
        ({"programs": {"tail": {"sizes": [0, 1], "seconds": [1, 1]}}}, "attend, score, rank, hot, head"),
        ({"programs": {"hot": {"sizes": [0, 1]}}}, "lacks figures"),
        ({"programs": {"hot": {"sizes": [0, 1], "seconds": [2, 1]}}}, "must not fall"),
        ({"programs": {"hot": {"sizes": [1, 1], "seconds": [2, 2]}}}, "must rise"),
        ({"programs": {"hot": {"sizes": [1], "seconds": [2]}}}, "two points"),
        ({"programs": {"hot": {"sizes": [0, 1], "seconds": [0, 2]}}}, "seconds must be"),
        ({"programs": 3}, "lacks figures"),
        ({"speed": 1.0}, "not known: speed"),
        ({"t0_s": None}, "lacks figures: t0_s"),
    ],
)
def test_what_is_refused(tmp_path, changes, words):
    values = {key: value for key, value in (machine().to_json() | changes).items() if value is not None}
    (path := tmp_path / "bad.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=words) as caught:
        load_hardware(str(path))
    assert "bad.json" in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="pc-high, pc-low"):
        load_hardware("pc-hihg")
    with pytest.raises(StorageError):
        load_hardware(str(tmp_path))
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text"):
        load_hardware(str(tmp_path / "x"))
    (tmp_path / "y").write_text("[")
    with pytest.raises(UsageError, match="no hardware file"):
        load_hardware(str(tmp_path / "y"))


def test_a_type_without_a_rate_is_named():
    with pytest.raises(UsageError, match="no host rate for int4, only for float32"):
        machine().host_rate("int4")
