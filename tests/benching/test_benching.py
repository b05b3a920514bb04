"""The fingerprint of a result, the kernel's figures, and the bytes that a step of a mixture cannot do without."""

import os
import subprocess
import sys

import numpy as np
import pytest

from dynajax.benching import kernel, session
from dynajax.benching.kernel import KINDS, LayerShape, arena_of, inputs, jobs_of, kernel_figures
from dynajax.benching.machine import SETTINGS, command, commit, machine
from dynajax.benching.worker import run_round
from dynajax.budget import dense_bytes, kv_bytes, unit_bytes
from dynajax.checkpoint import read_spec
from dynajax.testing import make_moe
from hostcompute import HostPool

SHAPE = LayerShape(neurons=70, parts=3, width=64)


# --- the fingerprint ---


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/usr/bin/python3", "-m", "benchmarks.kernel", "--a b"], "python -m benchmarks.kernel '--a b'"),
        (["python", "/home/me/.venv/bin/dynajax", "bench"], "dynajax bench"),
        (["python"], "python"),
    ],
)
def test_the_command_as_it_was_typed(monkeypatch, argv, words):
    monkeypatch.setattr(sys, "orig_argv", argv)
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("SECRET", "3")
    assert command() == f"OMP_NUM_THREADS=2 {words}"


def test_a_changed_tree_is_told(tmp_path):
    assert commit(tmp_path) == "unknown"

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    first = commit(tmp_path)
    (tmp_path / "other").write_text("not tracked")
    assert commit(tmp_path) == first and "+" not in first
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{first}+changes"
    (tmp_path / "below").mkdir()
    assert commit(tmp_path / "below") == "unknown", "what is installed there is another project's"


def test_the_machine_is_told():
    told = machine()
    assert told["machine"] and 1 <= told["cores"] <= told["cpus"] and told["memory_bytes"] > 2**28
    assert isinstance(told["shared"], bool) and told["last_level_cache_bytes"] >= 2**20


# --- the kernel ---


@pytest.mark.parametrize("dtype", KINDS)
def test_every_neuron_of_the_arena_is_live(dtype):
    x = inputs(SHAPE)
    arena = arena_of(SHAPE, dtype, x)
    with HostPool(1) as pool:
        assert kernel.check(pool, x, (arena, np.arange(70, dtype=np.int32))) < kernel.MOST_ERROR
        with pytest.raises(RuntimeError, match="the kernel is wrong"):
            kernel.check(pool, -x, (arena, np.arange(70, dtype=np.int32)))


def test_calls_go_through_all_rows_before_any_comes_again():
    jobs = jobs_of([np.zeros(1), np.ones(1)], 70)
    first = [next(jobs) for _ in range(2 * kernel.SETS)]
    for arena in range(2):
        rows = np.concatenate([units for which, units in first if which[0] == arena])
        assert sorted(rows) == list(range(70))


def test_figures_of_a_small_layer(monkeypatch):
    monkeypatch.setattr(kernel, "last_level_cache_bytes", lambda: 2**14)
    told = kernel_figures(SHAPE, "float16", 1, 3)
    assert told["call_bytes"] == 7 * 3 * 64 * 2
    for name in ("read", "ffn", "gather"):
        assert 0 < told[name]["min_us"] <= told[name]["p10_us"] <= told[name]["median_us"]
    assert told["gb_s"] == told["ffn"]["median_gb_s"]


# --- the floor ---


def test_the_floor_of_a_mixture_is_what_a_token_goes_to(tmp_path):
    folder = make_moe(tmp_path / "moe", "mixtral")
    spec = read_spec(folder)
    settings = {"model": str(folder), "ctx": 16, "batch": 1, "threads": 1, "dtype": "float32", "policy": "static"}
    found = run_round(session.open_session(settings).session, [[5, 6, 7, 8]], [[9], [10]])
    experts = spec.experts
    assert experts is not None
    routed = len(spec.unit_layers) * experts.router.top_k * unit_bytes(spec, "float32")
    fixed = dense_bytes(spec, "float32")
    cached = found["floor_bytes"] - fixed - routed
    assert 0 < cached <= kv_bytes(spec, "float32", 16, 1)
