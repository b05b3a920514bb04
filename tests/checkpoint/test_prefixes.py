"""Names that saving a model changes, and tensors beside the weights: what they are taken for."""

import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint
from dynajax.errors import ModelError
from dynajax.testing import TINY, make_checkpoint
from dynajax.testing.families import write

FILE = "model.safetensors"


@pytest.fixture
def tiny(tmp_path):
    return make_checkpoint(tmp_path, TINY)


@pytest.mark.parametrize("family", ["sparselm", "minicpm", "opt", "falcon-40b", "falcon-7b"])
def test_every_tied_family_may_carry_a_head(tmp_path, family, caplog):
    folder = write(tmp_path, family)
    plain = Checkpoint.open(folder)
    save_file({**load_file(folder / FILE), "lm_head.weight": np.zeros((96, 32), np.float32)}, folder / FILE)
    with caplog.at_level(logging.INFO):
        with_head = Checkpoint.open(folder)
    assert "lm_head.weight is stored although config.json ties it to the embedding: ignored" in caplog.messages
    assert with_head.parameters == plain.parameters and with_head.head("float32") is None


def renamed(folder, old, new):
    """Every tensor `old`... gets the name `new`..., but for the head, which keeps its own."""
    tensors = load_file(folder / FILE)
    heads = {name: t for name, t in tensors.items() if name.startswith("lm_head")}
    moved = {new + name.removeprefix(old): t for name, t in tensors.items() if name not in heads}
    assert len(moved) + len(heads) == len(tensors)
    save_file(moved | heads, folder / FILE)


PREFIXES = {
    "sparselm": ("model.", ["", "module.model.", "_orig_mod.model.", "language_model.model.", "model.language_model."]),
    "opt": ("model.decoder.", ["", "decoder.", "module.model.decoder.", "_orig_mod.model.decoder."]),
    "falcon-40b": ("transformer.", ["", "module.transformer."]),
}


@pytest.mark.parametrize(("family", "prefix"), [(name, one) for name, (_, all_) in PREFIXES.items() for one in all_])
def test_what_saving_put_before_the_names_changes_nothing(tmp_path, family, prefix):
    as_published = Checkpoint.open(write(tmp_path / "a", family))
    folder = write(tmp_path / "b", family)
    renamed(folder, PREFIXES[family][0], prefix)
    found = Checkpoint.open(folder)
    assert found.tensors.keys() == as_published.tensors.keys()
    assert {stored.name for stored in found.tensors.values()} == load_file(folder / FILE).keys()
    np.testing.assert_array_equal(found.embed("float32"), as_published.embed("float32"))
    for part, value in as_published.attention(2, "float32").items():
        np.testing.assert_array_equal(found.attention(2, "float32")[part], value)


@pytest.mark.parametrize("prefix", ["module.", "language_model."])
def test_the_head_has_the_wrappers_prefix_too(tiny, prefix):
    save_file({prefix + name: tensor for name, tensor in load_file(tiny / FILE).items()}, tiny / FILE)
    assert Checkpoint.open(tiny).head("float32").shape == (96, 32)


@pytest.mark.parametrize("prefix", ["encoder.", "model.model.", "transformer."])
def test_prefixes_that_nobody_knows_are_refused(tiny, prefix):
    renamed(tiny, "model.", prefix)
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(tiny)
    text = str(caught.value)
    assert "20 tensors are missing: model.embed_tokens.weight" in text
    assert f"20 tensors are unknown: {prefix}embed_tokens.weight" in text


def test_predictors_beside_the_weights_are_ignored(tmp_path):
    with_predictors = Checkpoint.open(write(tmp_path / "a", "turbosparse"))
    assert with_predictors.parameters == Checkpoint.open(write(tmp_path / "b", "bamboo")).parameters
