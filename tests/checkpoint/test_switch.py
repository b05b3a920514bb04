"""Switch Transformers: what config.json is taken for, what of it is refused, and where the tensors lie."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.checkpoint.aliases import HUB, runnable
from dynajax.checkpoint.mapping import declared_parameters, expected
from dynajax.checkpoint.spec import spec_of
from dynajax.config import EncoderSpec, ExpertSpec, ModelSpec, RouterSpec
from dynajax.errors import ModelError
from dynajax.testing.switch import SWITCH, make_switch


def config_of(folder, **changes):
    kept = {key: value for key, value in SWITCH.config(**changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_it_is_read_as_what_it_is(tmp_path):
    router = RouterSpec(experts=4, top_k=1, float32=True)
    assert read_spec(config_of(tmp_path)) == ModelSpec(
        layers=8,
        hidden=32,
        ffn=44,
        heads=5,
        kv_heads=5,
        head_dim=6,
        vocab=96,
        layout="switch",
        gated=False,
        norm_eps=1e-6,
        rope=None,
        attention_scale=1.0,
        logit_scale=32**-0.5,
        tied=True,
        max_positions=512,
        eos_ids=(1,),
        experts=ExpertSpec(router=router, width=44, layers=(1, 3, 5, 7), capacity=64),
        encoder=EncoderSpec(layers=4, start_id=0, buckets=12, max_distance=40),
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_decoder_layers": ...}, {"layers": 8}),
        ({"num_decoder_layers": 3, "decoder_sparse_step": 1}, {"layers": 7, "unit_layers": (1, 3, 4, 5, 6)}),
        ({"encoder_sparse_step": ..., "num_sparse_encoder_layers": 4}, {"unit_layers": (0, 1, 2, 3, 5, 7)}),
        ({"encoder_sparse_step": ..., "num_sparse_encoder_layers": 0}, {"unit_layers": (1, 5, 7)}),
        ({"encoder_sparse_step": 3}, {"unit_layers": (1, 5, 7)}),
        ({"encoder_sparse_step": 0}, {"unit_layers": (5, 7)}),
        ({"n_positions": 256}, {"max_positions": 256}),
        ({"tie_word_embeddings": True}, {"tied": True}),
    ],
    ids=str,
)
def test_variants(tmp_path, changes, found):
    spec = read_spec(config_of(tmp_path, **changes))
    assert {name: getattr(spec, name) for name in found} == found


def test_decoding_starts_with_padding_if_the_file_says_nothing(tmp_path):
    spec = read_spec(config_of(tmp_path, decoder_start_token_id=..., pad_token_id=7))
    assert spec.encoder is not None and spec.encoder.start_id == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router_bias": True}, "router_bias true is not implemented"),
        ({"router_dtype": "bfloat16"}, "router_dtype 'bfloat16' is not implemented"),
        ({"is_gated_act": True}, "is_gated_act true is not implemented"),
        ({"dense_act_fn": "gelu_new"}, "dense_act_fn 'gelu_new': not supported"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False is not implemented"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings false is not implemented"),
        ({"num_selected_experts": 2}, "num_selected_experts 2 is not implemented"),
        ({"expert_capacity": ...}, "expert_capacity must be an integer"),
        ({"num_experts": ...}, "num_experts must be an integer"),
        ({"encoder_sparse_step": 0, "decoder_sparse_step": 0}, "no layer has experts"),
        ({"encoder_sparse_step": ..., "num_sparse_encoder_layers": 5}, "num_sparse_encoder_layers must be"),
        ({"decoder_start_token_id": ..., "pad_token_id": ...}, "decoder_start_token_id must be a token id"),
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets 7 must be even"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, changes, words):
    with pytest.raises(ModelError) as caught:
        read_spec(config_of(tmp_path, **changes))
    assert words in str(caught.value)


def test_every_tensor_is_found_and_read(tmp_path):
    folder = make_switch(tmp_path, seed=3)
    checkpoint, stored = Checkpoint.open(folder), load_file(folder / "model.safetensors")
    spec = checkpoint.spec
    assert checkpoint.parameters == sum(value.size for value in stored.values()) == declared_parameters(spec)
    assert len(expected(spec)) == len(stored)
    for layer, name in ((0, "encoder.block.0"), (3, "encoder.block.3"), (4, "decoder.block.0"), (6, "decoder.block.2")):
        parts = checkpoint.attention(layer, "float32")
        at = f"{name}.layer."
        np.testing.assert_array_equal(parts["q"], stored[f"{at}0.SelfAttention.q.weight"])
        np.testing.assert_array_equal(parts["ffn_norm"], stored[f"{at}{1 + (layer > 3)}.layer_norm.weight"])
        first = f"{name.split('.')[0]}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        np.testing.assert_array_equal(parts["relative"], stored[first])
        assert ("cross_q" in parts) == (layer > 3)
        if layer > 3:
            np.testing.assert_array_equal(parts["cross_k"], stored[f"{at}1.EncDecAttention.k.weight"])
    np.testing.assert_array_equal(checkpoint.encoder_norm("float32"), stored["encoder.final_layer_norm.weight"])
    units = np.empty((4, 2, 44, 32), np.float32)
    checkpoint.fill_bundle(5, units)
    np.testing.assert_array_equal(units[2, 0], stored["decoder.block.1.layer.2.mlp.experts.expert_2.wi.weight"])
    np.testing.assert_array_equal(units[3, 1], stored["decoder.block.1.layer.2.mlp.experts.expert_3.wo.weight"].T)
    plain = checkpoint.routing(4, "float32")
    np.testing.assert_array_equal(plain["up"], stored["decoder.block.0.layer.2.mlp.wi.weight"])
    router = checkpoint.routing(1, "bfloat16")["router"]
    assert router.dtype == np.float32
    np.testing.assert_array_equal(router, stored["encoder.block.1.layer.1.mlp.router.classifier.weight"])


def test_copies_of_the_embedding_are_no_trouble(tmp_path):
    """Published files hold one table under four names."""
    folder = make_switch(tmp_path, seed=3)
    stored = load_file(folder / "model.safetensors")
    names = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    save_file(stored | {name: stored["shared.weight"].copy() for name in names}, folder / "model.safetensors")
    assert Checkpoint.open(folder).parameters == sum(value.size for value in stored.values())


def test_it_has_an_alias():
    assert HUB["switch-base-8"] == "google/switch-base-8" and "switch-base-8" in runnable()


def test_switch_base_8_by_its_published_sizes():
    sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12}
    sizes |= {"num_experts": 8, "vocab_size": 32128, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6}
    sizes |= {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    spec = spec_of(SWITCH.config(**sizes), Path("config.json"))
    attention, ffn, norm = 4 * 768 * 768, 2 * 768 * 3072, 768
    layers = 12 * (attention + 2 * norm) + 12 * (2 * attention + 3 * norm) + 12 * ffn + 12 * 8 * ffn + 12 * 8 * 768
    assert declared_parameters(spec) == layers + 32128 * 768 + 2 * norm + 2 * 32 * 12
