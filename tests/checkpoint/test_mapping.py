"""The table of tensor names against what `make_checkpoint` writes by itself."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from dynajax.checkpoint import expected
from dynajax.checkpoint.mapping import ATTENTION_PARTS, declared_parameters, is_ignorable, tensor_name
from dynajax.models.decoder import AttentionBlock
from dynajax.testing import TINY, TINY_GQA, TINY_TIED, TINY_WIDE_HEADS, random_tensors


@pytest.mark.parametrize("spec", [TINY, TINY_GQA, TINY_TIED, replace(TINY_WIDE_HEADS, kv_heads=1, layers=3)])
def test_names_and_shapes(spec):
    written = {name: tensor.shape for name, tensor in random_tensors(spec, seed=0).items()}
    assert expected(spec) == written
    assert declared_parameters(spec) == sum(tensor.size for tensor in random_tensors(spec, seed=0).values())


def test_relullama_7b_by_its_published_sizes():
    spec = replace(TINY, layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
    assert declared_parameters(spec) == 6_738_415_616
    assert len(expected(spec)) == 32 * 9 + 3


def test_attention_parts_are_the_blocks_parameters():
    block = nnx.eval_shape(lambda: AttentionBlock(TINY, nnx.Rngs(0), jnp.float32))
    assert set(nnx.state(block, nnx.Param)) == set(ATTENTION_PARTS)


def test_names():
    assert tensor_name("down", 12) == "model.layers.12.mlp.down_proj.weight"
    assert is_ignorable("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_ignorable("model.layers.0.self_attn.q_proj.bias")
