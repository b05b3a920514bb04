"""`simulate --trace` of mixtures of experts: drawn, recorded and other programs' traces, and refusals."""

import json
import sys
import types

import numpy as np
import pytest

from dynajax.cli import simulate_mixtures
from dynajax.config import EngineConfig
from dynajax.policy.experts.presets import PRESETS
from dynajax.routing_trace import RoutingHead, RoutingRecord
from dynajax.trace import DECODE, PREFILL, Recorder
from tests.convert.torch_files import MARK, Raw, number, pickled, save, save_zip, tensor, text

DRAWN = ("--trace", "synthetic:tiny-moe", "--hardware", "dali-pc")
NEURONS = ("--trace", "synthetic:relullama-7b", "--hardware", "pc-low")
SHIPPED = ("--trace", "recorded:tiny-moe", "--hardware", "dali-pc")
BUDGET = ("--vram-budget", "13MiB", "--ctx", "128")  # half of the experts at batch 1, none to spare at 8
WIDE = ("--vram-budget", "20MiB", "--ctx", "128")
LAYERS, UNITS, TOP_K = 6, 16, 4  # of tiny-moe


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Drawn traces of a few tokens."""
    monkeypatch.setattr(simulate_mixtures, "PROMPT", 5)
    monkeypatch.setattr(simulate_mixtures, "TOKENS", 6)


def routing(tokens: int, layers: int = LAYERS, seed: int = 0) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((tokens, layers, UNITS)), axis=2)[:, :, :TOP_K]


def write_recording(path, layers: int = LAYERS, *, decoded: int = 6):
    """A prompt of 4 tokens, and some that were decoded."""
    head = RoutingHead(fingerprint="ab" * 32, unit_layers=tuple(range(layers)), width=UNITS, top_k=TOP_K, settings={})
    recorder, experts = Recorder(), routing(4 + decoded, layers)
    record = recorder.take(RoutingRecord(head))
    record.start()
    for first, last in [(0, 4), *((at, at + 1) for at in range(4, 4 + decoded))]:
        phase = DECODE if first else PREFILL
        record.begin(np.arange(first, last), np.zeros(last - first, np.int32), phase)
        for layer in range(layers):
            record.add(layer, experts[first:last, layer])
    recorder.write(path)
    return path


def rows_of(told: dict) -> dict:
    return {row["policy"]: row for row in told["rows"]}


# --- policies ---


def test_the_usual_policies_on_a_drawn_trace(command):
    told = command("simulate", *DRAWN, *WIDE, "--batch", 8, "--json").json("simulate")
    rows = rows_of(told)
    assert list(rows) == simulate_mixtures.POLICIES.split(",")
    assert (told["kind"], told["model_batch"], told["hardware"]) == ("expert", 8, "dali-pc")
    assert told["budget_bytes"] == 20 * 2**20
    for row in rows.values():
        assert row["decode_tok_s"] == pytest.approx(8 * row["decode_tok_s_row"])
        assert (
            row["share_of_bound"] == pytest.approx(row["decode_tok_s"] / told["bound_tok_s"]) and row["settings"] == {}
        )
        assert row["prefill_tok_s"] <= told["bound_prefill_tok_s"] and row["decode_tok_s"] <= told["bound_tok_s"]
    assert rows["static"]["moved_gb"] == rows["static"]["busy_link"] == 0 < rows["lru"]["busy_link"]
    assert rows["static"]["prefetch_useful"] is None and rows["static"]["foretold_recall"] is None
    assert told["predictions"] == {"corrected": "corrected: drawn, recall 0.85", "count": "count: the planner's own",
                                   "residual": "residual: drawn, recall 0.8"}  # fmt: skip


def test_the_table_says_that_it_is_simulated(command):
    ended = command("simulate", *DRAWN, *BUDGET, "--policy", "static, auto", "--batch", 4)
    assert (ended.code, ended.err) == (0, "simulate: 2/2\n")
    head, _, names, _, static, auto, _, bound = ended.out.splitlines()
    assert head.startswith("Simulated: synthetic:tiny-moe on dali-pc, bfloat16 on the device")
    assert "up to 4 rows, a cache for 128 tokens each. Predictions: corrected: drawn, recall 0.85." in head
    assert "simulated tok/s" in names and static.startswith("| static") and auto.startswith("| auto")
    assert bound.startswith("Simulated bound")


def test_every_preset_and_parts_of_one(command):
    told = command("simulate", *DRAWN, *BUDGET, "--policy", ",".join(PRESETS), "--json").json("simulate")
    assert list(rows_of(told)) == list(PRESETS)
    changed = ("--assign", "fetch-all", "--cache", "lru", "--prefetch", "none")
    argv = (*DRAWN, *BUDGET, "--policy", "scan,lru", *changed, "--json")
    scan, lru = command("simulate", *argv).json("simulate")["rows"]
    assert {**scan, "policy": "lru"} == lru
    assert simulate_mixtures.mixture_policies("scan", EngineConfig())["scan"] == PRESETS["scan"]


def test_recall_and_constants_are_swept(command):
    argv = (*DRAWN, *BUDGET, "--policy", "scan", "--prefetch", "gate", "--batch", 4, "--json", "--sweep")
    rows = command("simulate", *argv, "recall=0/1,prefetch_price=0/9").json("simulate")["rows"]
    assert [tuple(row["settings"].values()) for row in rows] == [(0.0, 0), (0.0, 9), (1.0, 0), (1.0, 9)]
    assert rows[0]["foretold_recall"] < 0.8 < rows[2]["foretold_recall"] == 1  # chance finds much of few experts
    assert rows[3]["prefetched_per_layer_step"] == 0
    one = command("simulate", *argv[:-1], "--recall", "1").json("simulate")["rows"][0]
    assert one["foretold_recall"] == 1


def test_the_order_of_work(command):
    """Of experts that take longer to move than to plan: of tiny-moe's the two orders decode alike."""
    drawn = ("--trace", "synthetic:deepseek-v2-lite", "--hardware", "dali-pc")
    argv = (*drawn, "--policy", "scan", "--batch", 32, "--json", "--order")
    planner, engine = (command("simulate", *argv, order).json("simulate")["rows"][0] for order in ("planner", "engine"))
    assert planner["decode_tok_s"] > 1.005 * engine["decode_tok_s"]
    assert planner["prefill_tok_s"] > 1.2 * engine["prefill_tok_s"]


def test_auto_has_the_engines_guard(command):
    """Planning takes longer here than the experts of this small model do."""
    argv = (*DRAWN, *WIDE, "--batch", 8, "--policy", "static,scan,auto", "--json")
    static, scan, auto = command("simulate", *argv).json("simulate")["rows"]
    assert scan["decode_tok_s"] < static["decode_tok_s"] == auto["decode_tok_s"]
    assert auto["prefill_tok_s"] == scan["prefill_tok_s"] != static["prefill_tok_s"]


def test_recipes_and_larger_models(command):
    argv = ("--hardware", "dali-pc", "--policy", "static", "--json", "--trace")
    hits = []
    for recipe in ("", "/repeating", "/popular"):
        row = command("simulate", *argv, f"synthetic:deepseek-v2-lite{recipe}").json("simulate")["rows"][0]
        hits.append(row["weighted_hits"])
    assert hits[0] == hits[1] != hits[2]


@pytest.mark.parametrize("kind", ["png"])
def test_a_sweep_is_drawn(command, tmp_path, kind):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"a.{kind}"
    ended = command("simulate", *DRAWN, *BUDGET, "--policy", "auto", "--sweep", "recall=0.5/1", "--plot", out)
    assert ended.code == 0 and out.read_bytes().startswith(b"\x89PNG"), ended.err


# --- recordings ---


def test_recordings_as_they_ran_and_side_by_side(command):
    argv = (*SHIPPED, "--vram-budget", "26MiB", "--ctx", 128, "--policy", "static,auto", "--json")
    alone = command("simulate", *argv).json("simulate")
    several = command("simulate", *argv, "--batch", 16).json("simulate")
    assert (alone["model_batch"], several["model_batch"]) == (1, 16)
    assert alone["predictions"] == {"corrected": "corrected: as recorded (corrected)"}
    assert several["rows"][1]["weighted_hits"] > several["rows"][1]["hits"]


def test_a_recording_finds_its_model(command, tmp_path):
    path = write_recording(tmp_path / "run.npz")
    told = command("simulate", "--trace", path, "--hardware", "dali-pc", *BUDGET, "--json").json("simulate")
    assert told["model_batch"] == 1 and told["rows"][0]["pool_share"] < 1
    odd = write_recording(tmp_path / "odd.npz", layers=3)
    ended = command("simulate", "--trace", odd, "--hardware", "dali-pc")
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1)
    assert "3 layers of 16 experts, 4 for a token: name its model with --model" in ended.err
    argv = ("--trace", odd, "--hardware", "dali-pc", "--model", "tiny-moe", *BUDGET, "--policy", "static", "--json")
    ended = command("simulate", *argv)
    assert "3 layers with experts, the model 6: each takes the routing of the one at its depth" in ended.err
    ended = command("simulate", *argv, "--model", "mixtral-8x7b")
    assert (ended.code, ended.err.count("\n")) == (
        5,
        1,
    ) and "16 experts a layer, 4 for a token, the model 8" in ended.err


def test_a_damaged_recording_and_one_of_nothing(command, tmp_path):
    path = write_recording(tmp_path / "run.npz", decoded=0)
    ended = command("simulate", "--trace", path, "--hardware", "dali-pc")
    assert (ended.code, ended.err.count("\n")) == (5, 1) and "no decoded token" in ended.err
    path.write_bytes(path.read_bytes()[:200])
    ended = command("simulate", "--trace", path, "--hardware", "dali-pc")
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1)


# --- other programs' traces ---


def simulated(command, path, *argv) -> dict:
    given = ("--trace", path, "--hardware", "dali-pc", "--model", "tiny-moe", *BUDGET, "--policy", "static", "--json")
    return command("simulate", *given, *argv).json("simulate")


def test_json_csv_and_npy(command, tmp_path):
    experts = routing(24)
    (tmp_path / "a.json").write_text(json.dumps(experts.tolist()))
    lines = [f"{t},{m},{';'.join(map(str, experts[t, m]))}" for t in range(24) for m in range(LAYERS)]
    (tmp_path / "a.csv").write_text("\n".join(["token,layer,experts", *lines]))
    told = [simulated(command, tmp_path / f"a.{kind}") for kind in ("json", "csv")]
    assert told[0]["rows"] == told[1]["rows"] and told[0]["bound_prefill_tok_s"] is None
    assert simulated(command, tmp_path / "a.json", "--batch", 3)["model_batch"] == 3
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 5, (7, LAYERS, UNITS)))
    assert simulated(command, tmp_path / "a.npy")["model_batch"] > 4


def test_expert_distributions_of_sglang(command, tmp_path):
    counts = np.zeros((5, LAYERS + 1, UNITS), np.int64)
    counts[:4, 1:] = np.random.default_rng(0).integers(0, 3, (4, LAYERS, UNITS))  # the first layer is dense
    raw = Raw.of(counts)
    entries = (text("rank") + number(0), text("logical_count") + tensor(raw, "0"), text("average_utilization") + b"N")
    save_zip(tmp_path / "a.pt", pickled(b"}" + MARK + b"".join(entries) + b"u"), {"0": raw.store})
    assert simulated(command, tmp_path / "a.pt")["rows"][0]["decode_tok_s"] > 0
    save(tmp_path / "b.pt", {"physical_count": counts})
    ended = command("simulate", "--trace", tmp_path / "b.pt", "--hardware", "dali-pc", "--model", "tiny-moe")
    assert (ended.code, ended.err.count("\n")) == (5, 1) and "no tensor logical_count, only physical_count" in ended.err


class Column:
    def __init__(self, values):
        self.values = values

    def to_pylist(self):
        return self.values


class Fake:
    """Enough of pyarrow.parquet: a file holds its columns as JSON."""

    def __init__(self, path):
        self.columns = json.loads(path.read_text())
        self.schema_arrow = [types.SimpleNamespace(name=name) for name in self.columns]

    def iter_batches(self, batch_size, columns):
        count = len(next(iter(self.columns.values())))
        for first in range(0, count, batch_size):
            part = {name: self.columns[name][first : first + batch_size] for name in columns}
            yield types.SimpleNamespace(num_rows=min(batch_size, count - first),
                                        column=lambda at, p=part: Column(list(p.values())[at]))  # fmt: skip


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """A folder as FLAME-MoE has it, read by a stand-in."""
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", types.SimpleNamespace(ParquetFile=Fake))
    experts = routing(40)
    for m in range(LAYERS):
        columns = {"scores": np.full((40, TOP_K), 0.25).tolist(), "indices": experts[:, m].tolist()}
        (tmp_path / f"layer_{m + 2:02d}.parquet").write_text(json.dumps(columns))
    return tmp_path


def test_flame_moe(command, parquet):
    told = simulated(command, parquet, "--batch", 4)
    assert told["model_batch"] == 4
    (parquet / "a.json").write_text(json.dumps(routing(40).tolist()))
    assert told["rows"] == simulated(command, parquet / "a.json", "--batch", 4)["rows"]
    ended = command("simulate", "--trace", parquet / "layer_02.parquet", "--hardware", "dali-pc", *BUDGET, "--model",
                    "tiny-moe", "--policy", "static")  # fmt: skip
    assert ended.code == 0 and "the trace has 1 layers with experts" in ended.err
    told = simulated(command, parquet, "--columns", "expert=indices,score=scores")
    assert told["rows"]
    ended = command("simulate", "--trace", parquet, "--hardware", "dali-pc", "--columns", "expert=ids")
    assert (ended.code, ended.err.count("\n")) == (5, 1) and "no column ids, only scores, indices" in ended.err


def test_real_parquet(command, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    experts = routing(40)
    for m in range(LAYERS):
        ids = arrow.array(experts[:, m].tolist(), arrow.list_(arrow.int16()))
        scores = arrow.array(np.full((40, TOP_K), 0.25, np.float16).tolist(), arrow.list_(arrow.float32()))
        parquet.write_table(arrow.table({"scores": scores, "indices": ids}), tmp_path / f"layer_{m + 2:02d}.parquet")
    (tmp_path / "a.json").write_text(json.dumps(experts.tolist()))
    assert simulated(command, tmp_path)["rows"] == simulated(command, tmp_path / "a.json")["rows"]


def test_a_missing_package_is_named(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "layer_02.parquet").write_bytes(b"PAR1")
    ended = command("simulate", "--trace", tmp_path, "--hardware", "dali-pc")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: pyarrow is not installed: pip install dynajax[traces]\n"


# --- refusals ---


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ((*DRAWN, "--policy", "static,dynamic"), 2, "for experts, got 'dynamic'"),
        ((*DRAWN, "--policy", "static,static"), 2, "each policy once"),
        ((*DRAWN, "--threads", "4"), 2, "--threads changes nothing"),
        ((*DRAWN, "--model", "mixtral-8x7b"), 2, "leave out --model"),
        ((*DRAWN, "--batch", "129"), 2, "--batch must be at most 128"),
        ((*DRAWN, "--sparsity", "predicted"), 2, "--sparsity predicted is of neurons"),
        ((*DRAWN, "--ctx", "4"), 2, "--ctx must be at least the 11 tokens"),
        ((*DRAWN, "--recall", "2"), 2, "--recall must be"),
        ((*DRAWN, "--order", "best"), 2, "--order must be planner or engine, got 'best'"),
        ((*DRAWN, "--columns", "expert=a"), 2, "--columns is for traces of other programs"),
        ((*DRAWN, "--sweep", "lam=1"), 2, "no 'lam' of experts, only recall, expert_decay, lead"),
        ((*DRAWN, "--sweep", "recall=high"), 2, "recall must be a number"),
        ((*DRAWN, "--sweep", "lead=0"), 2, "lead must be"),
        ((*DRAWN, "--host-dtype", "float8"), 2, "--host-dtype must be one of"),
        ((*DRAWN, "--vram-budget", "1MiB"), 4, "use --vram-budget"),
        (("--trace", "synthetic:tiny-moe/odd", "--hardware", "dali-pc"), 2, "must be of repeating, measured-lru"),
        (("--trace", "nowhere.json", "--hardware", "dali-pc"), 6, "no trace"),
        ((*NEURONS, "--recall", "1"), 2, "--recall is of experts"),
        ((*NEURONS, "--assign", "scan"), 2, "--assign changes nothing"),
        (("--table", "paper", "--recall", "1"), 2, "leave out --recall"),
    ],
)  # fmt: skip
def test_mistakes_in_flags(command, argv, code, words):
    ended = command("simulate", *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1), ended.err
    assert words in ended.err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "no JSON"),
        ("a.csv", "layer,count\n0,7\n", "names an expert"),
        ("a.npy", "no array", "no routing trace of its kind"),
        ("a.pt", "no archive", "not a PyTorch zip file"),
    ],
)
def test_files_that_are_not_what_they_are_called(command, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    ended = command("simulate", "--trace", tmp_path / name, "--hardware", "dali-pc")
    assert (ended.out, ended.err.count("\n")) == ("", 1) and words in ended.err and ended.code in (3, 5)


def test_what_columns_can_say(command, tmp_path):
    (tmp_path / "a.csv").write_text("token,layer,expert\n0,0,1\n")
    for words in ("expert", "expert=", "row=a", "expert=a,expert=b"):
        ended = command("simulate", "--trace", tmp_path / "a.csv", "--hardware", "dali-pc", "--columns", words)
        assert ended.code == 2 and "--columns takes NAME=COLUMN" in ended.err
