"""Engines that are right pass; whatever an engine holds or computes wrongly is found, and named."""

import gc
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.checksums import write_checksums
from dynajax.config import Activation, EngineConfig, Rope
from dynajax.convert.gguf import convert_gguf
from dynajax.engine import planning
from dynajax.errors import MismatchError, NumericalError, UsageError
from dynajax.testing import TINY, make_checkpoint, random_tensors
from dynajax.testing.families import FAMILIES, write
from dynajax.verify import Report, Settings, checking, verify
from tests.gguf_maker import SPEC as GGUF_SPEC
from tests.gguf_maker import make_gguf

FILE = "model.safetensors"
THREADS = {"dtype": "float32", "host_mode": "threads"}
HOST = {**THREADS, "policy": "none"}
SHIPPED = Path(__file__).parents[2] / "dynajax" / "assets" / "tiny-relullama" / FILE


def checked(model, *, against=None, tolerance=None, **config) -> Report:
    against = None if against is None else str(against)
    settings = Settings(model=str(model), config=EngineConfig(**config), against=against, tolerance=tolerance)
    return verify(settings, lambda stage, done, total: None, lambda run: None)


def ways(report):
    return [(run.placement, run.dtype, run.host_dtype, run.host_mode) for run in report.runs]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model of every family, and of some a copy in 16 bits."""
    root = tmp_path_factory.mktemp("families")
    made = {family: write(root / family, family) for family in FAMILIES}
    made |= {f"llama-{dtype}": write(root / dtype, "llama", dtype=dtype) for dtype in ("float16", "bfloat16")}
    return made


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


# --- wrong weights ------------------------------------------------------------------------------------------------


def damage_reads(monkeypatch, method, layer, choose, change):
    """`choose(result)` of what `Checkpoint.method` gives a loader of this layer is changed in place."""
    read = getattr(Checkpoint, method)

    def damaged(self, *args, **more):
        result = read(self, *args, **more)
        if layer is None or args[0] == layer:
            change(choose(result, *args, **more))
        return result

    monkeypatch.setattr(Checkpoint, method, damaged)


def one_value(array):
    array[(2,) * array.ndim] += 3


DENSE = [
    # family, method, layer, part of the result, tensor, first layer whose FFN reads something else
    ("llama", "attention", 1, "k", "model.layers.1.self_attn.k_proj.weight", 1),
    ("llama", "attention", 2, "o", "model.layers.2.self_attn.o_proj.weight", 2),
    ("llama", "attention", 0, "ffn_norm", "model.layers.0.post_attention_layernorm.weight", 0),
    ("llama-biases", "attention", 1, "v_bias", "model.layers.1.self_attn.v_proj.bias", 1),
    ("llama-biases", "attention", 1, "down_bias", "model.layers.1.mlp.down_proj.bias", 1),
    ("qwen3", "attention", 1, "q_norm", "model.layers.1.self_attn.q_norm.weight", 1),
    ("falcon-40b", "attention", 1, "v", "transformer.h.1.self_attention.query_key_value.weight", 1),
    ("falcon-7b", "attention", 1, "attention_norm_bias", "transformer.h.1.input_layernorm.bias", 1),
    ("opt", "attention", 1, "attention_norm_bias", "model.decoder.layers.1.self_attn_layer_norm.bias", 1),
    ("opt-bare", "norm", None, 1, "decoder.final_layer_norm.bias", None),
    ("llama", "norm", None, 0, "model.norm.weight", None),
    ("llama", "head", None, None, "lm_head.weight", None),
    ("llama", "embed", None, None, "model.embed_tokens.weight", None),
    ("sparselm", "embed", None, None, "model.embed_tokens.weight", None),  # tied
    ("opt", "positions", None, None, "model.decoder.embed_positions.weight", 0),
]


@pytest.mark.parametrize(("family", "method", "layer", "part", "tensor", "first"), DENSE)
def test_one_wrong_value_outside_the_units_is_named(folders, monkeypatch, family, method, layer, part, tensor, first):
    damage_reads(
        monkeypatch, method, layer, lambda result, *_, **__: result if part is None else result[part], one_value
    )
    report = checked(folders[family], **THREADS)
    assert not report.passed and len(report.ran) == 3
    untied_table = method in ("embed", "positions") and family == "llama"
    for run in report.runs:
        assert run.passed is False
        (found,) = run.tensors
        assert (found.tensor, found.layer, found.values) == (tensor, layer, 1)
        assert found.where == ("host" if untied_table else "device")
        assert run.first_layer == first or method == "embed"


UNITS = [
    ("llama", 1, 0, 5, "model.layers.1.mlp.gate_proj.weight"),
    ("llama", 0, 1, 5, "model.layers.0.mlp.up_proj.weight"),
    ("llama", 1, 2, 5, "model.layers.1.mlp.down_proj.weight"),
    ("llama-biases", 1, 1, -32, "model.layers.1.mlp.up_proj.bias"),
    ("opt", 1, 0, 5, "model.decoder.layers.1.fc1.weight"),
    ("opt", 1, 0, -32, "model.decoder.layers.1.fc1.bias"),
    ("falcon-7b", 1, 1, 5, "transformer.h.1.mlp.dense_4h_to_h.weight"),
]


@pytest.mark.parametrize("unit", [6, 7])
@pytest.mark.parametrize(("family", "layer", "part", "column", "tensor"), UNITS)
def test_one_wrong_value_of_a_unit_is_named_wherever_it_lies(
    folders, monkeypatch, unit, family, layer, part, column, tensor
):
    def change(out):
        out[unit, part, 0, column] += 3

    damage_reads(monkeypatch, "fill_bundle", layer, lambda _, __, out: out, change)
    report = checked(folders[family], **THREADS)
    places = {"host": ["host"], "half": ["host"] + ["device"] * (unit == 6), "device": ["host", "device"]}
    for run in report.runs:
        assert run.passed is False and run.first_layer == layer
        assert [(found.tensor, found.layer, found.values) for found in run.tensors] == [(tensor, layer, 1)] * len(
            places[run.placement]
        )
        assert [found.where for found in run.tensors] == places[run.placement]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_row_that_went_wrong_in_one_place_is_found_there(folders, monkeypatch, dtype, where):
    """After loading: an arena row, or a row of the pool, whose slots hold units 0, 2, 4, ... in half."""

    def damaged(*args):
        parts = load_parts(*args)
        if where == "host":
            parts.store.arenas[1][4, 2] *= 2
        elif parts.pool.slots[1]:
            gate, up, down = parts.pool._parts[1]
            parts.pool._parts[1] = (gate, up, down.at[2].set(down[2] ^ 1 if dtype == "bfloat16" else 2 * down[2]))
        return parts

    load_parts = checking.load_parts
    monkeypatch.setattr(checking, "load_parts", damaged)
    report = checked(folders["llama"], host_mode="threads", dtype=dtype)
    for run in report.runs:
        found = [(found.tensor, found.where, found.values) for found in run.tensors]
        spared = where == "device" and run.placement == "host"
        assert run.passed is spared
        assert found == ([] if spared else [("model.layers.1.mlp.down_proj.weight", where, 32)])


def test_a_resident_engine_is_looked_into_too(folders, monkeypatch):
    def change(out):
        out[6, 0, 0, 5] += 3

    damage_reads(monkeypatch, "fill_bundle", 1, lambda _, __, out: out, change)
    every = checking._ways
    monkeypatch.setattr(checking, "_ways", lambda *args: every(*args)[-1:])
    (run,) = checked(folders["llama"], dtype="float32").runs
    assert (run.host_mode, run.hidden_error, run.first_layer, run.passed) == ("resident", None, 1, False)
    (found,) = run.tensors
    assert (found.tensor, found.where) == ("model.layers.1.mlp.gate_proj.weight", "device")


def test_the_names_are_those_of_the_file(folders, monkeypatch, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "bare")
    tensors = load_file(folder / FILE)
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, folder / FILE)
    assert checked(folder, **HOST).passed
    damage_reads(monkeypatch, "norm", None, lambda result, *_: result[0], one_value)
    assert checked(folder, **HOST).runs[0].tensors[0].tensor == "norm.weight"


# --- wrong computations -------------------------------------------------------------------------------------------


def miscomputed(monkeypatch, **changes):
    read = planning.read_spec
    monkeypatch.setattr(planning, "read_spec", lambda folder: replace(read(folder), **changes))


@pytest.mark.parametrize(
    ("family", "changes", "first"),
    [
        ("llama", {"rope": Rope(theta=11_000.0)}, 0),
        ("llama", {"norm_eps": 1e-3}, 0),
        ("llama", {"activation": Activation(kind="silu")}, 1),
        ("sparsellama", {"activation": Activation(kind="fatrelu", threshold=0.012)}, 1),
        ("minicpm", {"residual_scale": 0.8}, 0),
        ("minicpm", {"logit_scale": 0.26}, None),
        ("mistral", {"window": 40}, 0),
    ],
)
def test_a_wrong_computation_is_found_where_it_starts_and_no_weight_is_blamed(
    folders, monkeypatch, family, changes, first
):
    miscomputed(monkeypatch, **changes)
    (run,) = checked(folders[family], **HOST).runs
    assert (run.passed, run.tensors, run.first_layer) == (False, (), first)
    assert run.logits_error > run.allowed


def test_a_wrong_computation_of_one_side_is_seen_where_that_side_computes(folders, monkeypatch):
    from dynajax.engine.cold import ColdSide

    run = ColdSide.run
    monkeypatch.setattr(ColdSide, "run", lambda self, layer, h: run(self, layer, h) * np.float32(1.01))
    assert [run.passed for run in checked(folders["llama"], **THREADS).runs] == [False, False, True]


@pytest.mark.parametrize(
    ("dtype", "factor", "computed"),
    [
        ("float32", 1.001, True),
        ("float32", 1.01, True),
        ("float16", 1.005, False),
        ("float16", 1.03, True),
        ("bfloat16", 1.03, False),
        ("bfloat16", 1.08, True),
    ],
)
def test_how_large_an_error_of_a_norm_has_to_be(folders, monkeypatch, dtype, factor, computed):
    """By what is computed; the weight itself is always found."""

    def change(norm):
        norm *= factor

    damage_reads(monkeypatch, "attention", 1, lambda result, *_: result["ffn_norm"], change)
    (run,) = checked(folders["llama"], dtype=dtype, host_mode="threads", policy="none").runs
    assert (run.hidden_error > run.allowed) == computed
    assert run.passed is False and run.first_layer == 1
    assert [found.tensor for found in run.tensors] == ["model.layers.1.post_attention_layernorm.weight"]
    assert run.tensors[0].error == pytest.approx(factor - 1, rel=0.3)


# --- files --------------------------------------------------------------------------------------------------------


def test_bytes_that_changed_since_they_were_written_are_named(tmp_path):
    folder = convert_gguf(make_gguf(tmp_path / "m.gguf", random_tensors(GGUF_SPEC, seed=7)), tmp_path / "out")
    assert checked(folder, **HOST).checksums == ()
    path, name = folder / FILE, "model.layers.1.mlp.up_proj.weight"
    stored = Checkpoint.open(folder).tensors["up", 1]
    with path.open("r+b") as file:
        file.seek(stored.offset + 100)
        byte = file.read(1)[0]
        file.seek(stored.offset + 100)
        file.write(bytes([byte ^ 1]))
    report = checked(folder, **HOST)
    assert report.checksums == (name,) and not report.passed
    assert report.runs[0].passed  # it computes what the file says
    write_checksums(folder, {"model.norm.weight": "0" * 64, "gone.weight": "1" * 64})
    assert checked(folder, **HOST).checksums == ("gone.weight", "model.norm.weight")


# --- another copy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["llama", "llama-float16", "llama-bfloat16"])
@pytest.mark.parametrize("model", ["llama", "llama-float16", "llama-bfloat16"])
def test_roundings_of_the_same_weights_agree(folders, model, other):
    report = checked(folders[model], against=folders[other], **HOST)
    assert report.passed and report.against == str(folders[other])


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> dict[str, Path]:
    """GGUF files of one model, and float16 folders converted from them."""
    root, tensors = tmp_path_factory.mktemp("copies"), random_tensors(GGUF_SPEC, seed=7)
    made = {kind: make_gguf(root / f"{kind}.gguf", tensors, kind=kind) for kind in ("F32", "Q8_0", "Q4_1")}
    for kind in ("Q8_0", "Q4_1"):
        made[f"{kind} folder"] = convert_gguf(made[kind], root / kind, dtype="float16")
    return made


@pytest.mark.parametrize(
    ("model", "other"),
    [
        ("Q4_1", "Q4_1 folder"),
        ("Q4_1 folder", "Q4_1"),
        ("Q8_0 folder", "Q8_0"),
        ("F32", "Q8_0"),  # within the 2 % that a quantised copy may differ by
        ("Q8_0", "F32"),
    ],
)
def test_a_quantised_copy_agrees(copies, model, other):
    assert checked(copies[model], against=copies[other], **HOST).passed


def test_a_coarse_copy_agrees_as_far_as_the_tolerance_goes(copies):
    report = checked(copies["F32"], against=copies["Q4_1"], **HOST)
    (run,) = report.runs
    assert not run.passed and all(found.values > found.of // 2 for found in run.tensors)
    assert 0.02 < max(found.error for found in run.tensors) < 0.1
    assert checked(copies["F32"], against=copies["Q4_1"], tolerance=0.1, **HOST).passed


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_one_flipped_bit_of_an_exponent_is_found_in_a_copy(copies, tmp_path, kind):
    folder = shutil.copytree(copies[f"{kind} folder"], tmp_path / "damaged")
    tensors = load_file(folder / FILE)
    name = "model.layers.1.self_attn.q_proj.weight"  # whose rows the GGUF has in another order
    tensors[name].view(np.uint16)[7, 3] ^= np.uint16(1 << 10)  # twice as large, or half
    save_file(tensors, folder / FILE)
    for model, other in ((folder, copies[kind]), (copies[kind], folder)):
        (run,) = checked(model, against=other, **HOST).runs
        assert [(found.tensor, found.values) for found in run.tensors] == [(name, 1)]
        assert run.first_layer == 1 and run.passed is False


def test_another_model_is_no_copy(folders, tmp_path):
    for other in (folders["qwen2"], folders["llama-linear"], make_checkpoint(tmp_path, TINY)):
        with pytest.raises(MismatchError, match="differ in shape"):
            checked(folders["llama"], against=other, **HOST)


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
