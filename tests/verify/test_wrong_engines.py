"""Whatever an engine holds or computes wrongly is found, and named."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.config import Activation, Rope
from dynajax.engine import planning
from dynajax.verify import checking
from tests.verify.cases import FILE, HOST, THREADS, checked, damage_reads

# --- wrong weights ------------------------------------------------------------------------------------------------


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
