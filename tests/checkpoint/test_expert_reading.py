"""Experts, routers and shared experts out of files of both kinds: each by itself, or a layer's in two tensors."""

import json
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.bundles import load_store
from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.mapping import (
    attention_parts,
    declared_parameters,
    expected,
    is_merged,
    is_unit_part,
    prefix_of,
    routing_parts,
    tensor_name,
)
from dynajax.checkpoint.spec import spec_of
from dynajax.errors import ModelError, NumericalError
from dynajax.testing.mixtures import MIXTURES, make_moe, merge_experts

FILE = "model.safetensors"
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
APART = [name for name in MIXTURES if name != "granitemoe"]  # published with each expert by itself


def bundle(spec, dtype="float32"):
    return np.full((spec.units, 3, spec.unit_rows, spec.hidden), np.nan, TYPES[dtype])


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_names_and_shapes(family, merged):
    config = MIXTURES[family].config()
    spec, written = spec_of(config, family), MIXTURES[family].tensors(config)
    written = merge_experts(written) if merged else written
    prefix = prefix_of(written, spec)
    assert is_merged(written, spec, prefix) == merged
    named = {
        tensor_name(*key[:1], spec, key[1], merged=merged): shape
        for key, shape in expected(spec, merged=merged).items()
    }
    assert named == {name: value.shape for name, value in written.items()}
    assert declared_parameters(spec) == sum(value.size for value in written.values())


@pytest.mark.parametrize(
    ("family", "parameters", "sizes"),
    [
        ("mixtral", 46_702_792_704, (4096, 32, 32, 8, 32_000, 8, 2, 14336)),
        ("qwen3_moe", 30_532_122_624, (2048, 48, 32, 4, 151_936, 128, 8, 6144)),
        ("qwen2_moe", 14_315_784_192, (2048, 24, 16, 16, 151_936, 60, 4, 5632)),
        ("olmoe", 6_919_161_856, (2048, 16, 16, 16, 50_304, 64, 8, 1024)),
        ("granitemoe", 1_334_628_352, (1024, 24, 16, 8, 49_155, 32, 8, 512)),
        ("deepseek_v2-lite", 15_706_484_224, (2048, 27, 16, 16, 102_400, 64, 6, 10944)),
        ("deepseek_v2", 235_741_434_880, (5120, 60, 128, 128, 102_400, 160, 6, 12288)),
    ],
)
def test_published_models_by_their_published_sizes(family, parameters, sizes):
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    count = next(n for n in ("num_experts", "num_local_experts", "n_routed_experts") if n in MIXTURES[family].base)
    config = dict(zip((*names, count, "num_experts_per_tok", "intermediate_size"), sizes, strict=True))
    config |= {
        "qwen3_moe": {"moe_intermediate_size": 768, "head_dim": 128},
        "qwen2_moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "mlp_only_layers": []},
        "deepseek_v2-lite": {"moe_intermediate_size": 1408, "kv_lora_rank": 512},
        "deepseek_v2": {"moe_intermediate_size": 1536, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": 8},
    }.get(family, {})
    if "deepseek" in family:
        config |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    spec = spec_of(MIXTURES[family].config(**config), family)
    assert declared_parameters(spec) == parameters
    assert sum(math.prod(shape) for shape in expected(spec).values()) == parameters


def test_units_are_what_goes_into_the_arenas(tmp_path):
    for merged in (False, True):
        checkpoint = Checkpoint.open(make_moe(tmp_path / str(merged), "qwen2_moe", merged=merged))
        spec = checkpoint.spec
        inside = [stored for (part, _), stored in checkpoint.tensors.items() if is_unit_part(part, spec)]
        assert sum(stored.nbytes for stored in inside) == load_store(checkpoint, "float32").nbytes


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("family", APART)
def test_experts_of_every_file_in_every_type(tmp_path, family, target):
    folder = make_moe(tmp_path / "apart", family)
    tensors = load_file(folder / FILE)
    files = [Checkpoint.open(folder), Checkpoint.open(make_moe(tmp_path / "merged", family, merged=True))]
    at, names = "mlp.experts", ("gate_proj", "up_proj", "down_proj")
    if family.startswith("mixtral"):
        at, names = "block_sparse_moe.experts", ("w1", "w3", "w2")
    for checkpoint in files:
        out = bundle(checkpoint.spec, target)
        for layer in checkpoint.spec.unit_layers:
            checkpoint.fill_bundle(layer, out)
            for expert in range(checkpoint.spec.units):
                for part, name in enumerate(names):
                    stored = tensors[f"model.layers.{layer}.{at}.{expert}.{name}.weight"].astype(TYPES[target])
                    np.testing.assert_array_equal(out[expert, part], stored.T if part == 2 else stored)


@pytest.mark.parametrize("merged", [False, True])
def test_granites_experts(tmp_path, merged):
    checkpoint = Checkpoint.open(make_moe(tmp_path, "granitemoe", merged=merged))
    tensors, out = load_file(tmp_path / FILE), bundle(checkpoint.spec)
    both, down = (
        ("experts.gate_up_proj", "experts.down_proj") if merged else ("input_linear.weight", "output_linear.weight")
    )
    for layer in range(3):
        at = f"model.layers.{layer}.block_sparse_moe."
        checkpoint.fill_bundle(layer, out)
        np.testing.assert_array_equal(out[:, :2].reshape(6, 52, 40), tensors[at + both])
        np.testing.assert_array_equal(out[:, 2].swapaxes(1, 2), tensors[at + down])
        router = tensors[at + ("router.weight" if merged else "router.layer.weight")]
        np.testing.assert_array_equal(checkpoint.routing(layer, "float32")["router"], router)


@pytest.mark.parametrize("merged", [False, True])
def test_what_every_token_gets(tmp_path, merged):
    """Router, shared expert and its share; in the layer without experts its FFN. Columns of down are rows."""
    checkpoint = Checkpoint.open(make_moe(tmp_path, "qwen2_moe", merged=merged))
    tensors = load_file(tmp_path / FILE)
    for layer in range(3):
        at = f"model.layers.{layer}.mlp."
        shared = f"{at}shared_expert." if layer != 1 else at
        wanted = {part: tensors[f"{shared}{part}_proj.weight"] for part in ("gate", "up", "down")}
        wanted["down"] = wanted["down"].T
        if layer != 1:
            wanted |= {"router": tensors[f"{at}gate.weight"], "mix": tensors[f"{at}shared_expert_gate.weight"]}
        found = checkpoint.routing(layer, "bfloat16")
        assert found.keys() == wanted.keys() == routing_parts(checkpoint.spec, layer).keys()
        for part, value in wanted.items():
            np.testing.assert_array_equal(found[part], value.astype(TYPES["bfloat16"]))


def test_deepseeks_router_stays_float32(tmp_path):
    checkpoint = Checkpoint.open(make_moe(tmp_path, "deepseek_v2-lite"))
    found, tensors = checkpoint.routing(1, "bfloat16"), load_file(tmp_path / FILE)
    assert found["router"].dtype == np.float32 and found["gate"].dtype == TYPES["bfloat16"]
    np.testing.assert_array_equal(found["router"], tensors["model.layers.1.mlp.gate.weight"])
    wanted = tensors["model.layers.1.mlp.shared_experts.down_proj.weight"].T
    np.testing.assert_array_equal(checkpoint.routing(1, "float32")["down"], wanted)


@pytest.mark.parametrize("family", ["deepseek_v2-lite", "deepseek_v2"])
def test_latents_are_cut_up(tmp_path, family):
    """kv_b_proj holds, head after head, the rows that make its key and those that make its value."""
    checkpoint = Checkpoint.open(make_moe(tmp_path, family))
    tensors = load_file(tmp_path / FILE)
    for layer in range(3):
        at, found = f"model.layers.{layer}.self_attn.", checkpoint.attention(layer, "float32")
        assert tuple(sorted(found)) == attention_parts(checkpoint.spec)
        both = tensors[f"{at}kv_b_proj.weight"].reshape(4, 24, 18)
        np.testing.assert_array_equal(found["key_up"], both[:, :14].reshape(-1, 18))
        np.testing.assert_array_equal(found["value_up"], both[:, 14:].reshape(-1, 18))
        np.testing.assert_array_equal(found["kv_down"], tensors[f"{at}kv_a_proj_with_mqa.weight"])
        assert ("q_up" in found) == (family == "deepseek_v2") == ("q" not in found)


def test_a_dense_model_routes_nothing(tmp_path):
    from dynajax.testing import TINY, make_checkpoint

    assert Checkpoint.open(make_checkpoint(tmp_path, TINY)).routing(0, "float32") == {}


def test_one_store_has_an_arena_for_each_layer_with_experts(tmp_path):
    checkpoint, seen = Checkpoint.open(make_moe(tmp_path, "qwen2_moe")), []
    store = load_store(checkpoint, "bfloat16", seen.append)
    store.check()
    assert seen == [0, 2] and [arena.shape for arena in store.arenas] == [(6, 3, 20, 40)] * 2
    assert store.unit_bytes == 3 * 20 * 40 * 2
    out = bundle(checkpoint.spec, "bfloat16")
    for arena, layer in zip(store.arenas, checkpoint.spec.unit_layers, strict=True):
        checkpoint.fill_bundle(layer, out)
        np.testing.assert_array_equal(arena, out)


def test_wrong_destinations_are_the_callers_mistake(tmp_path):
    checkpoint = Checkpoint.open(make_moe(tmp_path, "qwen2_moe"))
    with pytest.raises(ValueError, match=r"layer must be one that has experts, \(0, 2\), got 1"):
        checkpoint.fill_bundle(1, bundle(checkpoint.spec))
    with pytest.raises(ValueError, match=r"out must have the shape \(6, 3, 20, 40\)"):
        checkpoint.fill_bundle(0, np.empty((76, 3, 1, 40), np.float32))
    with pytest.raises(ValueError, match="layer must be from 0 to 2, got 3"):
        checkpoint.routing(3, "float32")


# --- what is wrong with a file ------------------------------------------------------------------------------------


def rewritten(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    return folder


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("merged", [False, True])
def test_one_bad_value_is_found_and_its_expert_named(tmp_path, merged, value):
    name = "model.layers.1.mlp.experts.gate_up_proj" if merged else "model.layers.1.mlp.experts.5.up_proj.weight"

    def damage(tensors):
        (tensors[name][5, 24:] if merged else tensors[name])[3, 7] = value

    checkpoint = Checkpoint.open(rewritten(make_moe(tmp_path, "qwen3_moe", merged=merged), damage))
    out = bundle(checkpoint.spec)
    checkpoint.fill_bundle(0, out)
    with pytest.raises(NumericalError) as caught:
        checkpoint.fill_bundle(1, out)
    assert (f"{name}[11] holds NaN" if merged else f"{name} holds NaN") in str(caught.value)  # gates and ups, by turns


def test_float16_overflow(tmp_path):
    def grow(tensors):
        tensors["model.layers.2.mlp.experts.down_proj"][4, 5, 6] = 1e6

    checkpoint = Checkpoint.open(rewritten(make_moe(tmp_path, "olmoe", merged=True), grow))
    with pytest.raises(NumericalError, match=r"experts.down_proj\[4\] holds 1e\+06, beyond float16's 65504"):
        checkpoint.fill_bundle(2, bundle(checkpoint.spec, "float16"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.2.mlp.experts.7.up_proj.weight"),
            "1 tensors are missing: model.layers.2.mlp.exp",
        ),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), "1 tensors are missing: model.layers.0.mlp.gate.weight"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.8.up_proj.weight": np.zeros((24, 40), "f4")}),
            "1 tensors are unknown: model.layers.0.mlp.experts.8.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.down_proj.weight": np.zeros((24, 40), "f4")}),
            "experts.3.down_proj.weight (24, 40), expected (40, 24)",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": np.zeros((8, 48, 40), "f4")}),
            "1 tensors are unknown: model.layers.0.mlp.experts.gate_up_proj",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.weight": np.zeros((8, 40), "i4")}),
            "model.layers.1.mlp.gate.weight I32, expected F32/",
        ),
    ],
)
def test_every_tensor_is_checked(tmp_path, change, named):
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(rewritten(make_moe(tmp_path, "qwen3_moe"), change))
    assert named in str(caught.value) and str(caught.value).isprintable()


def test_merged_experts_of_another_number(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe", merged=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 7}))
    with pytest.raises(ModelError, match=r"down_proj \(8, 40, 24\), expected \(7, 40, 24\)"):
        Checkpoint.open(folder)


MEASURE = """
import sys
from pathlib import Path
from dynajax.bundles import load_store
from dynajax.checkpoint import Checkpoint

def kib(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0])

before = kib("VmRSS:")
store = load_store(Checkpoint.open(sys.argv[1]), "bfloat16")
print((kib("VmHWM:") - before) * 1024, store.nbytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_experts_are_in_memory_once(tmp_path, merged):
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 256, "num_experts": 40, "vocab_size": 500, "head_dim": 32}
    folder = make_moe(tmp_path, "qwen3_moe", merged=merged, dtype="bfloat16", **sizes)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    grown, taken = map(int, done.stdout.split())
    assert taken > 180e6 and grown <= taken + 16 * 2**20
