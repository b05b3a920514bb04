"""`simulate` as a command: the paper's tables, policies on drawn and recorded traces, sweeps, pictures and refusals."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dynajax.cli import simulate, simulate_trace
from dynajax.sim import compare, paper, synthetic, whatif
from dynajax.sim.compare import SYSTEMS
from dynajax.sim.experts import paper as dali
from dynajax.sim.experts import published, seed
from dynajax.sim.published import ABLATION, ROWS
from dynajax.trace import DECODE, PREFILL, Head, Recorder

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "dynajax" / "assets" / "tiny-relullama" / "config.json"
DRAWN = ("--trace", "synthetic:relullama-7b", "--hardware", "pc-low")
LAYERS, WIDTH = 3, 64


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Drawn traces of a few tokens and neurons."""
    monkeypatch.setattr(whatif, "PROMPT", 5)
    monkeypatch.setattr(whatif, "TOKENS", 3)
    monkeypatch.setattr(compare, "WIDTH", 96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The config of a tiny model, and nothing else."""
    folder = tmp_path_factory.mktemp("tiny")
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": LAYERS, "intermediate_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_recording(path: Path, *, scores: bool = True, layers: int = LAYERS, **settings) -> Path:
    """A prompt of 4 tokens and 6 decoded ones, predicted a little wrong."""
    rng = np.random.default_rng(0)
    recorder = Recorder()
    recorder.open(Head(fingerprint="ab" * 32, layers=layers, width=WIDTH, settings=settings), scores=scores)
    recorder.start()
    usual = rng.random((layers, WIDTH))
    for step in range(7):
        live = rng.random((4 if step == 0 else 1, layers, WIDTH)) < usual
        guess = np.clip(200 * live + rng.integers(0, 60, live.shape), 0, 255).astype(np.uint8)
        recorder.begin(np.arange(len(live)) + step, np.zeros(len(live), np.int32), DECODE if step else PREFILL)
        for layer in range(layers):
            if step:
                recorder.add_scores(layer, guess[:, layer])
            recorder.add(layer, live[:, layer], np.arange(8, dtype=np.int32), guess[:, layer] if step else None)
    recorder.write(path)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return write_recording(tmp_path_factory.mktemp("trace") / "run.npz", lead=1)


# --- policies on a trace ---


def test_the_usual_policies_on_a_drawn_trace(command):
    told = command("simulate", *DRAWN, "--vram-budget", "8GiB", "--json").json("simulate")
    rows = {row["policy"]: row for row in told["rows"]}
    assert list(rows) == ["none", "static", "lru", "macro+micro", "dynamic"]
    assert (told["trace"], told["hardware"], told["budget_bytes"]) == ("synthetic:relullama-7b", "pc-low", 8 * 2**30)
    assert rows["none"]["pool_share"] == rows["none"]["hot_share"] == 0 < rows["static"]["hot_share"]
    assert rows["none"]["decode_tok_s"] < rows["static"]["decode_tok_s"] < told["bound_tok_s"]
    for row in rows.values():
        assert row["share_of_bound"] == pytest.approx(row["decode_tok_s"] / told["bound_tok_s"])
        assert row["settings"] == {} and row["recall"] > 0.9
    assert rows["lru"]["migrated_per_token"] > 0 and rows["lru"]["busy_link"] > 0
    assert rows["static"]["migrated_per_token"] == rows["static"]["busy_link"] == 0


def test_the_table_says_that_it_is_simulated(command):
    ended = command("simulate", *DRAWN, "--policy", "static, dynamic", "--ctx", 1024)
    assert (ended.code, ended.err) == (0, "simulate: 2/2\n")
    head, _, names, _, static, dynamic, _, bound = ended.out.splitlines()
    assert head.startswith("Simulated: synthetic:relullama-7b on pc-low, float16 on the device, float16 on the host")
    assert head.endswith("10.0 GiB of device memory, a cache for 1024 tokens")
    assert "| simulated tok/s |" in names and static.startswith("| static") and dynamic.startswith("| dynamic")
    assert bound.startswith("Simulated bound") and bound.endswith("tok/s")


def test_what_is_skipped_hangs_on_sparsity(command, recorded, folder):
    argv = ("--trace", recorded, "--model", folder, "--hardware", "pc-high", "--policy", "static", "--json")
    rows = {}
    for sparsity in ("auto", "predicted", "exact", "dense"):
        rows[sparsity] = command("simulate", *argv, "--sparsity", sparsity).json("simulate")["rows"][0]
    assert rows["auto"] == rows["predicted"] and rows["exact"]["recall"] == rows["dense"]["recall"] == 1
    assert rows["exact"]["computed_hot_share"] == rows["dense"]["computed_hot_share"] == rows["exact"]["pool_share"]


def test_a_recording_of_a_tiny_model(command, recorded, folder):
    argv = ("--trace", recorded, "--model", folder, "--hardware", "pc-low", "--vram-budget", "4900KiB")
    ended = command("simulate", *argv, "--policy", "static,lru", "--dtype", "float16", "--json")
    told = ended.json("simulate")
    assert [row["policy"] for row in told["rows"]] == ["static", "lru"]
    assert all(0 < row["pool_share"] < 1 for row in told["rows"]), told
    assert ended.err == "simulate: 2/2\n"


def test_constants_are_those_of_the_recording_unless_they_are_set(command, folder, tmp_path):
    knobs = {"theta": 0.5, "lam": 2.0, "density": 0.3, "record_scores": True}
    path = write_recording(tmp_path / "r.npz", lead=2, knobs=knobs)
    found = []

    def answers(setup, policies, settings):
        found.extend(setting.config for setting in settings)
        return iter(whatif.answers(setup, policies, settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynajax.cli.simulate_trace.answers", answers)
        argv = ("--trace", path, "--model", folder, "--hardware", "pc-high", "--policy", "lru", "--json")
        ended = command("simulate", *argv, "--set", "lam=0.1")
    assert ended.code == 0, ended.err
    assert (found[0].theta, found[0].lam, found[0].lead, found[0].density) == (0.5, 0.1, 2, None)


def test_what_a_recording_cannot_tell_is_said(command, recorded, folder, tmp_path):
    argv = ("--model", folder, "--hardware", "pc-high", "--policy", "lru", "--json")
    ended = command("simulate", "--trace", recorded, *argv, "--sweep", "lead=1/2")
    assert "scores were recorded with lead=1" in ended.err and ended.code == 0
    bare = write_recording(tmp_path / "bare.npz", scores=False)
    ended = command("simulate", "--trace", bare, *argv)
    assert "no scores were recorded" in ended.err and ended.json("simulate")["rows"][0]["migrated_per_token"] == 0
    ended = command("simulate", "--trace", bare, *argv, "--sparsity", "predicted")
    assert (ended.code, ended.err.count("\n")) == (2, 1) and "record_scores" in ended.err


def test_a_recording_of_another_model(command, recorded, folder, tmp_path):
    ended = command("simulate", "--trace", recorded, "--hardware", "pc-high")
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1)
    assert "3 layers of 64 neurons" in ended.err and "8 of 768" in ended.err
    odd = write_recording(tmp_path / "odd.npz", knobs={"patience": 3})
    ended = command("simulate", "--trace", odd, "--hardware", "pc-high", "--model", folder)
    assert (ended.code, ended.err.count("\n")) == (5, 1) and "patience" in ended.err


def test_shipped_recordings(command, recorded, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dynajax.cli.simulate_trace.TRACES", traces := tmp_path / "traces")
    ended = command("simulate", "--trace", "recorded:mine", "--hardware", "pc-high")
    assert (ended.code, ended.err.count("\n")) == (2, 1) and "none is shipped" in ended.err
    (traces / "mine").mkdir(parents=True)
    (traces / "mine.npz").write_bytes(recorded.read_bytes())
    (traces / "mine" / "config.json").write_bytes((folder / "config.json").read_bytes())
    argv = ("--hardware", "pc-high", "--policy", "static", "--json")
    told = command("simulate", "--trace", "recorded:mine", *argv).json("simulate")
    assert told["trace"] == "recorded:mine"
    ended = command("simulate", "--trace", "recorded:yours", *argv)
    assert ended.code == 2 and "must be of mine, got 'yours'" in ended.err


@pytest.mark.parametrize("name", sorted(path.stem for path in simulate_trace.TRACES.glob("*.npz")))
def test_each_shipped_recording_brings_its_model(command, name):
    argv = ("--trace", f"recorded:{name}", "--hardware", "pc-high", "--policy", "static", "--json")
    (row,) = command("simulate", *argv).json("simulate")["rows"]
    assert row["decode_tok_s"] > 0 and row["pool_share"] == 1


# --- sweeps ---


def test_a_sweep_is_every_combination(command, tmp_path):
    argv = (*DRAWN, "--vram-budget", "8GiB", "--policy", "static,dynamic")
    ended = command("simulate", *argv, "--sweep", "lam=0.3/3,rank=1024,quality=0.5/1", "--json")
    told = ended.json("simulate")
    assert [(row["settings"]["lam"], row["settings"]["quality"]) for row in told["rows"]] == [
        (0.3, 0.5), (0.3, 0.5), (0.3, 1), (0.3, 1), (3, 0.5), (3, 0.5), (3, 1), (3, 1)
    ]  # fmt: skip
    assert [row["policy"] for row in told["rows"]] == ["static", "dynamic"] * 4
    assert {row["settings"]["rank"] for row in told["rows"]} == {1024}
    known = {row["settings"]["quality"]: row["recall"] for row in told["rows"]}
    assert known[0.5] < known[1] == 1
    assert ended.err.endswith("simulate: 8/8\n")


def test_a_rank_changes_bytes_and_speed_alone(command):
    argv = (*DRAWN, "--vram-budget", "8GiB", "--policy", "static", "--sweep", "rank=16/2048", "--json")
    few, many = command("simulate", *argv).json("simulate")["rows"]
    assert few["pool_share"] > many["pool_share"] and few["decode_tok_s"] > many["decode_tok_s"]
    assert few["recall"] == many["recall"]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_sweep_is_drawn(command, tmp_path, kind):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"a.{kind}"
    argv = (*DRAWN, "--policy", "static,dynamic", "--sweep", "ranking=score/flag,lead=1/2", "--plot", out)
    ended = command("simulate", *argv)
    assert ended.code == 0 and ended.err.endswith(f"simulate: 8/8\nsimulated tok/s, drawn to {out}\n"), ended.err
    assert "| policy  | ranking | lead | simulated tok/s |" in ended.out
    assert out.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_picture_needs_is_named(command, tmp_path, monkeypatch):
    argv = (*DRAWN, "--policy", "static", "--sweep", "lam=1/2", "--plot")
    ended = command("simulate", *argv, tmp_path / "nowhere" / "a.png")
    assert (ended.code, ended.err.count("\n")) == (6, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ended = command("simulate", *argv, tmp_path / "a.png")
    assert (ended.code, ended.err) == (2, "error: matplotlib is not installed: pip install dynajax[plot]\n")


# --- refusals ---


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "give one of --table paper and --trace"),
        (("--table", "paper", *DRAWN), "give one of"),
        (("--table", "thesis"), "--table must be paper, got 'thesis'"),
        (("--table", "paper", "--model", "a", "--sweep", "lam=1"), "leave out --sweep, --model"),
        (("--trace", "synthetic:relullama-7b"), "give --hardware"),
        (("--trace", "synthetic:gpt", "--hardware", "pc-low"), "must be of relullama-7b"),
        (("--trace", "synthetic:relullama-7b", "--hardware", "pc"), "there is no pc"),
        ((*DRAWN, "--model", "other"), "leave out --model"),
        ((*DRAWN, "--out", "a.md"), "--out goes with --table"),
        ((*DRAWN, "--policy", "static,magic"), "got 'magic'"),
        ((*DRAWN, "--policy", "static,static"), "each policy once"),
        ((*DRAWN, "--threads", "4", "--batch", "2"), "--batch, --threads changes nothing"),
        ((*DRAWN, "--set", "density=0.1"), "density=0.1 changes nothing"),
        ((*DRAWN, "--ctx", "4"), "--ctx must be at least the 8 tokens"),
        ((*DRAWN, "--host-dtype", "float32"), "no host rate for float32"),
        ((*DRAWN, "--dtype", "float8"), "--dtype must be one of"),
        ((*DRAWN, "--set", "place_bits=8"), "gates of 8 bits"),
        ((*DRAWN, "--sweep", "lam"), "--sweep takes NAME=VALUE/VALUE"),
        ((*DRAWN, "--sweep", "lam=1/1"), "each name and value once"),
        ((*DRAWN, "--sweep", "lam=1//2"), "--sweep takes"),
        ((*DRAWN, "--sweep", "lam=1,lam=2"), "each name and value once"),
        ((*DRAWN, "--sweep", "density=0.1"), "--sweep knows no 'density', only rank, quality, lam"),
        ((*DRAWN, "--sweep", "lam=high"), "lam must be a number"),
        ((*DRAWN, "--sweep", "quality=2"), "quality must be a number between 0 and 1"),
        ((*DRAWN, "--sweep", "rank=1.5"), "rank must be an integer"),
        ((*DRAWN, "--sweep", f"lam={'/'.join(map(str, range(201)))}"), "at most 200 combinations, got 201"),
        ((*DRAWN, "--plot", "a.png"), "--plot needs --sweep"),
        ((*DRAWN, "--sweep", "lam=1", "--plot", "a.txt"), "a file that ends in .png"),
    ],
)
def test_mistakes_in_flags(command, argv, words):
    ended = command("simulate", *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert words in ended.err


def test_recorded_scores_have_the_quality_that_they_have(command, recorded, folder):
    argv = ("--trace", recorded, "--model", folder, "--hardware", "pc-high", "--sweep", "quality=0.5")
    ended = command("simulate", *argv)
    assert (ended.code, ended.err.count("\n")) == (2, 1) and "synthetic traces only" in ended.err


def test_a_budget_that_is_too_small_names_the_smallest(command):
    argv = (*DRAWN, "--policy", "none,dynamic", "--json", "--vram-budget")
    ended = command("simulate", *argv, "1GiB")
    assert (ended.code, ended.out, ended.err.count("\n")) == (4, "", 1)
    least = ended.err.split("--vram-budget ")[1].split("B ")[0]
    assert command("simulate", *argv, f"{least}B").json("simulate")["budget_bytes"] == int(least)
    assert command("simulate", *argv, f"{int(least) - 2}B").code == 4  # a share of it is kept free, in whole bytes
    ended = command("simulate", *argv, "11GiB")
    assert (ended.code, ended.err.count("\n")) == (4, 1) and "pc-low has 10737418240 bytes" in ended.err


def test_files_that_are_not_there(command, folder, tmp_path):
    ended = command("simulate", "--trace", tmp_path / "a.npz", "--model", folder, "--hardware", "pc-low")
    assert (ended.code, ended.err.count("\n")) == (6, 1) and "no trace" in ended.err
    ended = command("simulate", "--table", "paper", "--out", tmp_path / "nowhere" / "a.md")
    assert (ended.code, ended.out, ended.err.count("\n")) == (6, "", 1)


# --- the paper's tables ---


def some_cells(model: str) -> list[paper.Cell]:
    """A figure of every kind."""
    found = []
    for row in (row for row in ROWS if row.model == model):
        for system in SYSTEMS:
            published = row.tok_s.get(system)
            found.append(paper.Cell(table="decode_tok_s", row=row.name, system=system, published=published,
                                    simulated=1.1 * (published or 2)))  # fmt: skip
        for table in ("cpu_share", "recall", "new_table"):
            found.append(paper.Cell(table=table, row=row.name, system="ours", published=None, simulated=0.5))
        if row.name in ABLATION:
            base = 1.1 * row.tok_s["dynamicinfer"]
            for change, factor in (("lam=0.1", 0.9), ("lam=10.0", 1.02)):
                found.append(paper.Cell(table="sensitivity", row=f"{row.name}/{change}", system="dynamicinfer",
                                        published=None, simulated=factor * base))  # fmt: skip
    return found


def some_mixture_cells(model: str) -> list[paper.Cell]:
    """A figure of every kind of experts."""
    found, row = [], f"dali-pc/{model}/batch 32"
    for table in ("moe_decode_tok_s_row", "moe_prefill_tok_s", "moe_loads"):
        for system, value in (("ktransformers", 2.0), ("dali", 3.0), ("ours", 4.0), ("bound", 5.0)):
            told = published.ROW_TOK_S[model].get(system) if table == "moe_decode_tok_s_row" else None
            found.append(paper.Cell(table=table, row=row, system=system, published=told, simulated=value))
    for system, value in (("dali", 1.5), ("ours", 2.0)):
        of = f"decode over ktransformers/{model}/batch 32"
        found.append(paper.Cell(table="moe_over", row=of, system=system, published=None, simulated=value))
        found.append(paper.Cell(table="moe_sensitivity", row=f"{row}/share=0.5", system=system, published=None,
                                simulated=2 * value))  # fmt: skip
    return found


def some_seed_cells() -> list[paper.Cell]:
    return [paper.Cell(table="moe_seed", row=f"{figure}/synthetic m, batch 1", system="ours", simulated=0.5,
                       published=None) for figure in seed.DEFINITIONS]  # fmt: skip


@pytest.fixture
def few_cells(monkeypatch):
    monkeypatch.setattr(simulate, "workers", lambda: ThreadPoolExecutor(2))
    monkeypatch.setattr(paper, "cells_of", some_cells)
    monkeypatch.setattr(dali, "mixture_cells_of", some_mixture_cells)
    monkeypatch.setattr(seed, "seed_cells", some_seed_cells)
    monkeypatch.setattr(synthetic, "checked", lambda recipe: (synthetic.Figure("recall", 0.9, 0.95, 0.99, False),))


def test_the_tables_of_the_paper(command, few_cells, tmp_path):
    out = tmp_path / "tables.md"
    ended = command("simulate", "--table", "paper", "--out", out)
    assert ended.code == 0, ended.err
    assert ended.err.endswith(f"simulated tables, written to {out}\n") and ended.err.count("\n") == 6 + 4
    assert out.read_text() == ended.out and list(tmp_path.iterdir()) == [out]
    headings = [line for line in ended.out.splitlines() if line.startswith("#")]
    assert ended.out.count("| 0.900 to 0.950 | 0.990 | published |    NO |") == 5
    assert len(headings) == 9 + 8 and all("simulated" in line.lower() for line in headings)
    assert "| 15.5 / 17.1 / +10.0% |" in ended.out  # PowerInfer, 13B, PC-High
    assert "11 constants fitted to 18 figures" in ended.out
    (lam,) = (line for line in ended.out.splitlines() if line.startswith("| lam "))
    assert "1.0 | 0.1, 3.0, 10.0 |" in lam and lam.count("-10.0% to +2.0%") == 2
    for constant in ("pageable_bps", "reserved_bytes of llama.cpp", "cpu_bps of int4", "sync_s of powerinfer"):
        assert constant in ended.out


def test_dalis_tables_follow_those_of_neurons(command, few_cells):
    text = command("simulate", "--table", "paper").out
    neurons, experts = " ".join(text.split()).split("# Simulated mixtures of experts")
    assert "moe_" not in experts and "Constants of the simulated systems" in neurons
    assert "| decode over ktransformers | 2.16 | 1.50 | 2.00 | - | -31% |" in experts
    assert "| dali-pc/qwen3-30b-a3b/batch 32 | 2.00 | 1.96 / 3.00 | 4.00 | 5.00 |" in experts
    assert "MoE-Lightning" in experts and "not modelled" in experts and "3.00 (+0%)" in experts
    for figure, words in (*seed.DEFINITIONS.items(), *seed.VERDICTS.items()):
        assert f"**{figure}**" in experts and words in experts
    assert "GLaM" in experts and "has no public weights" in experts


def test_the_json_of_the_paper(command, few_cells):
    ended = command("simulate", "--table", "paper", "--json")
    rows = ended.json("simulate")["rows"]
    assert {row["row"] for row in rows if row["table"] == "decode_tok_s"} == {row.name for row in ROWS}
    row = next(row for row in rows if row["system"] == "llama.cpp")
    assert row["error"] == pytest.approx(0.1) and row["published"] == 9.7
    assert ended.err.count("simulated ") == len({row.model for row in ROWS}) + len(published.MODELS) + 1
    assert {row["table"] for row in rows if row["table"].startswith("moe_")} == {
        "moe_decode_tok_s_row", "moe_prefill_tok_s", "moe_loads", "moe_over", "moe_sensitivity", "moe_over_mean",
        "moe_seed"}  # fmt: skip
    mean = next(row for row in rows if row["table"] == "moe_over_mean" and row["system"] == "dali")
    assert (mean["published"], mean["simulated"]) == (2.16, 1.5)


def test_work_is_spread_over_processes(capfd):
    assert simulate.in_workers(simulate.workers(), len, ["a", "bcd"]) == {"a": 1, "bcd": 3}
    assert sorted(capfd.readouterr().err.splitlines())[0].startswith("simulated a: ")
    with pytest.raises(ValueError, match="invalid literal"):
        simulate.in_workers(simulate.workers(), int, ["x"])


def test_nothing_loads_jax(recorded, folder):
    heavy = ("jax", "jaxlib", "flax", "orbax", "tokenizers", "torch")
    code = f"""
import atexit, sys
import dynajax.sim.paper
atexit.register(lambda: print(*sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr))
sys.argv = ["simulate", "--trace", {str(recorded)!r}, "--model", {str(folder)!r}, "--hardware", "pc-high", "--json"]
from dynajax.cli import main
main("simulate")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.endswith("simulate: 5/5\n\n"), done.stderr
    assert json.loads(done.stdout)["simulated"] is True
