"""Mixtures of experts against the reference: every family passes; what is wrong is named, an expert by its number."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.engine.mixture.cold import ColdExperts
from dynajax.testing import make_moe
from dynajax.testing.mixtures import MIXTURES
from dynajax.verify.comparing import host_types
from tests.verify.cases import FILE, HOST, THREADS, checked, damage_reads


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    made = {family: make_moe(root / family, family) for family in MIXTURES}
    made["merged"] = make_moe(root / "merged", "qwen2_moe", merged=True)
    made["bfloat16"] = make_moe(root / "bfloat16", "qwen2_moe", dtype="bfloat16")
    return made


@pytest.mark.parametrize(
    "family",
    ["qwen2_moe", *(pytest.param(n, marks=pytest.mark.slow) for n in (*MIXTURES, "merged") if n != "qwen2_moe")],
)
def test_every_family_passes(mixtures, family):
    report = checked(mixtures[family], **THREADS)
    assert [run.placement for run in report.ran] == ["host", "half", "device"]
    assert report.passed
    for run in report.runs:
        assert run.hidden_error < 1e-5 and run.logits_error < 1e-5 and run.cosine > 0.999999 and run.same_tokens == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_types_pass(mixtures, dtype):
    report = checked(mixtures["bfloat16"], dtype=dtype, host_mode="threads")
    assert report.passed and len(report.ran) == 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "mixtral"])
def test_every_type_and_host_mode_passes(mixtures, family):
    report = checked(mixtures[family])
    assert report.passed and len(report.ran) == len(report.runs)
    assert {run.host_mode for run in report.runs} >= {"threads", "callback", "resident"}


WRONG = [
    # family, method, layer, of the result, tensor, first layer whose experts read something else
    ("qwen2_moe", "routing", 2, "router", "model.layers.2.mlp.gate.weight", 2),
    ("qwen2_moe", "routing", 0, "mix", "model.layers.0.mlp.shared_expert_gate.weight", 0),
    ("qwen2_moe", "routing", 0, "down", "model.layers.0.mlp.shared_expert.down_proj.weight", 0),
    ("qwen2_moe", "routing", 1, "up", "model.layers.1.mlp.up_proj.weight", 1),  # a layer without experts
    ("deepseek_v2", "routing", 1, "router", "model.layers.1.mlp.gate.weight", 1),
    ("deepseek_v2", "routing", 1, "gate", "model.layers.1.mlp.shared_experts.gate_proj.weight", 1),
    ("deepseek_v2", "attention", 2, "value_up", "model.layers.2.self_attn.kv_b_proj.weight", 2),
    pytest.param(
        *("granitemoe", "routing", 1, "router", "model.layers.1.block_sparse_moe.router.layer.weight", 1),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("family", "method", "layer", "part", "tensor", "first"), WRONG)
def test_one_wrong_value_outside_the_experts_is_named(
    mixtures, monkeypatch, family, method, layer, part, tensor, first
):
    def change(array):
        array[(0,) * array.ndim] += 3

    damage_reads(monkeypatch, method, layer, lambda result, *_, **__: result[part], change)
    (run,) = checked(mixtures[family], **HOST).runs
    assert run.passed is False and run.first_layer == first
    assert [(found.tensor, found.layer, found.values, found.where) for found in run.tensors] == [
        (tensor, layer, 1, "device")
    ]


@pytest.mark.parametrize("expert", [4, 5])
@pytest.mark.parametrize(
    ("family", "layer", "part", "tensor"),
    [
        ("qwen2_moe", 2, 0, "model.layers.2.mlp.experts.{}.gate_proj.weight"),
        ("merged", 2, 1, "model.layers.2.mlp.experts.gate_up_proj[{}].up"),
        ("merged", 0, 2, "model.layers.0.mlp.experts.down_proj[{}]"),
        pytest.param(
            "granitemoe", 1, 2, "model.layers.1.block_sparse_moe.output_linear.weight[{}]", marks=pytest.mark.slow
        ),
    ],
)
def test_one_wrong_value_of_an_expert_is_named_wherever_it_lies(
    mixtures, monkeypatch, family, layer, part, tensor, expert
):
    """In half the pool has the experts 0, 2, 4."""

    def change(out):
        out[expert, part, 3, 5] += 3

    damage_reads(monkeypatch, "fill_bundle", layer, lambda _, __, out: out, change)
    places = {"host": ["host"], "half": ["host"] + ["device"] * (expert == 4), "device": ["host", "device"]}
    for run in checked(mixtures[family], **THREADS).runs:
        found = [(found.tensor, found.layer, found.values, found.where) for found in run.tensors]
        assert found == [(tensor.format(expert), layer, 1, where) for where in places[run.placement]]
        assert run.passed is False and run.first_layer == layer


def test_a_wrong_computation_of_experts_is_seen_where_the_host_computes(mixtures, monkeypatch):
    compute = ColdExperts.run
    monkeypatch.setattr(ColdExperts, "run", lambda self, *args: compute(self, *args) * np.float32(1.01))
    runs = checked(mixtures["qwen2_moe"], **THREADS).runs
    assert [run.passed for run in runs] == [False, False, True]
    assert [run.first_layer for run in runs] == [2, 2, None] and all(run.tensors == () for run in runs)


def test_a_copy_with_merged_experts_agrees_and_a_wrong_one_does_not(mixtures, tmp_path):
    assert checked(mixtures["qwen2_moe"], against=mixtures["merged"], **HOST).passed
    folder = shutil.copytree(mixtures["merged"], tmp_path / "wrong")
    tensors = load_file(folder / FILE)
    tensors["model.layers.2.mlp.experts.down_proj"][3, 1, 1] += 3
    save_file(tensors, folder / FILE)
    (run,) = checked(mixtures["qwen2_moe"], against=folder, **HOST).runs
    assert [found.tensor for found in run.tensors] == ["model.layers.2.mlp.experts.3.down_proj.weight"]


def test_what_lies_on_the_host_is_the_experts_and_the_table(tmp_path):
    from dynajax.checkpoint import Checkpoint

    folder = make_moe(tmp_path, "deepseek_v2-lite")
    tensors = load_file(folder / FILE)
    for name in tensors:
        if ".experts." not in name and "embed" not in name:
            tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, folder / FILE)
    assert host_types(Checkpoint.open(folder)) == {"F32"}
