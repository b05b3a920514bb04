"""docs/results.md: what is committed is what the generator gives, and the generator says what it must."""

import json
from importlib.util import find_spec

import pytest

from benchmarks import results_page
from benchmarks.results_page import PAGE, PLOTS, SECTIONS, NoResult, Run, losses, main, page, read_runs


def engine_row(name, dtype, prompt=100.0, decode=20.0, gib=2.0, ready_s=1.0, **changes):
    engine = name.split(":")[0]
    return {
        "name": name, "engine": engine, "model": "m", "sparsity": "dense", "dtype": dtype, "best_prefill_tok_s": prompt,
        "prefill_tok_s": prompt, "best_tok_s": decode, "decode_tok_s": decode, "peak_rss_bytes": int(gib * 2**30),
        "load_s": ready_s, "compile_s": 0.0, "share_of_floor": 0.5, "cpu_share": None, "hot_share": 1.0,
        "agreement": 1.0, "prompt_tokens": 8, "new_tokens": 4, "batch": 1, "threads": 2, **changes,
    }  # fmt: skip


def side_by_side(*rows, **told):
    return Run(
        "side_by_side-here-2026-12-01", {"machine": "epyc", "cores": 2, "commit": "abc", "rows": list(rows), **told}
    )


def test_the_committed_page_is_what_the_generator_gives():
    assert PAGE.read_text(encoding="utf-8") == page(read_runs()), "run python -m benchmarks.results_page"


def test_every_plot_is_there_and_no_other():
    drawn = {f"{run.name}.svg" for run in read_runs() if run.kind in SECTIONS and SECTIONS[run.kind].drawn}
    assert {path.name for path in PLOTS.iterdir()} == drawn, "run python -m benchmarks.results_page"
    assert all((PLOTS / name).stat().st_size < 2**16 for name in drawn)


def test_another_result_changes_the_page():
    runs = read_runs()
    run = next(run for run in runs if run.kind == "kernel")
    told = json.loads(json.dumps(run.told))
    told["rows"][0]["ffn"]["median_gb_s"] += 0.1
    assert page([Run(run.name, told) if one is run else one for one in runs]) != page(runs)


def test_losses_are_against_the_best_of_ours_with_as_many_bits():
    rival = engine_row("llama.cpp:F16", "F16", prompt=200.0, decode=30.0, gib=1.0)
    ours = engine_row("dynajax:dense:float16", "float16"), engine_row("dynajax:exact:float16", "float16", decode=31.0)
    assert list(losses(side_by_side(*ours, rival))) == [
        "- prompts, m: 100.0 tok/s (dynajax:dense:float16) against 200.0 tok/s (llama.cpp:F16), 0.50 times that",
        "- peak memory, m: 2.00 GiB (dynajax:dense:float16) against 1.00 GiB (llama.cpp:F16), 2.00 times that",
    ]
    guessed = engine_row("dynajax:predicted:float16", "float16", prompt=300.0, gib=0.5, sparsity="predicted")
    assert len(list(losses(side_by_side(*ours, guessed, rival)))) == 2, "its answers are others"
    fewer = engine_row("dynajax:exact:int4", "int4", prompt=300.0, gib=0.5)
    assert len(list(losses(side_by_side(*ours, fewer, rival)))) == 2, "it has fewer bits"
    assert list(losses(side_by_side(ours[0], engine_row("llama.cpp:Q4_0", "Q4_0", prompt=900.0)))) == []


def test_losses_come_first_and_places_are_kept_apart():
    rows = engine_row("dynajax:dense:float16", "float16"), engine_row("llama.cpp:F16", "F16", prompt=200.0)
    here, there = side_by_side(*rows), Run("bench-h200-2026-12-01", {**side_by_side(*rows).told, "platform": "gpu"})
    text = page([there, here, Run("odd-2026", {"machine": "epyc"})])
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [
        "# Results", "## Where this engine loses", "## Measured on CPUs", "### Beside other engines",
        "## Measured on CUDA", "### Policies against each other", "## Simulated", "## Other runs",
    ]  # fmt: skip
    assert "- odd-2026: epyc; commit unknown" in text
    assert "Nothing yet" in page([here]) and "In nothing" in page([there])


def test_a_run_of_gpu_check():
    stages = [{"stage": "donation", "ok": True, "seconds": 3.0}, {"stage": "step", "ok": False, "seconds": 4.4}]
    run = Run("gpu_check-h200-2026-12-01", {"machine": "xeon", "platform": "gpu", "device": "H200", "stages": stages})
    text = page([run])
    assert "xeon, H200; commit unknown" in text and "| donation | ok | 3 |" in text and "| step | WRONG | 4 |" in text


def test_counts_of_instructions():
    counted = {"instructions": 789182, "instructions_per_weight": 1.0036}
    rows = [{"kernel": "ffn", "dtype": "int8", "isa": "avx2", **counted}]
    assert "| ffn | int8 | 789,182 | 1.004 |" in page([Run("instructions-here", {"machine": "epyc", "rows": rows})])


def test_files_that_are_no_result(tmp_path, monkeypatch, capsys):
    for text, words in (("{", "is no JSON"), ("{}", "does not name its machine")):
        (tmp_path / "kernel-x.json").write_text(text)
        with pytest.raises(NoResult, match=f"kernel-x.json {words}"):
            read_runs(tmp_path)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "results.md")
    assert main(["--no-plots"]) == 0
    assert (tmp_path / "results.md").read_text() == PAGE.read_text()
    monkeypatch.setattr(results_page, "PLOTS", tmp_path / "plots")
    if find_spec("matplotlib") is None:
        assert main([]) == 2
        assert capsys.readouterr().err.startswith("error: matplotlib is not installed: pip install dynajax[plot]")
    else:
        assert main([]) == 0
        assert {path.name for path in (tmp_path / "plots").iterdir()} == {path.name for path in PLOTS.iterdir()}
