"""Instructions of the kernels, as callgrind counts them."""

import json
import shutil

import pytest

from benchmarks import instructions
from benchmarks.instructions import Unavailable, main, rows_of

FILE = "# callgrind format\nversion: 1\npart: 2\n\nevents: Ir\nsummary: {}\n\n\nob=(1) here\n0 5\n\ntotals: {}\n"


def test_the_total_of_a_file():
    assert instructions.instructions(FILE.format(123456, 123456)) == 123456
    assert instructions.instructions("# nothing was counted") == 0


def test_a_row_a_call():
    rows = rows_of([10, 20, 30, 40], ["int8", "int4"])
    assert [(row["dtype"], row["kernel"], row["instructions"]) for row in rows] == [
        ("int8", "ffn", 10), ("int8", "gather", 20), ("int4", "ffn", 30), ("int4", "gather", 40),
    ]  # fmt: skip
    with pytest.raises(Unavailable, match="callgrind told of 1 calls, 2 were made"):
        rows_of([10], ["int8"])


def test_a_machine_without_valgrind(monkeypatch, capsys):
    monkeypatch.setattr(instructions, "prepare", lambda *_: None)
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert main(["--dtypes", "int8"]) == 2
    assert capsys.readouterr().err == "error: valgrind is not there: install it (on Debian: apt install valgrind)\n"


@pytest.mark.slow
def test_two_runs_count_the_same(capsys):
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not there")
    counts = []
    for _ in range(2):
        assert main(["--dtypes", "float32", "int8", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        counts.append([row["instructions"] for row in rows])
    weights = instructions.NEURONS * instructions.PARTS * instructions.WIDTH
    assert counts[0] == pytest.approx(counts[1], rel=1e-3)
    assert all(weights / 16 < count < 4 * weights for count in counts[0])
