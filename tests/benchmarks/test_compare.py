"""Two results: which figures changed beyond their spread, and which files are refused."""

import json
from pathlib import Path

import pytest

from benchmarks.compare import Figure, main, verdict_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def engine_row(name="dynajax:exact:float16", best_ms=10.0, median_ms=11.0, prompt_ms=(500.0, 520.0), **changes):
    return {
        "name": name, "engine": "dynajax", "model": "m", "policy": "static", "dtype": "float16", "threads": 2,
        "batch": 1, "prompt_tokens": 64, "new_tokens": 16, "decode_tok_s": 1e3 / median_ms,
        "prefill_tok_s": 64e3 / prompt_ms[1],
        "spread": {"best_step_s": best_ms / 1e3, "best_prefill_s": prompt_ms[0] / 1e3}, **changes,
    }  # fmt: skip


def kernel_row(ffn=(100.0, 110.0), read=(70.0, 72.0)):
    rates = {name: {"min_us": best, "median_us": median} for name, (best, median) in (("ffn", ffn), ("read", read))}
    return {"dtype": "int8", "threads": 1, **rates}


@pytest.fixture
def compared(tmp_path, capsys):
    """compared(old rows, new rows, flags): the exit code, the lines and what went to stderr."""

    def run(old, new, *flags, **machine):
        for name, rows, facts in (("old", old, {}), ("new", new, machine)):
            told = {"machine": "epyc", "cpus": 2, "commit": name, "rows": rows, **facts}
            (tmp_path / f"{name}.json").write_text(json.dumps(told))
        code = main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *flags])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((10.0, 11.0), (10.9, 14.0), "same"),  # the new best is as good as the old median
        ((10.0, 11.0), (11.1, 12.0), "slower"),
        ((11.1, 12.0), (10.0, 11.0), "faster"),
        ((10.0, 11.0), (9.0, 10.5), "same"),  # the new median is not
        ((10.0, 10.0), (10.19, 10.2), "same"),  # less than two percent
        ((10.0, 10.0), (10.21, 10.3), "slower"),
    ],
)
def test_what_is_a_change(old, new, verdict):
    old, new = (Figure(best=best, median=median, unit="ms") for best, median in (old, new))
    assert verdict_of("decode step", old, new, 0.02) == verdict
    assert verdict_of("read", old, new, 0.02) == ("same" if verdict == "same" else "machine")


def test_counts_of_instructions_have_no_spread():
    old, more, as_good = (Figure(best=n, median=n, unit="") for n in (1e6, 1.002e6, 1.0005e6))
    assert verdict_of("instructions", old, more, 0.02) == "slower"
    assert verdict_of("instructions", old, as_good, 0.02) == "same"


def test_nothing_changed(compared):
    code, lines, _ = compared([engine_row(), kernel_row()], [engine_row(), kernel_row()])
    assert (code, lines) == (0, ["old -> new: 0 slower, 0 faster, 4 same"])


def test_a_line_a_change_and_the_exit_code(compared):
    old = [engine_row(), engine_row(name="llama.cpp:F16"), kernel_row()]
    new = [engine_row("llama.cpp:F16", 12.0, 13.0), engine_row(prompt_ms=(400.0, 410.0)), kernel_row(read=(90, 95))]
    code, lines, _ = compared(old, new, "--json")
    assert code == 1
    name = "dynajax:exact:float16 model=m dtype=float16 threads=2 batch=1 prompt_tokens=64 new_tokens=16"
    assert lines[0].startswith(f"faster  {name} prompt: best 500 -> 400 ms (-20.0%)")
    assert lines[1].startswith("slower  llama.cpp:F16") and "best 10 -> 12 ms (+20.0%)" in lines[1]
    assert lines[2].startswith("machine dtype=int8 threads=1 read")
    assert lines[3] == "old -> new: 1 slower, 1 faster, 3 same"
    told = json.loads(lines[4])
    assert (told["slower"], told["faster"], len(told["figures"]), told["alone"]) == (1, 1, 6, [])


def test_only_faster_ends_well(compared):
    assert compared([engine_row()], [engine_row(best_ms=5.0, median_ms=6.0)])[0] == 0


def test_rows_are_matched_by_what_they_are(compared):
    code, lines, _ = compared([engine_row(), engine_row(threads=1)], [engine_row(), engine_row(threads=4)])
    assert code == 0 and [line.split()[0] for line in lines] == ["alone", "alone", "old"]
    code, lines, _ = compared([engine_row(policy="dynamic")], [engine_row(policy="static", budget="auto")])
    assert (code, len(lines)) == (0, 1), "a policy that was given up, and a key that the old file had not"


@pytest.mark.parametrize(
    ("new", "machine", "words"),
    [
        ([engine_row()], {"cpus": 4}, "these are different machines (cpus 2 and 4): say --any-machine"),
        ([engine_row(threads=9)], {}, "the files have no row in common"),
        ([engine_row(), engine_row()], {}, "two rows are 'dynajax:exact:float16"),
    ],
)
def test_files_that_cannot_be_compared(compared, new, machine, words):
    code, lines, err = compared([engine_row()], new, **machine)
    assert (code, lines, err.count("\n")) == (2, [], 1) and words in err


def test_another_machine_on_demand(compared):
    assert compared([engine_row()], [engine_row()], "--any-machine", cpus=4)[0] == 0


def test_files_that_are_none(tmp_path, capsys):
    (tmp_path / "text").write_text("nothing")
    for path, words in ((tmp_path / "text", "holds no result with rows"), (tmp_path / "gone", "cannot read")):
        assert main([str(path), str(path)]) == 2
        assert words in capsys.readouterr().err


def test_what_was_printed_with_the_object_last(tmp_path, capsys):
    told = json.dumps({"commit": "a", "rows": [engine_row()]})
    (tmp_path / "log").write_text(f"| a table |\n{told}\n")
    assert main([str(tmp_path / "log"), str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out == "a -> a: 0 slower, 0 faster, 2 same\n"


@pytest.mark.parametrize("name", ["kernel", "side_by_side", "simulator"])
def test_committed_results_compare_with_themselves(name, capsys):
    (path, *_) = RESULTS.glob(f"{name}-*.json")
    assert main([str(path), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["same"] > 5
