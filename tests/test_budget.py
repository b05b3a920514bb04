"""The accountant's arithmetic against arrays that exist, and the refusal that names the smallest budget."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax import budget
from dynajax.budget import MemoryPlan
from dynajax.checkpoint.spec import spec_of
from dynajax.config import parse_budget
from dynajax.errors import FitError
from dynajax.testing import TINY, TINY_GQA, TINY_TIED, TINY_WIDE_HEADS, random_tensors
from dynajax.testing.mixtures import MIXTURES, merge_experts

SPECS = {
    "plain": TINY,
    "gqa": TINY_GQA,
    "tied": TINY_TIED,
    "wide-heads": replace(TINY_WIDE_HEADS, kv_heads=2),
    "untied-odd": replace(TINY, layers=3, ffn=50, vocab=97),
}
OPT = replace(TINY_TIED, gated=False, norm="layer", rope=None, qkv_bias=True, o_bias=True, ffn_bias=True, layout="opt")
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def tensors_of(spec, dtype):
    """Every tensor of a model file, in a type of the right size."""
    return {name: value.astype(TYPES[dtype]) for name, value in random_tensors(spec, 0).items()}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", SPECS)
def test_weights_add_up(case, dtype):
    spec = SPECS[case]
    tensors = tensors_of(spec, dtype)
    ffn = {name: value for name, value in tensors.items() if ".mlp." in name}
    embed = tensors["model.embed_tokens.weight"].nbytes
    dense = sum(value.nbytes for name, value in tensors.items() if name not in ffn)
    assert budget.dense_bytes(spec, dtype) == (dense if spec.tied else dense - embed)
    assert budget.host_bytes(spec, dtype) == {
        "units": sum(value.nbytes for value in ffn.values()),
        "embed": 0 if spec.tied else embed,
    }
    # gate and up hold a neuron as a row, down as a column
    neuron = [ffn[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    neuron = [part[0] for part in neuron] + [ffn["model.layers.0.mlp.down_proj.weight"][:, 0]]
    assert budget.unit_bytes(spec, dtype) == sum(part.nbytes for part in neuron)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", MIXTURES)
def test_weights_of_a_mixture_add_up(family, dtype):
    """Experts on the host; routers, shared experts and the FFNs of other layers with the rest, some routers float32."""
    config = MIXTURES[family].config()
    spec, tensors = spec_of(config, family), merge_experts(MIXTURES[family].tensors(config))
    size = np.dtype(TYPES[dtype]).itemsize
    experts = sum(value.size for name, value in tensors.items() if ".experts." in name)
    table = tensors["model.embed_tokens.weight"].size
    dense = sum(value.size for value in tensors.values()) - experts - (0 if spec.tied else table)
    routers = sum(value.size for name, value in tensors.items() if name.endswith("mlp.gate.weight"))
    wider = (4 - size) * routers if family.startswith("deepseek") else 0
    assert budget.dense_bytes(spec, dtype) == dense * size + wider
    assert budget.host_bytes(spec, dtype) == {"units": experts * size, "embed": 0 if spec.tied else table * size}
    assert budget.host_bytes(spec, dtype, resident=True)["units"] == 0
    assert budget.unit_bytes(spec, dtype) * spec.units * len(spec.unit_layers) == experts * size


def test_latents_are_cached_once_for_all_heads():
    spec = spec_of(MIXTURES["deepseek_v2"].config(), Path("made"))
    assert budget.kv_bytes(spec, "bfloat16", 256, 3) == 3 * 256 * spec.layers * (18 + 12) * 2
    assert budget.kv_bytes(spec_of(MIXTURES["olmoe"].config(), Path("made")), "float32", 8, 1) == 2 * 8 * 3 * 40 * 4


@pytest.mark.parametrize("dtype", TYPES)
def test_a_resident_model_leaves_no_unit_on_the_host(dtype):
    plain, tied = SPECS["plain"], SPECS["tied"]
    assert budget.host_bytes(plain, dtype, resident=True) == budget.host_bytes(plain, dtype) | {"units": 0}
    assert budget.host_bytes(tied, dtype, resident=True) == {"units": 0, "embed": 0}


@pytest.mark.parametrize("dtype", TYPES)
def test_biases_and_learned_positions_add_up(dtype):
    """opt: two parts, each row with a cache line more; the positions lie where the embeddings do."""
    spec, size = OPT, np.dtype(TYPES[dtype]).itemsize
    positions, table = 512 * 32, 96 * 32
    block = 4 * 32 * 32 + 4 * 32 + 2 * 2 * 32 + 32  # projections and their biases, two norms, the FFN's output bias
    dense = 2 * block + 2 * 32 + table
    assert budget.unit_bytes(spec, dtype) == 2 * (32 + 32) * size
    assert budget.dense_bytes(spec, dtype) == (dense + positions) * size
    assert budget.host_bytes(spec, dtype) == {"units": 2 * 48 * 2 * 64 * size, "embed": 0}
    untied = replace(spec, tied=False)
    assert budget.dense_bytes(untied, dtype) == dense * size
    assert budget.host_bytes(untied, dtype, resident=True) == {"units": 0, "embed": (table + positions) * size}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("ctx", "batch"), [(8, 1), (256, 3)])
def test_caches_add_up(dtype, ctx, batch):
    spec = SPECS["wide-heads"]
    shape = (batch, ctx, spec.kv_heads, spec.head_dim)
    caches = [np.empty(shape, TYPES[dtype]) for _ in ("keys", "values") for _ in range(spec.layers)]
    assert budget.kv_bytes(spec, dtype, ctx, batch) == sum(cache.nbytes for cache in caches)


@pytest.mark.parametrize(("ctx", "batch", "chunk"), [(8, 1, 8), (256, 3, 32)])
@pytest.mark.parametrize("spec", [SPECS["untied-odd"], OPT])
def test_workspace_adds_up(spec, ctx, batch, chunk):
    """Prompt and chunk, or a step's three rows and its logits: the plan grants both, all in float32."""
    width = spec.hidden + (32 if spec is OPT else 0)  # of what the FFN reads and gives
    arrays = [np.empty((ctx, spec.hidden), np.float32), np.empty((chunk, width), np.float32)]
    arrays += [np.empty((batch, size), np.float32) for size in (spec.hidden, width, width)]  # x, h, y
    arrays += [np.empty((batch, spec.vocab), np.float32), np.empty(spec.layers, np.int32)]
    assert budget.workspace_bytes(spec, ctx, batch, chunk) == sum(array.nbytes for array in arrays)


PLAN = MemoryPlan(
    model="m",
    budget_bytes=2_000_000,
    dense=1,
    kv=20,
    predictors=300,
    pool=4_000,
    staging=50_000,
    scratch=600_000,
    margin=1_000_000,
    smallest_budget_bytes=1_650_321,
    host={"units": 5, "embed": 6},
    units_total=80,
    units_resident=20,
)


def test_the_plan_adds_up():
    assert PLAN.plan_bytes == 654_321  # all but the margin
    order = ["dense", "kv", "predictors", "pool", "staging", "scratch", "margin"]
    assert [name for name, _ in PLAN.rows()] == list(PLAN.device) == order
    assert sum(size for _, size in PLAN.rows()) == 1_654_321


def test_the_plan_as_json():
    assert PLAN.to_json() == {
        "model": "m",
        "budget_bytes": 2_000_000,
        "plan_bytes": 654_321,
        "device": dict(PLAN.rows()),
        "host": {"units": 5, "embed": 6},
        "units": {"total": 80, "resident": 20, "share": 0.25},
        "smallest_budget_bytes": 1_650_321,
        "expected": None,
    }


def test_what_is_left_for_the_pool():
    assert budget.pool_budget(100, 60, gpu=False) == 40
    assert budget.pool_budget(60, 60, gpu=False) == 0
    with pytest.raises(FitError):
        budget.pool_budget(59, 60, gpu=False)
    gib = 2**30
    assert budget.pool_budget(8 * gib, gib, gpu=True) == 7 * gib - int(0.03 * 8 * gib) - 64 * 2**20


def test_the_margin():
    """A small share and a constant, but never more than a quarter."""
    assert budget.margin_bytes(10**12, gpu=False) == 0
    assert budget.margin_bytes(10**12, gpu=True) == 3 * 10**10 + 64 * 2**20
    assert budget.margin_bytes(100 * 2**20, gpu=True) == 25 * 2**20
    assert budget.margin_bytes(0, gpu=True) == 0


FIXED = st.one_of(st.integers(1, 2**50), st.integers(1, 2**10), st.integers(2**26, 2**30))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(fixed=FIXED, gpu=st.booleans(), missing=st.integers(1, 2**50))
def test_the_refusal_names_the_smallest_budget_that_works(fixed, gpu, missing):
    """With the margin that the named budget itself will have, not that of the refused one."""
    smallest = budget.smallest_budget(fixed, gpu=gpu)
    spare = 3 if gpu else 1  # the margin is rounded down, the named budget up: two bytes at most
    for short in {spare, max(spare, min(missing, smallest))}:
        with pytest.raises(FitError) as caught:
            budget.pool_budget(smallest - short, fixed, gpu=gpu)
    assert caught.value.exit_code == 4 and str(caught.value).isprintable()
    advice = re.search(r"use --vram-budget (\S+) or more", str(caught.value))
    assert parse_budget(advice[1]) == smallest
    assert 0 <= budget.pool_budget(smallest, fixed, gpu=gpu) < spare


def test_the_refusal_of_a_gpu_budget_takes_the_larger_margin_into_account():
    """The margin of the refused budget would be too small for the larger one that is named."""
    fixed, refused = 1_200_000_000, 2**30
    with pytest.raises(FitError):
        budget.pool_budget(fixed + budget.margin_bytes(refused, gpu=True), fixed, gpu=True)
