"""A GGUF file opened as a checkpoint and run by the engine: the numbers of the folder it was made from."""

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.convert.gguf import convert_gguf
from dynajax.errors import ModelError
from dynajax.testing import random_tensors
from tests.gguf_maker import SPEC, make_gguf

TENSORS = random_tensors(SPEC, seed=7)


def same_parts(one, other):
    np.testing.assert_array_equal(one.embed("float32"), other.embed("float32"))
    for layer in range(SPEC.layers):
        for part, value in one.attention(layer, "float32").items():
            np.testing.assert_array_equal(value, other.attention(layer, "float32")[part])
        bundles = [np.empty((SPEC.ffn, 3, 1, SPEC.unit_width), np.float16) for _ in range(2)]
        for checkpoint, bundle in zip((one, other), bundles, strict=True):
            checkpoint.fill_bundle(layer, bundle)
        np.testing.assert_array_equal(*bundles)


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_a_file_and_its_folder_hold_the_same(tmp_path, kind):
    path = make_gguf(tmp_path / "m.gguf", TENSORS, kind=kind)
    folder = convert_gguf(path, tmp_path / "out", dtype="float32")
    one, other = Checkpoint.open(path), Checkpoint.open(folder)
    assert read_spec(path) == one.spec and one.spec.hidden == other.spec.hidden
    assert one.parameters == other.parameters
    same_parts(one, other)
    fingerprint = one.fingerprint()
    assert len(fingerprint) == 64 and fingerprint == Checkpoint.open(path).fingerprint()
    path.write_bytes(path.read_bytes()[:-200] + bytes(200))
    assert Checkpoint.open(path).fingerprint() != fingerprint


def test_the_engine_runs_a_file_as_its_folder(tmp_path):
    path = make_gguf(tmp_path / "m.gguf", TENSORS, kind="Q8_0")
    folder = convert_gguf(path, tmp_path / "out", dtype="float32")
    settings = {"dtype": "float32", "host_dtype": "float32", "ctx": 64}
    found = []
    for model in (path, folder):
        with Engine.from_pretrained(str(model), **settings) as llm:
            found.append(llm.generate([3, 4, 5], max_new_tokens=8).token_ids)
    assert found[0] == found[1] and len(found[0]) > 1


def test_unknown_and_missing_tensors_go_by_their_names(tmp_path):
    lacking = {name: value for name, value in TENSORS.items() if "0.mlp.up_proj" not in name}
    with pytest.raises(ModelError, match="1 tensors are missing: model.layers.0.mlp.up_proj.weight"):
        Checkpoint.open(make_gguf(tmp_path / "a.gguf", lacking))
