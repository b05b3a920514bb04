"""A folder of PyTorch weights becomes a model folder that opens, with the same values."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.checksums import read_checksums
from dynajax.convert.weights import convert_weights
from dynajax.errors import ModelError, NumericalError, StorageError, UsageError
from dynajax.testing import TINY, TINY_TIED, hf_config, random_tensors
from tests.convert.torch_files import Raw, save

ROOT = Path(__file__).parents[2]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def source_of(folder, spec=TINY, *, parts=1, index=True, extra=None, kind=np.float32, config=None):
    """A folder as older models have it."""
    folder.mkdir()
    tensors = {name: value.astype(kind) for name, value in random_tensors(spec, 0).items()} | (extra or {})
    settings = {**hf_config(spec, "new", "float32"), "torch_dtype": "float32", **(config or {})}
    settings.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    (folder / "LICENSE").write_text("free")
    if parts == 1:
        save(folder / "pytorch_model.bin", tensors)
        return folder
    names = [f"pytorch_model-{i + 1:05}-of-{parts:05}.bin" for i in range(parts)]
    homes = {name: names[i * parts // len(tensors)] for i, name in enumerate(tensors)}
    for part in names:
        save(folder / part, {name: tensors[name] for name, home in homes.items() if home == part})
    if index:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def stored(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(("parts", "index"), [(1, False), (3, True), (3, False)])
def test_the_converted_folder_opens(tmp_path, parts, index):
    source = source_of(tmp_path / "in", parts=parts, index=index)
    folder = convert_weights(source, tmp_path / "out")
    checkpoint = Checkpoint.open(folder)
    expected = random_tensors(TINY, 0)
    np.testing.assert_array_equal(checkpoint.embed("float32"), expected[EMBED])
    assert stored(folder).keys() == read_checksums(folder).keys() == expected.keys()
    for name, value in stored(folder).items():
        np.testing.assert_array_equal(value, expected[name])
    assert sorted(p.name for p in folder.iterdir()) == [
        "LICENSE", "checksums.json", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", None])
def test_types(tmp_path, dtype):
    source = source_of(tmp_path / "in", kind=ml_dtypes.bfloat16)
    folder = convert_weights(source, tmp_path / "out", dtype=dtype)
    written = dtype or "bfloat16"
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == written
    for name, value in stored(folder).items():
        assert value.dtype == written
        wanted = random_tensors(TINY, 0)[name].astype(ml_dtypes.bfloat16).astype(value.dtype)
        np.testing.assert_array_equal(value, wanted)
    assert Checkpoint.open(folder).spec.dtype == written


def test_float64_integers_and_buffers(tmp_path, caplog):
    wide = random_tensors(TINY, 0)["model.norm.weight"].astype(np.float64)
    extra = {
        "model.norm.weight": wide,
        "model.embed_tokens.position_ids": np.arange(4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.array([np.inf], np.float32),
    }
    with caplog.at_level(logging.INFO):
        folder = convert_weights(source_of(tmp_path / "in", extra=extra), tmp_path / "out")
    np.testing.assert_array_equal(stored(folder)["model.norm.weight"], wide.astype(np.float32))
    assert stored(folder).keys() == random_tensors(TINY, 0).keys()
    said = [record.message for record in caplog.records]
    assert len(said) == 3
    assert "position_ids" in said[0] and "inv_freq" in said[1] and "float64" in said[2]


def test_tied_heads(tmp_path):
    table = random_tensors(TINY_TIED, 0)[EMBED]
    both = Raw(table.reshape(-1), table.shape, (table.shape[1], 1), key="shared")
    extra = {EMBED: both, HEAD: both}
    tied = convert_weights(source_of(tmp_path / "a", TINY_TIED, extra=extra), tmp_path / "tied")
    assert HEAD not in stored(tied)
    assert Checkpoint.open(tied).spec.tied
    untied = source_of(tmp_path / "b", TINY_TIED, extra=extra, config={"tie_word_embeddings": False})
    both_written = stored(convert_weights(untied, tmp_path / "untied"))
    np.testing.assert_array_equal(both_written[HEAD], both_written[EMBED])


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, None), (np.inf, "float16"), (70000.0, "float16")])
def test_values_that_do_not_fit(tmp_path, value, dtype):
    broken = random_tensors(TINY, 0)["model.norm.weight"].copy()
    broken[3] = value
    source = source_of(tmp_path / "in", extra={"model.norm.weight": broken})
    with pytest.raises(NumericalError, match=r"model\.norm\.weight"):
        convert_weights(source, tmp_path / "out", dtype=dtype)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_damage_found_while_writing_leaves_nothing(tmp_path):
    source = source_of(tmp_path / "in")
    path = source / "pytorch_model.bin"
    raw = bytearray(path.read_bytes())
    at = raw.index(random_tensors(TINY, 0)["model.norm.weight"].tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="checksum of pytorch_model/data/.* does not match: download it again"):
        convert_weights(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def refusal(source, tmp_path):
    with pytest.raises(ModelError) as caught:
        convert_weights(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_parts_that_are_missing_or_disagree(tmp_path):
    source = source_of(tmp_path / "in", parts=3)
    index = source / "pytorch_model.bin.index.json"
    homes = json.loads(index.read_text())["weight_map"]
    first, last = sorted(set(homes.values()))[0], sorted(set(homes.values()))[-1]
    index.write_text(json.dumps({"weight_map": homes | {"absent": first}}))
    assert "disagree about 1 tensors: absent" in refusal(source, tmp_path)
    index.write_text(json.dumps({"weight_map": homes | {EMBED: last}}))
    assert f"disagree about 1 tensors: {EMBED}" in refusal(source, tmp_path)
    for bad in ("../x.bin", "x.safetensors", 5):
        index.write_text(json.dumps({"weight_map": {EMBED: bad}}))
        assert "not plain .bin files" in refusal(source, tmp_path)
    index.unlink()
    (source / last).rename(source / "kept")
    assert f"1 of 3 parts are missing: {last}" in refusal(source, tmp_path)
    (source / last).write_bytes((source / first).read_bytes().replace(first[:-4].encode(), last[:-4].encode()))
    assert "another part holds too" in refusal(source, tmp_path)
    (source / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert "one set of numbered parts" in refusal(source, tmp_path)


def test_other_mistakes(tmp_path):
    source = source_of(tmp_path / "in")
    with pytest.raises(UsageError, match="dtype must be one of"):
        convert_weights(source, tmp_path / "out", dtype="int8")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        convert_weights(source, tmp_path / "taken")
    (source / "config.json").unlink()
    assert "config.json is missing" in refusal(source, tmp_path)
    with pytest.raises((ModelError, StorageError)):
        convert_weights(tmp_path / "absent", tmp_path / "out")


def test_links_that_lead_outside(tmp_path):
    source = source_of(tmp_path / "in")
    (tmp_path / "secret.json").write_text("{}")
    (source / "more.json").symlink_to(tmp_path / "secret.json")
    assert "leads outside" in refusal(source, tmp_path)
    (source / "more.json").unlink()
    (source / "pytorch_model.bin").rename(tmp_path / "w.bin")
    (source / "pytorch_model.bin").symlink_to(tmp_path / "w.bin")
    assert "leads outside" in refusal(source, tmp_path)


MEASURED = """
import resource, sys
from pathlib import Path
from dynajax.convert.weights import convert_weights
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_weights(Path(sys.argv[1]), Path(sys.argv[2]), dtype="float16")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text("{}")
    big = np.ones(2**24, np.float32)  # 64 MiB
    save(source / "pytorch_model.bin", {"a": big, "b": big})
    command = [sys.executable, "-c", MEASURED, source, tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 24 * 2**20
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2**26


@pytest.mark.slow
def test_a_model_that_torch_saved(tmp_path):
    torch = pytest.importorskip("torch")
    source = source_of(tmp_path / "in", parts=2)
    for path in source.glob("*.bin"):
        path.unlink()
    weights = {name: torch.from_numpy(value) for name, value in random_tensors(TINY, 0).items()}
    homes = json.loads((source / "pytorch_model.bin.index.json").read_text())["weight_map"]
    for part in set(homes.values()):
        torch.save({name: weights[name] for name, home in homes.items() if home == part}, source / part)
    folder = convert_weights(source, tmp_path / "out", dtype="bfloat16")
    for name, value in stored(folder).items():
        expected = weights[name].bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(value.view(np.int16), expected)
    assert Checkpoint.open(folder).spec.layers == TINY.layers
