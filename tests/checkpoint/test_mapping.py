"""The table of tensor names against what `make_checkpoint` and `families.write` write by themselves."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dynajax.checkpoint import mapping
from dynajax.checkpoint.mapping import (
    attention_parts,
    declared_parameters,
    expected,
    fused_rows,
    is_ignorable,
    prefix_of,
    shape_of,
    tensor_name,
    unit_parts,
)
from dynajax.checkpoint.spec import spec_of
from dynajax.models.decoder import AttentionBlock
from dynajax.testing import TINY, TINY_GQA, TINY_TIED, TINY_WIDE_HEADS, random_tensors
from dynajax.testing.families import FAMILIES


def published(family, **overrides):
    """The spec of a family's config and the shapes of its tensors, predictors left out."""
    config = FAMILIES[family].config(**overrides)
    shapes = FAMILIES[family].shapes(config)
    return spec_of(config, family), {name: shape for name, shape in shapes.items() if "predictor" not in name}


def named(spec, prefix=None):
    return {tensor_name(part, spec, layer, prefix): shape for (part, layer), shape in expected(spec).items()}


@pytest.mark.parametrize("spec", [TINY, TINY_GQA, TINY_TIED, replace(TINY_WIDE_HEADS, kv_heads=1, layers=3)])
def test_names_and_shapes(spec):
    written = {name: tensor.shape for name, tensor in random_tensors(spec, seed=0).items()}
    assert named(spec) == written
    assert declared_parameters(spec) == sum(tensor.size for tensor in random_tensors(spec, seed=0).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    spec, written = published(family)
    assert named(spec, prefix_of(written, spec)) == written
    assert declared_parameters(spec) == sum(np.prod(shape) for shape in written.values())
    assert len(expected(spec)) == len(named(spec))  # no two parts share a name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"attention_bias": True}),
        ("falcon-40b", {"num_kv_heads": 1}),
        ("falcon-40b", {"num_kv_heads": 4, "ffn_hidden_size": 72}),
        ("opt", {"tie_word_embeddings": True}),
        ("minicpm", {"tie_word_embeddings": False}),
    ],
)
def test_their_variants(family, changes):
    spec, written = published(family, **changes)
    assert named(spec) == written


def test_relullama_7b_by_its_published_sizes():
    spec = replace(TINY, layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
    assert declared_parameters(spec) == 6_738_415_616
    assert len(expected(spec)) == 32 * 9 + 3


def test_opt_125m_by_its_published_sizes():
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "ffn_dim": 3072}
    sizes |= {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768}
    assert declared_parameters(published("opt", **sizes)[0]) == 125_239_296


def test_falcon_7b_by_its_published_sizes():
    sizes = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024}
    assert declared_parameters(published("falcon-7b", **sizes, num_kv_heads=71)[0]) == 6_921_720_704


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_parts_are_the_blocks_parameters(family):
    spec, _ = published(family)
    block = nnx.eval_shape(lambda: AttentionBlock(spec, nnx.Rngs(0), jnp.float32))
    state = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    assert tuple(sorted(state)) == attention_parts(spec)
    assert spec.block_parameters == sum(leaf.size for leaf in state.values())
    for part, leaf in state.items():
        assert part in "qkv" or leaf.shape == shape_of(part, spec), part  # fused ones are stored in another shape


def test_units():
    assert unit_parts(TINY) == ("gate", "up", "down")
    assert unit_parts(published("opt")[0]) == ("up", "down")


def test_names():
    assert tensor_name("down", TINY, 12) == "model.layers.12.mlp.down_proj.weight"
    opt, falcon = published("opt")[0], published("falcon-7b")[0]
    assert tensor_name("up_bias", opt, 3) == "model.decoder.layers.3.fc1.bias"
    assert tensor_name("ffn_norm", opt, 0) == "model.decoder.layers.0.final_layer_norm.weight"
    assert tensor_name("norm", opt) == "model.decoder.final_layer_norm.weight"
    assert tensor_name("q", falcon, 3) == "transformer.h.3.self_attention.query_key_value.weight"
    assert tensor_name("attention_norm_bias", falcon, 1) == "transformer.h.1.input_layernorm.bias"
    assert is_ignorable("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_ignorable("model.layers.7.mlp.predictor.fc2.weight")
    assert not is_ignorable("model.layers.0.self_attn.q_proj.bias")
    assert not is_ignorable("model.layers.7.mlp.predictor.fc2.bias")


PREFIXES = {  # layout -> prefix -> what stands before lm_head
    "llama": {
        "model.": "",
        "": "",
        "module.model.": "module.",
        "_orig_mod.model.": "_orig_mod.",
        "language_model.model.": "language_model.",
        "model.language_model.": "model.language_model.",
    },
    "opt": {"model.decoder.": "", "decoder.": "", "": "", "module.model.decoder.": "module.", "model.": ""},
    "falcon": {"transformer.": "", "": "", "_orig_mod.transformer.": "_orig_mod."},
}


@pytest.mark.parametrize(("layout", "prefix"), [(layout, prefix) for layout in PREFIXES for prefix in PREFIXES[layout]])
def test_prefixes(layout, prefix):
    spec = replace(published({"falcon": "falcon-7b"}.get(layout, layout))[0], tied=False)
    names = [tensor_name(part, spec, layer, prefix) for part, layer in expected(spec)]
    assert prefix_of(names, spec) == prefix
    assert tensor_name("head", spec, prefix=prefix) == PREFIXES[layout][prefix] + "lm_head.weight"
    assert names[0] == prefix + mapping.PLACES[layout]["embed"].name


@pytest.mark.parametrize("prefix", ["model.model.", "encoder.", "xmodel.", "model_", "language_model.module.model."])
def test_prefixes_that_nobody_knows(prefix):
    names = [tensor_name(part, TINY, layer, prefix) for part, layer in expected(TINY)]
    assert prefix_of(names, TINY) == "model."  # and so every name is missing


def test_two_embeddings_are_no_prefix():
    names = ["model.embed_tokens.weight", "language_model.model.embed_tokens.weight"]
    assert prefix_of(names, TINY) == "model."


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4), (6, 3)])
def test_fused_rows(heads, kv_heads):
    """Group after group: some query heads, their key head, their value head; every row belongs to one part."""
    spec = replace(TINY, layout="falcon", heads=heads, kv_heads=kv_heads, head_dim=8)
    shared, size = heads // kv_heads, 8
    names = [
        (part, head)
        for group in range(kv_heads)
        for part, head in [*(("q", group * shared + i) for i in range(shared)), ("k", group), ("v", group)]
        for _ in range(size)
    ]
    assert shape_of("q", spec)[0] == len(names)
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        rows = [row for taken in fused_rows(part, spec) for row in names[taken]]
        assert rows == [(part, head) for head in range(count) for _ in range(size)]
