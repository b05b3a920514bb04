"""Engines side by side: names, the protocol of the children, the figures of a row, and a whole run of our engine."""

import json
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks import make_checkpoint, side_by_side
from benchmarks.children import Setup, contender
from benchmarks.side_by_side import tokens_of
from benchmarks.to_gguf import convert
from dynajax.benching import rounds as benching
from dynajax.benching import session as ours
from dynajax.benching.children import Child, Contender
from dynajax.benching.rounds import ROW_KEYS, fit_together, measure, row_of
from dynajax.benching.worker import run_round
from dynajax.errors import UsageError

ECHO = """
from dynajax.benching.worker import Opened, serve
import numpy as np

class Session:
    def __init__(self, settings):
        self.settings, self.compiled = settings, 0.0
    def prefill(self, prompts):
        print("a library that prints")
        self.compiled += self.settings.get("compiles", 0.0)
        return np.eye(100)[[ids[-1] for ids in prompts]]
    def begin_steps(self):
        self.begun = True
    def step(self, ids):
        assert self.begun
        return np.eye(100)[ids]
    def facts(self):
        return {"compile_s": self.compiled, "hot_share": None, "floor_bytes": None}

serve(lambda settings: Opened(session=Session(settings), load_s=0.5, row={"version": "1"}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "tiny"
    make_checkpoint.main([str(folder), "--shape", "tiny", "--layers", "2"])
    return folder


@pytest.fixture
def setup(folder):
    spec = replace(make_checkpoint.SHAPES["tiny"], layers=2)
    return Setup(
        model=str(folder),
        folder=folder,
        spec=spec,
        prompt_tokens=12,
        new_tokens=4,
        batch=2,
        threads=1,
        budget="auto",
        gguf_files=str(folder / "{}.gguf"),
        llama_python=sys.executable,
        torch_python=sys.executable,
        powerinfer="",
        scratch=folder / "scratch",
        predictor="gate",
        constants=(),
    )


def echo(**settings):
    return Contender(name="echo", engine="echo", command=(sys.executable, "-c", ECHO), settings=settings, file_bytes=0)


class Band:
    """No bandwidth is looked for."""

    best_gb_s = 1.0

    def look(self):
        pass


# --- names ---


def test_names_become_processes(setup, folder):
    ours = contender("dynajax:exact:float16:none", setup)
    assert (ours.settings["sparsity"], ours.settings["dtype"], ours.settings["policy"]) == ("exact", "float16", "none")
    assert "predictor" not in ours.settings and ours.settings["ctx"] == 16
    assert contender("dynajax:predicted:float32", setup).settings["predictor"] == "gate"
    convert(folder, folder / "F16.gguf", "F16", speed_only=True)
    theirs = contender("llama.cpp:F16", setup)
    spec, tokens = setup.spec, 12 + 4 // 2
    norms = (2 * spec.layers + 1) * spec.hidden
    attention = spec.layers * (spec.block_parameters - 2 * spec.hidden)
    matrices = attention + 3 * spec.layers * spec.hidden * spec.ffn + spec.hidden * spec.vocab
    cached = 2 * spec.layers * spec.kv_heads * spec.head_dim * setup.batch * tokens  # numbers, of keys and values
    assert theirs.row["floor_bytes"] == 2 * matrices + 4 * norms + 2 * cached
    eager = contender("transformers:float32", setup)
    assert eager.row["floor_bytes"] == 4 * (matrices + norms + cached)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm:float16", "takes dynajax"),
        ("dynajax", "takes dynajax"),
        ("dynajax:dense", "takes dynajax"),
        ("dynajax:dense:float16:none:more", "takes dynajax"),
        ("llama.cpp:Q5_K", "takes dynajax"),
        ("transformers:int3", "takes dynajax"),
        ("accelerate:F16", "takes dynajax"),
        ("accelerate:float32", "give a size, --vram-budget 1GiB"),
        ("powerinfer", "takes dynajax"),
        ("powerinfer:F16", "powerinfer needs --powerinfer PATH"),
        ("dynajax:some:float16", "--sparsity"),
        ("dynajax:dense:float17", "--dtype"),
        ("llama.cpp:Q8_0", "python -m benchmarks.to_gguf"),
    ],
)
def test_names_that_mean_nothing(setup, name, words):
    with pytest.raises(UsageError, match=words):
        contender(name, setup)


def test_who_can_keeps_to_the_budget(setup, tmp_path):
    budget = replace(setup, budget="3MiB", powerinfer=str(tmp_path / "main"), gguf_files=str(tmp_path / "{}.gguf"))
    assert contender("dynajax:dense:float32", budget).settings["vram_budget"] == "3MiB"
    moved = contender("accelerate:float32", budget)
    assert moved.settings["budget_bytes"] == 3 * 2**20 and moved.row["budget"] == "3MiB"
    assert moved.settings["offload_folder"] == str(budget.scratch / "float32")
    assert contender("transformers:float32", budget).row["budget"] is None
    with pytest.raises(UsageError, match=f"no {tmp_path}/main"):
        contender("powerinfer:q4", replace(budget, batch=1))
    for name in ("main", "q4.gguf"):
        (tmp_path / name).write_bytes(b"")
    rival = contender("powerinfer:q4", replace(budget, batch=1))
    assert rival.settings["budget_bytes"] == 3 * 2**20 and "tokenizer" in rival.row["note"]
    with pytest.raises(UsageError, match="powerinfer runs one sequence, got --batch 2"):
        contender("powerinfer:q4", budget)


def test_tokens_are_the_same_for_all(setup):
    prompts, following = tokens_of(setup, setup.spec.vocab, 0)
    assert np.shape(prompts) == (2, 12) and np.shape(following) == (4, 2)
    assert (prompts, following) == tokens_of(setup, setup.spec.vocab, 0) != tokens_of(setup, setup.spec.vocab, 1)
    with pytest.raises(UsageError, match="more than 512 tokens, got 300"):
        tokens_of(setup, 300, 0)


# --- children ---


def test_a_round_of_a_child():
    with Child(echo()) as child:
        assert child.opened["load_s"] == 0.5 and child.opened["version"] == "1"
        found = child.round([[1, 2], [3, 4]], [[5, 6], [7, 8], [9, 10]])
    assert found["chosen"] == [[2, 4], [5, 6], [7, 8], [9, 10]]
    assert len(found["step_s"]) == 3 and min(found["step_s"]) > 0 and found["peak_rss_bytes"] > 2**20


def test_a_child_finds_the_modules_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with Child(echo()) as child:
        assert child.opened["version"] == "1"


def test_a_child_that_is_not_asked_stands_still():
    with Child(echo()) as child:
        stat = Path(f"/proc/{child._process.pid}/stat")
        deadline = time.monotonic() + 10
        while (state := stat.read_text().rsplit(")", 1)[1].split()[0]) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state == "T"
        child.round([[1]], [[2]])


def test_a_child_that_fails_is_named():
    with Child(echo()) as child, pytest.raises(RuntimeError, match="echo ended with code 1"):
        child.round([[1000]], [])


def test_an_engine_that_refuses_says_why_in_one_line(folder, capsys):
    argv = ["--model", str(folder), "--engines", "dynajax:dense:float32", "--vram-budget", "1KiB"]
    with pytest.raises(SystemExit, match="^error: dynajax:dense:float32: the part that must be on the device needs"):
        side_by_side.main(argv)


@pytest.mark.parametrize("together", [False, True])
def test_engines_take_turns(monkeypatch, together):
    monkeypatch.setattr(benching, "free_bytes", lambda: 2**30 if together else 0)
    ones = [replace(echo(), name=name, file_bytes=2**20) for name in ("a", "b")]
    assert fit_together(ones) == together
    told = []
    on_round = lambda turn, one, found: told.append((turn, one.name))  # noqa: E731
    found = measure(ones, ([[1, 2]], [[3]]), 2, Band(), on_round, together=together)
    assert [len(found[name]) for name in ("a", "b")] == [2, 2]
    assert told == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_what_compiles_while_it_is_measured_is_refused():
    with pytest.raises(RuntimeError, match="echo compiled in a counted round"):
        measure([echo(compiles=1.0)], ([[1]], [[2]]), 1, Band(), lambda *_: None, together=True)


# --- rows ---


def a_round(**changes):
    found = {"prefill_s": 0.5, "step_s": [0.1, 0.2, 0.4, 0.3], "step_cpu_s": 0.8, "chosen": [[1, 2], [3, 4]],
             "peak_rss_bytes": 100, "compile_s": 2.0, "load_s": 1.0, "hot_share": None, "floor_bytes": None,
             "opened": {"version": "1", "policy": "static"}}  # fmt: skip
    return found | changes


def test_a_row_has_the_keys_of_the_contract(setup):
    one = replace(echo(), row={"dtype": "F16", "floor_bytes": 5 * 10**7})
    rounds = [a_round(), a_round(prefill_s=0.25, chosen=[[1, 2], [3, 5]])]
    row = row_of(one, rounds, [a_round()], setup, gb_s=1.0)
    assert list(row)[: len(ROW_KEYS)] == list(ROW_KEYS)
    assert row["best_tok_s"] == pytest.approx(2 / 0.1) and row["decode_tok_s"] == pytest.approx(2 / 0.25)
    assert row["best_prefill_tok_s"] == pytest.approx(24 / 0.25) and row["share_of_floor"] == pytest.approx(0.5)
    assert row["cpu_share"] == pytest.approx(1.6 / 2.0) and row["cpu_s_per_step"] == pytest.approx(0.2)
    assert row["agreement"] == 0.75
    assert row["policy"] == "static" and row["sparsity"] is None
    measured = row_of(one, [a_round(floor_bytes=10**7)], rounds, setup, gb_s=1.0)
    assert measured["share_of_floor"] == pytest.approx(0.1), "what the engine counted goes before what was known"
    assert row_of(echo(), rounds, rounds, setup, gb_s=1.0)["share_of_floor"] is None


# --- our engine ---


def floor(folder, **settings):
    opened = ours.open_session({"model": str(folder), "ctx": 40, "batch": 1, "threads": 1, **settings})
    found = run_round(opened.session, [list(range(512, 544))], [[600 + i] for i in range(8)])
    return found


def test_the_floor_of_exact_mode_is_what_live_neurons_leave(folder):
    dense = floor(folder, sparsity="dense", dtype="float32")
    exact = floor(folder, sparsity="exact", dtype="float32", host_dtype="float32", policy="none")
    assert dense["chosen"] == exact["chosen"]
    spec = make_checkpoint.SHAPES["tiny"]
    units = 2 * spec.ffn * 3 * spec.hidden * 4
    saved = (dense["floor_bytes"] - exact["floor_bytes"]) / units
    assert saved == pytest.approx((1 - make_checkpoint.Recipe().active) * 2 / 3, abs=0.05)


def test_a_second_round_gives_the_same_answers(folder):
    opened = ours.open_session({"model": str(folder), "ctx": 40, "batch": 2, "threads": 1, "sparsity": "exact"})
    tokens = ([[600, 601, 602], [603, 604, 605]], [[606, 607], [608, 609]])
    first, second = (run_round(opened.session, *tokens) for _ in range(2))
    assert first["chosen"] == second["chosen"] and first["compile_s"] == second["compile_s"]
    assert first["floor_bytes"] is None, "rows share what they read"


def test_the_whole_run(folder, capsys):
    names = ["dynajax:dense:float32", "dynajax:exact:float16:none"]
    if find_spec("llama_cpp"):
        names.append("llama.cpp:F16")
        if not (folder / "F16.gguf").exists():
            convert(folder, folder / "F16.gguf", "F16", speed_only=True)
    command = ["--model", str(folder), "--gguf", str(folder / "{}.gguf"), "--prompt-tokens", "12", "--new-tokens", "4"]
    side_by_side.main([*command, "--rounds", "2", "--engines", *names])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in told["rows"]] == names
    assert told["rows"][0]["agreement"] == 1.0 and told["rows"][1]["agreement"] > 0.5
    assert all(0 < row["share_of_floor"] < 1.5 and row["decode_tok_s"] > 0 for row in told["rows"])


def test_lengths_are_checked(folder, capsys):
    with pytest.raises(SystemExit):
        side_by_side.main(["--model", str(folder), "--prompt-tokens", "1"])
    assert "--prompt-tokens must be >= 2, got 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="error: --engines takes"):
        side_by_side.main(["--model", str(folder), "--engines", "nothing"])
