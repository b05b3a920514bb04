"""Every command on mixtures of experts, as a user calls it."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, read_spec, read_stats
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.errors import FitError, UsageError
from dynajax.reference import forward
from dynajax.routing_trace import read_routing
from dynajax.testing import make_moe
from dynajax.testing.oracle import family_logits
from tests.cli.conftest import command  # noqa: F401
from tests.engine.mixture.zoo import folder_unit_bytes

FAMILY = "qwen2_moe"  # its second layer has no experts
IDS = ("--prompt-ids", "random:12", "--max-new-tokens", 8, "--ctx", 64)


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.folder(FAMILY)


@pytest.fixture(scope="module")
def budget(folder):
    """Of half of the experts, with what moving them takes."""
    return budget_of(folder, ctx=64, policy="lru")


def budget_of(folder, **settings):
    plan = plan_for(str(folder), EngineConfig(vram_budget="64MiB", **settings))
    return f"{plan.smallest_budget_bytes + plan.units_total // 2 * folder_unit_bytes(folder)}B"


# --- generate -----------------------------------------------------------------------------------------------------


def test_json_is_the_committed_schema_and_the_timeline_shows_moves(command, folder, tmp_path):  # noqa: F811
    path, record = tmp_path / "t.json", tmp_path / "r.npz"
    two_rows = budget_of(folder, ctx=64, policy="lru", batch=2)
    argv = ("--model", folder, *IDS, "--vram-budget", two_rows, "--policy", "lru", "--batch", 2, "--json")
    found = command("generate", *argv, "--timeline", path, "--record", record).json("generate")
    units, memory = found["units"], found["memory"]
    assert (found["policy"], found["sparsity"], units["kind"]) == ("lru", "dense", "expert")
    assert units["live_per_token"] == 2 * 4 and units["density"] == pytest.approx(4 / 6) and units["recall"] is None
    assert units["migrated"] > 0 and units["migrated_bytes"] == units["migrated"] * folder_unit_bytes(folder)
    assert 0 < units["hot_share"] < 1 and units["computed_hot_share"] == 1  # lru fetches whatever is absent
    assert memory["peak_bytes"] <= memory["budget_bytes"] and memory["pool_bytes"] == 6 * folder_unit_bytes(folder)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] != "process_name"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = Counter((lanes[event["tid"]], event["name"].split()[0]) for event in events if event["ph"] == "X")
    assert seen["copy", "expert"] >= units["migrated"] and seen["device", "experts"] > 0 and seen["device", "head"] == 8
    routing = read_routing(record)
    assert routing.head.unit_layers == (0, 2) and len(routing.phase) == 11 + 8
    refused = command("plot-residency", "--record", record, "--out", tmp_path / "a.png")
    assert (refused.code, refused.err.count("\n")) == (2, 1) and "only neurons are drawn" in refused.err


def test_the_summary_says_what_experts_did(command, folder, budget):  # noqa: F811
    argv = ("generate", "--model", folder, *IDS, "--vram-budget", budget)
    *_, line = command(*argv, "--policy", "lru").err.splitlines()
    number = r"[0-9.]+"
    assert re.fullmatch(
        rf"experts: {number}% found on the device \(by tokens {number}%\); {number} brought there a step, {number} KiB "
        rf"in all; busy: host 0%, device {number}%",
        line,
    )
    ended = command(*argv)  # static: one program a token, of which only sums are known
    assert ended.code == 0 and "experts: " not in ended.err and "policy static" in ended.err


def test_rows_of_a_batch_give_what_each_gives_alone(folder):
    prompts, settings = [[3, 4, 5, 6, 7], list(range(20, 50)), [9]], {"ctx": 64, "policy": "lru", "batch": 2}
    with Engine.from_pretrained(str(folder), vram_budget=budget_of(folder, **settings), **settings) as engine:
        together = engine.generate(prompts, max_new_tokens=6)
        assert all(result.units.live_per_token == 8 for result in together)
        assert [engine.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts] == [
            result.token_ids for result in together
        ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--policy", "dynamic"), "places neurons; for experts there are auto, scan"),
        (("--sparsity", "predicted"), "routing is never altered"),
        (("--sparsity", "exact"), "needs true zeros"),
        (("--assign", "fastest"), "--assign must be one of auto, scan"),
        (("--policy", "scan", "--host-mode", "ffi"), "needs --host-mode threads"),
    ],
)
def test_what_cannot_be_done_is_one_line(command, folder, argv, words):  # noqa: F811
    ended = command("generate", "--model", folder, *IDS, *argv)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert words in ended.err


# --- plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        (FAMILY, "static"),
        (FAMILY, "scan"),
        *(pytest.param(f, p, marks=pytest.mark.slow) for f in ("deepseek_v2", "granitemoe") for p in ("none", "lru")),
    ],
)
def test_the_smallest_budget_works_and_a_byte_less_does_not(zoo, family, policy):
    folder, settings = str(zoo.folder(family)), {"ctx": 64, "policy": policy}
    least = plan_for(folder, EngineConfig(vram_budget="64MiB", **settings)).smallest_budget_bytes
    with Engine.from_pretrained(folder, vram_budget=least, **settings) as engine:
        assert engine.generate([1, 2, 3, 4], max_new_tokens=3).memory["peak_bytes"] <= least
        assert engine.stats()["pool_slots"] == [0] * len(read_spec(zoo.folder(family)).unit_layers)
    with pytest.raises(FitError, match=f"--vram-budget {least}B or more"):
        Engine.from_pretrained(folder, vram_budget=least - 1, **settings)


def test_a_plan_counts_experts_and_needs_no_weights(command, zoo, folder, budget, tmp_path):  # noqa: F811
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    argv = ("plan", "--model", tmp_path, "--ctx", 64)
    plan = command(*argv, "--policy", "lru", "--vram-budget", budget, "--json").json("plan")
    assert (plan["units"]["total"], plan["units"]["resident"], plan["expected"]) == (12, 6, None)
    assert plan["device"]["pool"] == 6 * folder_unit_bytes(folder) and plan["device"]["staging"] > 0
    assert plan["host"]["units"] == 12 * folder_unit_bytes(folder) and plan["host"]["statistics"] > 0
    assert "12 of 12" in command(*argv).out
    there = command(*argv, "--hardware", "pc-low", "--dtype", "float16", "--json")
    assert there.json("plan")["expected"] is None and "no speed is simulated" in there.err


def test_a_large_mixture_is_planned_from_its_config(command, tmp_path):  # noqa: F811
    """Qwen3-30B-A3B, whose numbers are published; without one program of 48 layers that takes 2 seconds."""
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
    shape |= {"num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    shape |= {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}
    config = json.loads((make_moe(tmp_path / "tiny", "qwen3_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    argv = ("--model", tmp_path, "--vram-budget", "12GiB", "--dtype", "bfloat16", "--policy", "scan", "--json")
    plan = command("plan", *argv).json("plan")
    unit = 3 * 768 * 2048 * 2
    assert plan["host"]["units"] == 48 * 128 * unit and plan["device"]["pool"] == plan["units"]["resident"] * unit
    parameters = sum(map(plan["host"].get, ("units", "embed"))) / 2 + plan["device"]["dense"] / 2
    assert parameters == pytest.approx(30.5e9, rel=0.01) and 0.1 < plan["units"]["share"] < 0.2


# --- statistics, loss, verification -------------------------------------------------------------------------------


def chosen_by(folder, windows):
    """[M, E] share of tokens at each expert and how many there are, by a plain float64 router on what it reads."""
    config, tensors = json.loads((folder / "config.json").read_text()), {}
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    counts, tokens = np.zeros((2, config["num_experts"])), 0

    def watch(layer, h):
        if layer != 1:
            logits = h @ tensors[f"model.layers.{layer}.mlp.gate.weight"].astype(np.float64).T
            ids = np.argsort(-logits, axis=1)[:, : config["num_experts_per_tok"]]
            np.add.at(counts[layer // 2], ids, 1)

    for window in windows:
        forward(config, tensors, window[:-1], watch)
        tokens += len(window) - 1
    return counts / tokens, tokens


def test_statistics_count_the_tokens_of_every_expert(command, folder, budget, tmp_path):  # noqa: F811
    ids, out = np.random.default_rng(5).integers(0, 90, 45), tmp_path / "s.npz"
    np.save(tmp_path / "ids.npy", ids)
    argv = ("collect-stats", "--model", folder, "--ids", tmp_path / "ids.npy", "--ctx", 20, "--out", out)
    found = command(*argv, "--vram-budget", budget, "--json").json("collect-stats")
    assert (found["unit_kind"], found["layers"], found["cosine"]) == ("expert", [0, 2], None)
    assert found["density"] == pytest.approx([4 / 6] * 2) and found["wanted_density"] is None
    frequency = read_stats(out, read_spec(folder), Checkpoint.open(folder).fingerprint())
    expected, tokens = chosen_by(folder, [ids[:20], ids[20:40], ids[40:]])
    assert found["tokens"] == tokens == 19 + 19 + 4
    np.testing.assert_allclose(frequency, expected, atol=1e-6)
    order = np.argsort(-expected, axis=1, kind="stable")
    with Engine.from_pretrained(str(folder), ctx=64, vram_budget=budget, stats=str(out), policy="lru") as engine:
        pool = engine._parts.pool
        for layer in range(2):
            assert set(pool.bucket(layer)) == set(order[layer, : pool.slots[layer]])
    table = command(*argv, "--vram-budget", budget)
    assert table.code == 0 and [line.split()[0] for line in table.out.splitlines()] == ["layer", "0", "2"]


@pytest.mark.parametrize("flags", [("--policy", "lru"), ("--cache", "lfu")])
def test_statistics_are_collected_while_nothing_moves(command, folder, tmp_path, flags):  # noqa: F811
    ended = command("collect-stats", "--model", folder, "--ids", "random:20", "--out", tmp_path / "s.npz", *flags)
    assert (ended.code, ended.err.count("\n")) == (2, 1)


def test_a_loss_is_that_of_the_float64_forward(command, folder, zoo, budget, tmp_path):  # noqa: F811
    ids = np.random.default_rng(6).integers(0, 90, 30)
    np.save(tmp_path / "ids.npy", ids)
    argv = ("evaluate", "--model", folder, "--ids", tmp_path / "ids.npy", "--ctx", 32, "--vram-budget", budget)
    (row,) = command(*argv, "--json").json("evaluate")["rows"]
    logits = family_logits(folder, ids[:-1])
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(29), ids[1:]]
    assert row["loss_nats"] == pytest.approx(losses.mean(), rel=1e-5)
    assert (row["sparsity"], row["tokens"]) == ("dense", 29)
    assert row["density"] == row["density_layers_ge_1"] == pytest.approx(4 / 6)
    assert row["random_mask_loss"] is None and row["no_ffn_loss"] is None and row["recall"] is None
    told = command(*argv).err
    assert "exact is left out: silu" in told and "predicted is left out: the routing" in told
    for flags in (("--sparsity", "predicted"), ("--sparsity", "dense,predicted")):
        refused = command(*argv, *flags)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert "never altered" in refused.err


@pytest.mark.slow
def test_experts_with_true_zeros_have_two_equal_rows(command, zoo):  # noqa: F811
    folder = zoo.folder("qwen3_moe", hidden_act="relu")
    dense, exact = command("evaluate", "--model", folder, "--ids", "random:20", "--json").json("evaluate")["rows"]
    assert (dense["sparsity"], exact["sparsity"]) == ("dense", "exact")
    assert dense["loss_nats"] == pytest.approx(exact["loss_nats"], rel=1e-6) and exact["density"] == 3 / 8


def test_verify_reports_like_any_model(command, folder):  # noqa: F811
    config = EngineConfig(ctx=32, host_mode="threads", policy="none", vram_budget="64MiB")
    some = plan_for(str(folder), config).smallest_budget_bytes + 7 * folder_unit_bytes(folder)
    argv = ("--model", folder, "--dtype", "float32", "--host-mode", "threads", "--ctx", 32, "--vram-budget", f"{some}B")
    report = command("verify", *argv, "--json").json("verify")
    assert report["passed"] and report["tokens"] == 32
    assert [run["passed"] for run in report["runs"]] == [True, True, None]
    assert "experts beside the rest, and this takes 12 at once" in report["runs"][2]["skipped"]


def test_streams_are_refused(folder):
    with Engine.from_pretrained(str(folder), ctx=64) as engine, pytest.raises(UsageError, match="without streams"):
        engine.watch(lambda seen: None, streams=True)
