"""The synthetic checkpoint: an ordinary model folder whose neurons fire as often as they were asked to."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import make_checkpoint
from dynajax import Engine
from dynajax.checkpoint import Checkpoint, read_stats
from dynajax.policy.placement import place_static

ROOT = Path(__file__).parents[2]
ACTIVE = 0.125
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny shape as the command writes it."""
    folder = tmp_path_factory.mktemp("synthetic") / "tiny"
    make_checkpoint.main([str(folder), "--shape", "tiny", "--active", str(ACTIVE)])
    return folder


def prompt(seed: int = 0, tokens: int = 32) -> list[int]:
    vocab = make_checkpoint.SHAPES["tiny"].vocab
    return make_checkpoint.topic_ids(np.random.default_rng(seed), 1, tokens, vocab)[0].tolist()


def test_the_folder_opens_as_what_was_asked_for(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.spec == make_checkpoint.SHAPES["tiny"]
    assert {shard.path.name for shard in checkpoint.shards} == {
        f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(stored.nbytes for stored in checkpoint.tensors.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_neurons_fire_as_often_as_asked_while_generating(folder, seed):
    with Engine.from_pretrained(str(folder), vram_budget="7MiB", ctx=256) as engine:
        engine.generate(prompt(seed), max_new_tokens=48, temperature=1.0, seed=seed, ignore_eos=True)
        units = engine.last_result.units
    assert abs(units.density - ACTIVE) <= TOLERANCE


def test_another_activity_is_outside_the_tolerance(tmp_path):
    make_checkpoint.main([str(tmp_path / "denser"), "--shape", "tiny", "--active", str(2 * ACTIVE), "--layers", "2"])
    assert make_checkpoint.check(tmp_path / "denser").means()["active"] > ACTIVE + TOLERANCE


def test_the_statistics_find_the_neurons_worth_holding(folder):
    checkpoint = Checkpoint.open(folder)
    frequency = read_stats(folder / "activations.npz", checkpoint.spec, checkpoint.fingerprint())
    assert frequency.mean() == pytest.approx(ACTIVE, abs=0.005)
    spec = make_checkpoint.SHAPES["tiny"]
    held = place_static(frequency, 1, spec.layers * spec.ffn // 4)
    covered = sum(frequency[layer, bucket].sum() for layer, bucket in enumerate(held.buckets)) / frequency.sum()
    assert covered > 0.75, "a quarter of the neurons should cover about 80 % of the activations"


def test_the_check_reports_what_the_recipe_promises(folder):
    found = make_checkpoint.check(folder).means()
    assert found["active"] == pytest.approx(ACTIVE, abs=TOLERANCE)
    assert found["hot_80"] == pytest.approx(0.23, abs=0.05)
    assert 0.5 < found["adjacent"] < 0.8 and found["cosine"] > 0.9
    assert found["recall"] > 0.8 and found["early_recall"] > 0.7


def test_the_predictor_knows_the_gate_but_for_its_noise(folder):
    predictors = load_file(folder / make_checkpoint.PREDICTORS)
    spec = make_checkpoint.SHAPES["tiny"]
    assert len(predictors) == 2 * spec.layers
    units = np.empty((spec.ffn, 3, 1, spec.hidden), np.float32)
    Checkpoint.open(folder).fill_bundle(1, units)
    fc1, fc2 = (predictors[f"layers.1.{name}.weight"].astype(np.float32) for name in ("fc1", "fc2"))
    half = make_checkpoint.Recipe().rank if spec.hidden >= 4 * 191 else spec.hidden // 4
    product = fc2[:, : half + 1] @ fc1[: half + 1]  # the half for positive parts is the low-rank gate itself
    error = np.linalg.norm(units[:, 0, 0] - product) / np.linalg.norm(units[:, 0, 0])
    assert 0.01 < error < make_checkpoint.Recipe().noise


def test_a_folder_that_holds_something_is_left_alone(folder, capsys):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    with pytest.raises(SystemExit) as error:
        make_checkpoint.main([str(folder), "--shape", "tiny"])
    assert error.value.code == 2 and "not empty" in capsys.readouterr().err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before


@pytest.mark.slow
def test_loading_holds_the_weights_once_in_host_memory(tmp_path):
    """Peak RSS less what the device holds (which is RAM too on the CPU backend): 1.1 x the host's weights + 0.5 GiB."""
    shape = ["--shape", "1.1b", "--layers", "2"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.make_checkpoint", tmp_path / "model", *shape], cwd=ROOT, check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", LOADING, tmp_path / "model"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    peak, on_device, host = (int(word) for word in done.stdout.split()[-3:])
    assert peak - on_device <= 1.10 * host + 2**29
    assert peak - on_device > host, "the host's weights are not in the figure: it measures nothing"


LOADING = """
import sys, jax
from dynajax import Engine

engine = Engine.from_pretrained(sys.argv[1], vram_budget="500MiB", dtype="float32", host_dtype="float16", ctx=256)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024
on_device = sum(array.nbytes for array in jax.live_arrays())
print(peak, on_device, engine.stats()["memory"]["host_bytes"])
"""
