"""Switch Transformers: the float64 reference, against transformers (slow) and by what defines it."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dynajax.checkpoint import Checkpoint
from dynajax.reference import encoded_forward
from dynajax.reference.switch import bucket, is_sparse
from dynajax.testing.switch import SWITCH, make_switch, switch_logits

RNG = np.random.default_rng(7)
SOURCE, TARGET = RNG.integers(2, 96, 70), np.concatenate([[0], RNG.integers(2, 96, 40)])


def made(**changes):
    config = SWITCH.config(**changes)
    return config, SWITCH.tensors(config, seed=3)


def changed(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def test_every_tensor_matters():
    config, tensors = made(expert_capacity=16)
    expected = encoded_forward(config, tensors, SOURCE, TARGET)
    rng = np.random.default_rng(1)
    for name, value in tensors.items():
        disturbed = value * (1 + 0.3 * rng.standard_normal(value.shape))
        assert changed(encoded_forward(config, tensors | {name: disturbed}, SOURCE, TARGET), expected) > 1e-3, name


@pytest.mark.parametrize(
    "setting",
    [
        {"expert_capacity": 5},
        {"relative_attention_max_distance": 20},
        {"layer_norm_epsilon": 1e-1},
    ],
    ids=str,
)
def test_every_setting_matters(setting):
    config, tensors = made()
    expected = encoded_forward(config, tensors, SOURCE, TARGET)
    assert changed(encoded_forward({**config, **setting}, tensors, SOURCE, TARGET), expected) > 1e-3


def test_full_experts_take_the_first_tokens_of_a_sequence():
    """Tokens that come later change nothing for those before them, and full experts leave the residual alone."""
    config, tensors = made(expert_capacity=4)
    once = partial(encoded_forward, config, tensors, SOURCE, at_once=True)
    np.testing.assert_allclose(once(TARGET[:30]), once(TARGET)[:30], rtol=1e-9, atol=1e-9)
    stepwise = encoded_forward(config, tensors, SOURCE, TARGET)
    np.testing.assert_allclose(stepwise[:4], once(TARGET)[:4], rtol=1e-9, atol=1e-9)
    assert changed(once(TARGET), stepwise) > 1e-2


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [1, 3]),
        ({"encoder_sparse_step": 1}, [0, 1, 2, 3]),
        ({"encoder_sparse_step": 0}, []),
        ({"encoder_sparse_step": None}, [1, 3]),
        ({"encoder_sparse_step": None, "num_sparse_encoder_layers": 0}, [1]),
        ({"encoder_sparse_step": None, "num_sparse_encoder_layers": 3}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_which_layers_have_experts(changes, layers):
    config = SWITCH.config(**changes)
    assert [layer for layer in range(4) if is_sparse(config, "encoder", layer)] == layers


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most"), [(32, 128), (12, 40), (8, 100), (16, 17)])
def test_buckets_are_those_of_transformers(count, most):
    torch = pytest.importorskip("torch")
    switch = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    config = {"relative_attention_num_buckets": count, "relative_attention_max_distance": most}
    apart = np.arange(-300, 301)
    for causal in (False, True):
        found = [bucket(config, int(d), causal=causal) for d in apart]
        theirs = switch.SwitchTransformersAttention._relative_position_bucket
        expected = theirs(torch.tensor(apart), bidirectional=not causal, num_buckets=count, max_distance=most)
        assert found == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert_capacity": 5},
        {"num_decoder_layers": 3, "decoder_sparse_step": 1, "num_sparse_decoder_layers": 3},
        {"encoder_sparse_step": 3},
        {"decoder_sparse_step": ..., "encoder_sparse_step": ..., "num_sparse_decoder_layers": 0},
    ],
    ids=str,
)
def test_transformers_agrees(tmp_path, changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    dropped = [name for name, value in changes.items() if value is ...]
    settings: dict[str, Any] = {name: None if value is ... else value for name, value in changes.items()}
    folder = make_switch(tmp_path, seed=3, **settings)
    if dropped:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in dropped}))
    load = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind = transformers.SwitchTransformersForConditionalGeneration
    model, info = kind.from_pretrained(folder, output_loading_info=True, **load)
    assert not any(info.values()), info
    with torch.no_grad():
        given = {"input_ids": torch.tensor(SOURCE[None, :]), "decoder_input_ids": torch.tensor(TARGET[None, :])}
        found = model.eval()(**given).logits[0].numpy()
    expected = switch_logits(folder, SOURCE, TARGET, at_once=True)
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-5 * np.abs(expected).max())
    near(found, expected)
    with pytest.raises(AssertionError):
        near(found, np.roll(expected, 1, axis=1))
    if "expert_capacity" in changes:  # and it is more than a little
        plain = switch_logits(folder, SOURCE, TARGET)
        assert changed(expected, plain) > 1e-2


@pytest.mark.slow
def test_what_transformers_saves_is_read(tmp_path):
    """With its own spelling of config.json, and the one table under one name."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = make_switch(tmp_path / "made", seed=3)
    kind = transformers.SwitchTransformersForConditionalGeneration
    kind.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    made, saved = Checkpoint.open(folder), Checkpoint.open(tmp_path / "saved")
    assert made.spec == saved.spec and made.parameters == saved.parameters
    np.testing.assert_array_equal(
        switch_logits(folder, SOURCE, TARGET), switch_logits(tmp_path / "saved", SOURCE, TARGET)
    )


def test_the_file_is_what_the_family_says(tmp_path):
    folder = make_switch(tmp_path, seed=3)
    config, tensors = made()
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == tensors.keys()
    np.testing.assert_array_equal(
        switch_logits(folder, SOURCE[:9], TARGET[:3]), encoded_forward(config, tensors, SOURCE[:9], TARGET[:3])
    )
