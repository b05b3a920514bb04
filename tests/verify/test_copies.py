"""Bytes that are not those that were written, and other copies of the same weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.checksums import write_checksums
from dynajax.convert.gguf import convert_gguf
from dynajax.errors import MismatchError
from dynajax.testing import TINY, make_checkpoint, random_tensors
from tests.gguf_maker import SPEC as GGUF_SPEC
from tests.gguf_maker import make_gguf
from tests.verify.cases import FILE, HOST, checked

# --- files --------------------------------------------------------------------------------------------------------


def test_bytes_that_changed_since_they_were_written_are_named(tmp_path):
    folder = convert_gguf(make_gguf(tmp_path / "m.gguf", random_tensors(GGUF_SPEC, seed=7)), tmp_path / "out")
    assert checked(folder, **HOST).checksums == ()
    path, name = folder / FILE, "model.layers.1.mlp.up_proj.weight"
    stored = Checkpoint.open(folder).tensors["up", 1]
    with path.open("r+b") as file:
        file.seek(stored.offset + 100)
        byte = file.read(1)[0]
        file.seek(stored.offset + 100)
        file.write(bytes([byte ^ 1]))
    report = checked(folder, **HOST)
    assert report.checksums == (name,) and not report.passed
    assert report.runs[0].passed  # it computes what the file says
    write_checksums(folder, {"model.norm.weight": "0" * 64, "gone.weight": "1" * 64})
    assert checked(folder, **HOST).checksums == ("gone.weight", "model.norm.weight")


# --- another copy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["llama", "llama-float16", "llama-bfloat16"])
@pytest.mark.parametrize("model", ["llama", "llama-float16", "llama-bfloat16"])
def test_roundings_of_the_same_weights_agree(folders, model, other):
    report = checked(folders[model], against=folders[other], **HOST)
    assert report.passed and report.against == str(folders[other])


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> dict[str, Path]:
    """GGUF files of one model, and float16 folders converted from them."""
    root, tensors = tmp_path_factory.mktemp("copies"), random_tensors(GGUF_SPEC, seed=7)
    made = {kind: make_gguf(root / f"{kind}.gguf", tensors, kind=kind) for kind in ("F32", "Q8_0", "Q4_1")}
    for kind in ("Q8_0", "Q4_1"):
        made[f"{kind} folder"] = convert_gguf(made[kind], root / kind, dtype="float16")
    return made


@pytest.mark.parametrize(
    ("model", "other"),
    [
        ("Q4_1", "Q4_1 folder"),
        ("Q4_1 folder", "Q4_1"),
        ("Q8_0 folder", "Q8_0"),
        ("F32", "Q8_0"),  # within the 2 % that a quantised copy may differ by
        ("Q8_0", "F32"),
    ],
)
def test_a_quantised_copy_agrees(copies, model, other):
    assert checked(copies[model], against=copies[other], **HOST).passed


def test_a_coarse_copy_agrees_as_far_as_the_tolerance_goes(copies):
    report = checked(copies["F32"], against=copies["Q4_1"], **HOST)
    (run,) = report.runs
    assert not run.passed and all(found.values > found.of // 2 for found in run.tensors)
    assert 0.02 < max(found.error for found in run.tensors) < 0.1
    assert checked(copies["F32"], against=copies["Q4_1"], tolerance=0.1, **HOST).passed


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_one_flipped_bit_of_an_exponent_is_found_in_a_copy(copies, tmp_path, kind):
    folder = shutil.copytree(copies[f"{kind} folder"], tmp_path / "damaged")
    tensors = load_file(folder / FILE)
    name = "model.layers.1.self_attn.q_proj.weight"  # whose rows the GGUF has in another order
    tensors[name].view(np.uint16)[7, 3] ^= np.uint16(1 << 10)  # twice as large, or half
    save_file(tensors, folder / FILE)
    for model, other in ((folder, copies[kind]), (copies[kind], folder)):
        (run,) = checked(model, against=other, **HOST).runs
        assert [(found.tensor, found.values) for found in run.tensors] == [(name, 1)]
        assert run.first_layer == 1 and run.passed is False


def test_another_model_is_no_copy(folders, tmp_path):
    for other in (folders["qwen2"], folders["llama-linear"], make_checkpoint(tmp_path, TINY)):
        with pytest.raises(MismatchError, match="differ in shape"):
            checked(folders["llama"], against=other, **HOST)
