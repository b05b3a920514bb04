"""Engines that are right pass, in every way of running that there is; none is left open."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.config import EngineConfig
from dynajax.engine import planning
from dynajax.errors import NumericalError, UsageError
from dynajax.testing import TINY
from dynajax.testing.families import FAMILIES, write
from dynajax.verify import Settings, checking, verify
from tests.verify.cases import FILE, HOST, THREADS, checked

SHIPPED = Path(__file__).parents[2] / "dynajax" / "assets" / "tiny-relullama" / FILE


def ways(report):
    return [(run.placement, run.dtype, run.host_dtype, run.host_mode) for run in report.runs]


# --- right engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(folders, family):
    report = checked(folders[family], **THREADS)
    assert ways(report) == [(place, "float32", "float32", "threads") for place in ("host", "half", "device")]
    assert report.passed and len(report.ran) == 3 and report.checksums is None
    for run in report.runs:
        assert run.allowed == 1e-4 and run.hidden_error < 1e-5 and run.logits_error < 1e-5
        assert run.cosine > 0.999999 and run.same_tokens == 1
        assert run.first_layer is None and run.tensors == ()


@pytest.mark.parametrize("family", ["minicpm-llama", pytest.param("opt", marks=pytest.mark.slow)])
def test_every_type_and_host_mode_passes(folders, family):
    """minicpm-llama has a threshold, over which rounding to 16 bits lifts values that should stay below it."""
    report = checked(folders[family])
    assert report.passed and len(report.ran) == len(report.runs)
    assert [way[:2] for way in ways(report)[3:7]] == [
        (place, dtype) for dtype in ("float16", "bfloat16") for place in ("host", "device")
    ]
    whole = {run.host_mode: run for run in report.runs[7:]}
    assert whole.keys() >= {"callback", "resident"} and whole.keys() <= {"callback", "resident", "ffi"}
    assert all(run.hidden_error is None and run.cosine is None for run in whole.values())
    assert {run.allowed for run in report.runs} == {1e-4, 0.02, 0.1}


@pytest.mark.skipif(not SHIPPED.exists(), reason="the model is not in this checkout")
def test_the_shipped_model_passes():
    report = checked("tiny-relullama", **HOST)
    assert report.passed and report.tokens == 48 and report.runs[0].host_dtype == "bfloat16"


@pytest.mark.parametrize(("batch", "ctx", "tokens"), [(2, None, 48), (1, 1, 1)])
def test_batch_and_context_are_the_users(folders, batch, ctx, tokens):
    report = checked(folders["llama"], batch=batch, ctx=ctx, **HOST)
    assert report.passed and report.tokens == tokens


def test_half_means_every_second_unit_of_every_layer(folders, monkeypatch):
    placed = []

    def spied(model, prepared, *more):
        placed.append(prepared.placement)
        return load_parts(model, prepared, *more)

    load_parts = checking.load_parts
    monkeypatch.setattr(checking, "load_parts", spied)
    assert checked(folders["llama"], **THREADS).passed
    assert [placement.slots for placement in placed] == [(0, 0, 0), (40, 40, 40), (80, 80, 80)]
    assert placed[1].cold(2).tolist() == list(range(1, 80, 2))


# --- what is run --------------------------------------------------------------------------------------------------


def chosen(platform="cpu", **config):
    return [
        f"{run.dtype} {run.host_dtype} {run.placement} {run.host_mode}"
        for run in checking._ways(EngineConfig(**config), replace(TINY, dtype="float16"), platform)
    ]


def test_what_the_user_chose_is_not_varied():
    threads = [f"{place} threads" for place in ("host", "half", "device")]
    assert chosen(host_mode="threads", dtype="float16") == [f"float16 float16 {way}" for way in threads]
    assert chosen(host_mode="threads", dtype="float32") == [f"float32 float16 {way}" for way in threads]
    assert chosen(host_mode="callback", policy="none", host_dtype="bfloat16") == [
        "float32 bfloat16 host callback",
        "bfloat16 bfloat16 host callback",
    ]
    assert chosen("gpu") == [
        *(f"float32 float16 {way}" for way in threads),
        *(f"{dtype} {dtype} {place} threads" for dtype in ("float16", "bfloat16") for place in ("host", "device")),
        "float32 float16 half callback",
        "float32 float16 device resident",
    ]
    with pytest.raises(UsageError, match="--host-mode ffi"):
        chosen("gpu", host_mode="ffi")
    with pytest.raises(UsageError, match="--host-dtype bfloat16 cannot fill a float16 pool"):
        chosen(dtype="float16", host_dtype="bfloat16")


def test_a_tolerance_needs_another_copy_and_a_range():
    with pytest.raises(UsageError, match="--tolerance goes with --against"):
        Settings(model="m", config=EngineConfig(), tolerance=0.1)
    for tolerance in (0.0, -1.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="--tolerance must be above 0 and below 1"):
            Settings(model="m", config=EngineConfig(), against="n", tolerance=tolerance)


def test_what_does_not_fit_is_not_run(folders, monkeypatch):
    """A byte less than none of the units need, then a little more than half of them."""
    folder, config = folders["llama"], EngineConfig(ctx=48, **HOST)
    least = planning.plan_for(str(folder), config).smallest_budget_bytes
    report = checked(folder, vram_budget=least - 1, **THREADS)
    assert not report.passed and report.ran == []
    assert all(f"--vram-budget {least}B or more" in run.skipped and run.passed is None for run in report.runs)
    every = checking._ways
    monkeypatch.setattr(checking, "_ways", lambda *args: [*every(*args)[:3], every(*args)[-1]])
    report = checked(folder, vram_budget=least + 3 * 48 * 3 * 32 * 4, dtype="float32")
    assert report.passed and [run.placement for run in report.ran] == ["host", "half"]
    assert [run.host_mode for run in report.runs[2:]] == ["threads", "resident"]
    for run in report.runs[2:]:
        assert "neurons beside the rest, and this takes 240 at once: raise --vram-budget" in run.skipped


def test_weights_beyond_float16_are_no_mistake_of_the_engine(tmp_path):
    folder = write(tmp_path, "llama")
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 70_000
    tensors["model.layers.1.mlp.down_proj.weight"][:, 3] = 0  # or the rounding of this one neuron would be all there is
    save_file(tensors, folder / FILE)
    report = checked(folder, host_mode="threads", policy="none")
    assert report.passed
    assert [run.dtype for run in report.ran] == ["float32", "bfloat16"]
    assert "beyond float16's 65504: use bfloat16 or float32" in report.runs[1].skipped


def test_activations_beyond_float16_are_no_mistake_of_the_engine(folders, monkeypatch):
    def overflown(parts, *more):
        got = checking_trace(parts, *more)
        return replace(got, logits=got.logits * np.float32("nan"))

    checking_trace = checking.trace
    monkeypatch.setattr(checking, "trace", overflown)
    report = checked(folders["llama"], host_mode="threads", policy="none")
    assert [run.passed for run in report.runs] == [False, None, False]
    assert "beyond float16's 65504" in report.runs[1].skipped
    assert report.runs[0].logits_error == np.inf


def test_a_file_with_nan_is_damaged(tmp_path):
    folder = write(tmp_path, "llama")
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, folder / FILE)
    with pytest.raises(NumericalError, match="layers.1.mlp.up_proj.weight holds NaN"):
        checked(folder, **HOST)


# --- one engine after the other -----------------------------------------------------------------------------------


def tasks():
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def test_nothing_is_left_behind(folders, monkeypatch, tmp_path):
    folder = write(tmp_path, "llama")
    tensors = load_file(folder / FILE)
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = 70_000  # float16 fails in the middle of loading
    save_file(tensors, folder / FILE)
    left = []

    def spied(*args):
        gc.collect()
        left.append((tasks(), len(jax.live_arrays())))
        return load_parts(*args)

    def check_all():
        reports = [
            checked(folder, **THREADS),
            checked(folder, **{**THREADS, "dtype": "float16"}),
            checked(folder, **{**HOST, "host_mode": "callback"}),
        ]
        gc.collect()
        left.append((tasks(), len(jax.live_arrays())))
        return [len(report.ran) for report in reports]

    load_parts = checking.load_parts
    monkeypatch.setattr(checking, "load_parts", spied)
    check_all()  # what libraries keep is made here
    threads, arrays = left[-1]
    left.clear()
    assert check_all() == [3, 0, 1]
    assert len(left) == 8  # before each of the seven loads, when the engine before must be gone, and at the end
    assert all(count <= threads and held == arrays for count, held in left)


def test_an_interrupt_between_runs_leaves_no_engine_open(folders):
    class Stop(BaseException):
        pass

    def stop(run):
        raise Stop

    checked(folders["llama"], **THREADS)
    gc.collect()
    before = tasks(), len(jax.live_arrays())
    with pytest.raises(Stop):
        verify(Settings(model=str(folders["llama"]), config=EngineConfig(**THREADS)), lambda *_: None, stop)
    gc.collect()
    assert tasks() <= before[0] and len(jax.live_arrays()) == before[1]


def test_every_stage_is_shown(folders):
    seen = {}
    settings = Settings(model=str(folders["llama"]), config=EngineConfig(**HOST))
    verify(settings, lambda stage, done, total: seen.setdefault(stage, []).append((done, total)), lambda run: None)
    assert seen["reference"] == [(1, 3), (2, 3), (3, 3)]
    assert set(seen["verify"]) == {(0, 1)}


def test_predictions_cannot_be_verified(folders):
    with pytest.raises(UsageError, match="leave --sparsity predicted out"):
        checked(folders["llama"], sparsity="predicted")
